"""A Hermes that works by itself, counts what it really did, and can be crashed and come back.

    with CrashingHermes(idempotent=True, plans={"r1": Plan(steps=3)}, at=print) as hermes:
        ...                                 # a client asks for "[r1] ..."
        hermes.crash()                      # every connection ends, nobody listens
        hermes.come_back()                  # on the same port, with what it has on its disk
        assert hermes.works["r1"] == ["completed"]

With `idempotent` it is Hermes 0.22: a run started with a key is found again by it, also after
a crash, which makes it `interrupted`. Without, it is 0.19: keys are ignored, a crash forgets
every run, and an event stream can be read once. Stored messages outlive a crash in both.

`at(point, token)` is called where a test may want to strike: `arrived` before a run is
taken, `taken` before that is answered, `following` when an event or a status was sent, `final`
when its end was. What comes back is done to the connection: None, or CUT. `faults` lists what no
client may do.
"""

import random
import re
import threading
from collections import Counter
from dataclasses import dataclass, field

from scripted_hermes import CUT, Reply, ScriptedHermes, event, reply, sse, stream
from working_hermes import IDEMPOTENT, RUN_NOT_FOUND

TOKEN = re.compile(r"\[(r\d+)\]")
KEYS = {"input", "session_id", "instructions", "conversation_history"}
STEP = (0.02, 0.1)  # seconds of one step of work, at least and at most
FINAL = {"completed", "failed", "cancelled", "interrupted"}


@dataclass(frozen=True)
class Plan:
    """How one request goes at Hermes."""

    steps: int = 2
    end: str = "completed"


@dataclass
class Work:
    """A run of Hermes. Its events are kept; `changed` of its Hermes guards it."""

    id: str
    token: str
    body: dict
    key: str
    status: str = "running"
    left: int = 1
    events: list = field(default_factory=list)
    streams: int = 0

    def document(self):
        """What its status answers."""
        end = {"completed": {"output": f"Did [{self.token}].\n\n---\n\nAll of [{self.token}]."}}
        errors = {"failed": "The model gave up.", "interrupted": "The gateway restarted."}
        more = end.get(self.status) or ({"error": errors[self.status]} if self.status in errors else {})
        return {"object": "hermes.run", "run_id": self.id, "status": self.status, **more}


class Door(ScriptedHermes):
    """One life of its server."""

    def __init__(self, store, port):
        self.store = store
        super().__init__(port=port)
        self.key = store.key or self.key

    def take(self, request):
        return self.store.answer(request, self)


