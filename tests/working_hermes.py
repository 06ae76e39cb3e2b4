"""A Hermes whose runs last until a test ends them, for what happens meanwhile.

    with WorkingHermes() as hermes:
        ...                                    # a client starts a run
        run = hermes.run()                     # waits for it
        run.emit("tool.started", tool="terminal", preview="ls")
        run.end("completed", output="Three files.")

A stop ends a run as cancelled, an answer to a question is confirmed by an event, and so are
words for a running run. What else a test wants to see answered, once each, it tells with
`hermes.once`.
"""

import dataclasses
import queue
import threading

from scripted_hermes import NOT_FOUND, ScriptedHermes, event, matches, reply, sse, stream

IDEMPOTENT = {"runs_idempotency": {"supported": True, "durable": True, "retention_seconds": 86400}}
RUN_NOT_FOUND = reply(404, {"error": {"message": "Run not found", "code": "run_not_found"}})
NOT_STEERED = reply(409, {"error": {"message": "Not accepting", "code": "run_not_accepting_steer"}})
TIMEOUT = 10  # seconds


class WorkingHermes(ScriptedHermes):
    def __init__(self, idempotent=True, port=0, steers=True):
        super().__init__(port=port)
        self.steers = steers  # as versions before 0.20.4 cannot
        self.features = {"run_submission": True, **(IDEMPOTENT if idempotent else {})}
        self.runs = []
        self.transcripts = {}  # messages by session id
        self.stops_hold = True  # a stop ends its run
        self._once = []

    def run(self, number=1):
        """Wait for the first run, or a later one, and return it."""
        with self._changed:
            found = self._changed.wait_for(lambda: len(self.runs) >= number, TIMEOUT)
            assert found, f"run {number} was not started"
            return self.runs[number - 1]

    def once(self, method, pattern, *replies):
        """Answer the next such requests like this, one reply each."""
        with self._changed:
            self._once += [(method, pattern, answer) for answer in replies]

    def asked(self, method, pattern):
        """The requests of this kind so far."""
        return [r for r in self.seen if r.method == method and matches(pattern, r.path)]

    def take(self, request):
        answer = super().take(request)
        if answer is not NOT_FOUND:
            return answer
        with self._changed:
            for entry in self._once:
                if entry[0] == request.method and matches(entry[1], request.path):
                    self._once.remove(entry)
                    return entry[2]
            return self._answer(request)

    def _answer(self, request):
        root, _, path = request.path.partition("/v1/")
        if root:
            return self._transcript(request)
        if path == "capabilities":
            return reply(200, {"object": "hermes.api_server.capabilities", "features": self.features})
        if (request.method, path) == ("POST", "runs"):
            return self.start(request)
        run_id, _, what = path.removeprefix("runs/").partition("/")
        run = next((run for run in self.runs if run.id == run_id), None)
        return run.answer(what, request) if run else RUN_NOT_FOUND

    def start(self, request):
        """Accept a run."""
        run = Run(self, f"run_{len(self.runs) + 1}", request)
        self.runs.append(run)
        self._changed.notify_all()
        return reply(202, {"run_id": run.id, "status": "started", "replayed": False})

    def _transcript(self, request):
        conversation = request.path.split("/")[3]
        if request.method == "DELETE":
            gone = self.transcripts.pop(conversation, None)
            return NOT_FOUND if gone is None else reply(200, {"deleted": True})
        messages = self.transcripts.get(conversation)
        return NOT_FOUND if messages is None else reply(200, {"object": "list", "data": messages})


class Run:
    """One run of a WorkingHermes. `status` is its status document."""

    def __init__(self, hermes, run_id, request):
        self.id, self.body, self.key = run_id, request.body, request.headers["Idempotency-Key"]
        self.status = {"object": "hermes.run", "run_id": run_id, "status": "running"}
        self.hermes = hermes
        self._steps = queue.SimpleQueue()

    @property
    def followers(self):
        """How often its events were asked for."""
        return len(self.hermes.asked("GET", f"/v1/runs/{self.id}/events"))

    @property
    def stops(self):
        """How often it was told to stop."""
        return len(self.hermes.asked("POST", f"/v1/runs/{self.id}/stop"))

    @property
    def words(self):
        """What it was handed while it ran."""
        return [seen.body["input"] for seen in self.hermes.asked("POST", f"/v1/runs/{self.id}/steer")]

    @property
    def answers(self):
        """The bodies of the answers to its questions."""
        return [seen.body for seen in self.hermes.asked("POST", f"/v1/runs/{self.id}/approval")]

    def emit(self, name, **fields):
        """Send an event."""
        self.send(sse({**event(name, **fields), "run_id": self.id}))

    def ask(self, command="rm -rf /tmp/x", choices=("once", "session", "always", "deny"), **fields):
        """Ask for an approval."""
        self.status["status"] = "waiting_for_approval"
        fields = {"description": "delete", **fields}
        self.emit("approval.request", command=command, choices=choices, **fields)

    def end(self, state, **fields):
        """Reach a final state and say so."""
        self.settle(state, **fields)
        self.emit(f"run.{state}", **fields)
        self.cut(None)

    def settle(self, state, **fields):
        """Reach a final state without a word on the stream."""
        self.status |= {"status": state, **fields}

    def send(self, data):
        """Send bytes on the stream."""
        self._steps.put(data)

    def cut(self, step):
        """End the stream properly (None), or break it with CUT or RESET."""
        self._steps.put(step)

    def answer(self, what, request):
        if what == "events":
            return dataclasses.replace(stream(), steps=self._events())
        if what == "stop":
            if self.hermes.stops_hold and self.status["status"] in ("running", "waiting_for_approval"):
                self.end("cancelled")
            return reply(200, {"run_id": self.id, "status": "stopping"})
        if what == "approval":
            self.status["status"] = "running"
            self.emit("approval.responded", choice=request.body["choice"], resolved=1)
            return reply(200, {"object": "hermes.run.approval_response", "resolved": 1})
        if what == "steer":
            if not self.hermes.steers:
                return NOT_FOUND
            if self.status["status"] != "running":
                return NOT_STEERED
            self.emit("run.steered", accepted=True)
            return reply(200, {"object": "hermes.run.steer", "run_id": self.id, "accepted": True})
        return reply(200, self.status)

    def _events(self):
        yield b""
        while (step := self._steps.get()) is not None:
            yield step


def join_workers():
    """Wait until the workers of all runs have ended, so that none disturbs the next test."""
    for thread in threading.enumerate():
        if thread.name.endswith("(work)"):
            thread.join(TIMEOUT)
            assert not thread.is_alive()
