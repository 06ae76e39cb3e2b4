"""An App between its upstreams, and a page that follows its runs, for tests of the handlers."""

import dataclasses
import itertools
import threading

from scripted_hermes import ScriptedHermes
from working_hermes import WorkingHermes

import hermes_voice
from hermes_voice import App, Config, Conflict, Hermes, OpenAI, Request, Waits

TIMEOUT = 10  # seconds
SOON = 0.01  # seconds, for what a test waits out
RESTART = Config(on_new_request="restart")
QUEUE = Config(on_new_request="queue")


class Bench:
    """An App between its upstreams."""

    def __init__(
        self, stack, idempotent=True, hermes=None, config=None, clock=None, journal=None, wall=None, **waits
    ):
        self.hermes = hermes or stack.enter_context(WorkingHermes(idempotent))
        self.openai = stack.enter_context(ScriptedHermes())
        self.app = App(
            config or Config(),
            None,
            OpenAI(f"{self.openai.url}/v1", self.openai.key),
            Hermes(self.hermes.url, self.hermes.key),
            journal,
            **({"clock": clock} if clock else {}),
            **({"wall": wall} if wall else {}),
        )
        self.app.waits = Waits(**{"first": SOON, "slowest": SOON, "start": (SOON,) * 4} | waits)
        self.conversations = set()
        stack.callback(self.close)

    def close(self):
        """Let streams and workers end."""
        end_runs(self.app, self.conversations)
        self.app.close()

    def delegate(self, text, delegation=None, conversation="c1", before=()):
        """Say something that becomes a run, and follow it."""
        body = {"hermes_session": conversation, "lines": [*before, {"speaker": "user", "text": text}]}
        body |= {"delegation_id": delegation} if delegation else {}
        self.conversations.add(conversation)
        return Follower(hermes_voice.post_delegate(self.app, Request(body=body)))

    def follow(self, run_id, after=0):
        request = Request((run_id,), {"after": str(after)})
        return Follower(hermes_voice.get_updates(self.app, request))

    def stop(self, run_id):
        return hermes_voice.post_stop(self.app, Request((run_id,)))

    def approve(self, **body):
        return hermes_voice.post_approve(self.app, Request(body=body)).body

    def runs(self, conversation="c1"):
        request = Request(query={"conversation": conversation})
        return hermes_voice.get_runs(self.app, request).body["runs"]

    def deliver(self, run_id, page="p1", **more):
        """Claim to tell of a run's end, or say what became of that. Return the refusal's code, or ""."""
        try:
            hermes_voice.post_delivered(self.app, Request((run_id,), body={"page": page, **more}))
        except Conflict as conflict:
            return conflict.code
        return ""

    def start_call(self, gone=lambda: False, **body):
        body = {"sdp": "v=0\r\nm=audio 9\r\n", **body}
        return hermes_voice.post_session(self.app, Request(body=body, gone=gone))

    def meter(self, session_id, **body):
        """What the page of a session is told about its time."""
        request = Request(body={"session_id": session_id, **body})
        return hermes_voice.post_session_meter(self.app, request).body["seconds_left"]

    def close_call(self, session_id, **body):
        return hermes_voice.post_session_close(self.app, Request(body={"session_id": session_id, **body}))

    def session(self, session_id):
        """What the journal knows of a session."""
        return next(each for each in self.app.journal.sessions(-1) if each.id == session_id)


def end_runs(app, conversations):
    """End all runs, and those that their unread words become as soon as Hermes is gone."""
    app.waits = dataclasses.replace(app.waits, start=(), away=-1)
    with app.changed:
        for run in itertools.chain.from_iterable(map(app.book.of, conversations)):
            run.publish(run.stream.give_up("unknown", "The test is over."))
        app.changed.notify_all()


class Follower:
    """Reads the updates of an answer on a thread of its own, as the server does."""

    def __init__(self, updates):
        self.updates = []
        self.ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(updates.batches,))
        self._thread.start()
        self.run_id = self.wait("run")["run_id"]

    def _read(self, batches):
        for batch in batches:
            with self._changed:
                self.updates += batch
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def of(self, kind, **fields):
        """The updates of a type, with these fields, so far."""
        wanted = {"type": kind, **fields}
        return [u for u in list(self.updates) if all(u.get(key) == wanted[key] for key in wanted)]

    def wait(self, kind, count=1, **fields):
        """Wait for so many such updates and return the last of them."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or len(self.of(kind, **fields)) >= count, TIMEOUT)
            found = self.of(kind, **fields)
            assert len(found) >= count, (kind, fields, self.updates)
            return found[count - 1]

    def done(self):
        """Wait for the end and return the final update."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), self.updates
        final = [update for update in self.updates if update["type"] in ("done", "error")]
        assert final == self.updates[-1:]
        return final[0]