class CrashingHermes:
    def __init__(self, idempotent, plans, at, seed=0):
        self.idempotent, self.plans, self.at = idempotent, plans, at
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.runs, self.keys, self.transcripts = {}, {}, {}  # by id, by key, by session
        self.works = {}  # the runs of each token, as their last status says
        self.count = Counter()
        self.faults = []
        self.key = ""
        self.door = Door(self, 0)
        self.key, self.port, self.url = self.door.key, self.door.port, self.door.url
        self.over = threading.Event()
        self.worker = threading.Thread(target=self.work, daemon=True)

    def __enter__(self):
        self.door.__enter__()
        self.worker.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self.worker.join()
        self.crash()

    # ---- crashing

    def crash(self):
        """Vanish as a killed process does."""
        with self.changed:
            door, self.door = self.door, None
            if door is None:
                return
            self.count["crashes"] += 1
            for run in self.runs.values():
                if run.status not in FINAL:
                    run.status = "interrupted"
                run.events = None  # Streams do not outlive the process.
            if not self.idempotent:
                self.runs.clear()
            self.changed.notify_all()
        door.stop()

    def come_back(self):
        """Start again on the same port."""
        with self.changed:
            self.door = Door(self, self.port)
            self.door.__enter__()

    # ---- working

    def work(self):
        """Bring every run a step further, again and again."""
        while not self.over.wait(self.random.uniform(*STEP)):
            with self.changed:
                for run in list(self.runs.values()):
                    if run.status not in FINAL and self.door is not None:
                        self.step(run)
                self.changed.notify_all()

    def step(self, run):
        """One step of a run's work, the last of which ends it."""
        run.left -= 1
        if run.left > 0:
            tool = {"tool": "terminal", "preview": run.token}
            over = event("tool.completed", **tool, duration=0.1, error=False)
            run.events += [event("tool.started", **tool), over]
            return
        run.status = self.plans[run.token].end
        document = run.document()
        more = {key: document[key] for key in ("output", "error") if key in document}
        run.events.append(event(f"run.{run.status}", **more))
        if run.status == "completed":
            said = {"role": "assistant", "content": more["output"]}
            self.transcripts[run.body["session_id"]].append(said)

    # ---- answering

    def fault(self, *what):
        self.faults.append(" ".join(map(str, what)))

    def answer(self, request, door):
        """The reply to a request."""
        self.count["requests"] += 1
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            self.fault("no key", request.path)
        route = f"{request.method} {request.path}"
        if route == "GET /v1/capabilities":
            return reply(200, {"features": IDEMPOTENT if self.idempotent else {"run_submission": True}})
        if route == "POST /v1/runs":
            return self.start(request, door)
        if found := re.fullmatch(r"GET /api/sessions/([\w-]+)/messages", route):
            with self.changed:
                return reply(200, {"object": "list", "data": list(self.transcripts.get(found[1], []))})
        if found := re.fullmatch(r"GET /v1/runs/(\w+)(/events)?", route):
            with self.changed:
                run = self.runs.get(found[1])
                if run is None or door is not self.door:
                    return RUN_NOT_FOUND
                return self.events(run) if found[2] else self.status(run)
        self.fault("nobody asks for", route)
        return RUN_NOT_FOUND

    def status(self, run):
        answer, point = reply(200, run.document()), "final" if run.status in FINAL else "following"
        return Reply(200, answer.headers, (*answer.steps, lambda: self.at(point, run.token)))

    def start(self, request, door):
        """Take a run, once for each key that outlives a crash."""
        body, key = request.body, request.headers.get("Idempotency-Key") or ""
        if body is None or isinstance(body, bytes):
            return Reply(steps=(CUT,))  # Who sent it died meanwhile.
        found = TOKEN.findall(body["input"]) if isinstance(body, dict) else []
        if len(found) != 1 or set(body) - KEYS or not re.fullmatch(r"[!-~]{1,255}", key):
            self.fault("a strange start", request.body, key)
            return reply(400, {"error": {"message": "No", "code": None}})
        token = found[0]
        if self.at("arrived", token):
            return Reply(steps=(CUT,))
        with self.changed:
            if door is not self.door:
                return Reply(steps=(CUT,))
            known = self.keys.get(key) if self.idempotent else None
            if known and known.body != body:
                self.fault("another body for the key", key, known.body, body)
                return reply(409, {"error": {"message": "No", "code": "idempotency_key_conflict"}})
            run = known or self.take(token, body, key)
            self.count["replayed"] += known is not None
            told = {"run_id": run.id, "status": run.status if known else "started", "replayed": bool(known)}
        return Reply(steps=(CUT,)) if self.at("taken", token) else reply(202, told)

    def take(self, token, body, key):
        """Really begin to work."""
        number = self.random.getrandbits(64)
        run = Work(f"run_{number:032x}", token, body, key, left=self.plans[token].steps)
        self.runs[run.id] = self.keys[key] = run
        self.works.setdefault(token, []).append(run)
        said = {"role": "user", "content": body["input"]}
        self.transcripts.setdefault(body["session_id"], []).append(said)
        return run

    def events(self, run):
        run.streams += 1
        if run.streams > 1 and not self.idempotent:
            self.fault("a second reader of", run.token)
        return RUN_NOT_FOUND if run.events is None else Reply(200, stream().headers, self.frames(run))

    def frames(self, run):
        """Its events as they come, as pieces of a stream."""
        yield b""
        for number in range(1000):
            with self.changed:
                self.changed.wait_for(lambda n=number: run.events is None or len(run.events) > n, 30)
                new = run.events[number] if run.events and len(run.events) > number else None
            if new is None:
                yield CUT
                return
            yield sse(new, number if self.idempotent else None)
            over = new["event"].startswith("run.")
            if self.at("final" if over else "following", run.token):
                yield CUT
            if over:
                return
