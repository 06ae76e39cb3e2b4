"""An OpenAI-compatible chat model whose answers a test chooses. Standard library only.

A directive in the newest user message picks the answer; options follow its name, values
with spaces in quotes. The last directive counts, and without one the model repeats the words:

    Tidy up, please. [[danger path="/tmp/some dir" n=2]]

The scenarios below are the directives. A scenario sees nothing but the request, so parallel
runs do not disturb each other. Hermes also asks for things beside a run, session titles for
example: those requests offer no tools and get a short fixed answer.

    with ScriptedModel() as model:
        ...                                # a Hermes whose base_url is model.url
        assert model.requests[-1].scenario == "tool"
"""

import json
import re
import shlex
import threading
import time
import uuid
from collections import deque, namedtuple
from http.server import BaseHTTPRequestHandler

from scripted_hermes import QuietServer

NAME = "scripted-model"
# A long end-to-end test makes some fifty requests; older ones are of no use to it.
KEPT_REQUESTS = 200
USAGE = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}

DIRECTIVE = re.compile(r"\[\[([a-z]+)(\s[^\[\]]*)?\]\]")
# Hermes delivers a steer as a user message of its own between two such marks.
STEER = re.compile(r"\[OUT-OF-BAND USER MESSAGE[^\]]*\]\n(.*?)\n\[/", re.DOTALL)


# ---- what the model is asked -------------------------------------------------


class Asked:
    """One request to the model, as scenarios and assertions look at it."""

    def __init__(self, body):
        self.body = body
        self.messages = body["messages"]
        self.roles = [message["role"] for message in self.messages]
        self.users = [spoken(text) for text in texts("user", self.messages)]
        self.system = "\n".join(texts("system", self.messages))
        newest = newest_user_index(self.messages)
        self.content = self.messages[newest]["content"]
        self.text = text_of(self.messages[newest])
        # Tool rounds done, their results and the steers read since the newest user message.
        since = self.messages[newest + 1 :]
        self.rounds = sum(1 for message in since if message.get("tool_calls"))
        self.results = texts("tool", since)
        self.steers = STEER.findall("\n".join(texts("user", since)))
        # How often the same was asked before; `record` counts it, and only `error` looks.
        self.repeats = 0
        self.scenario, self.options = directive_in(self.text)
        if not body.get("tools"):
            self.scenario = "auxiliary"

    def outcome(self):
        """A short account of the tool results and steers, to end an answer with."""
        blocked = sum("BLOCKED" in result for result in self.results)
        account = f"{len(self.results)} tool results, {blocked} blocked."
        return account + "".join(f" Steered: {steer}" for steer in self.steers)


def newest_user_index(messages):
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == "user" and not STEER.search(text_of(messages[index])):
            return index
    return -1  # No user at all: the last message stands in, which no directive is in.


def texts(role, messages):
    return [text_of(message) for message in messages if message["role"] == role]


def text_of(message):
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content)


def spoken(text):
    return DIRECTIVE.sub("", text).strip()


def directive_in(text):
    """Name and options of the last directive in a text."""
    for name, options in reversed(DIRECTIVE.findall(text)):
        if name in SCENARIOS:
            return name, dict(word.partition("=")[::2] for word in shlex.split(options))
    return "plain", {}


# ---- scenarios: what the model answers ---------------------------------------

# A scenario yields text, or one of these. A command goes to Hermes's terminal tool; one
# that reads a FIFO waits for the test. A pause of None lasts until `model.release()`.
Command = namedtuple("Command", "command")
Pause = namedtuple("Pause", "seconds")
Failure = namedtuple("Failure", "status")


def plain(asked):
    """Repeat the words."""
    yield f"You said: {spoken(asked.text)}"


def slow(asked):
    """Answer in many deltas. Options: deltas (30), delay in seconds (0.2)."""
    for number in range(int(asked.options.get("deltas", 30))):
        yield f"word{number} "
        yield Pause(float(asked.options.get("delay", 0.2)))


def tool(asked):
    """Run one command, then answer. Options: cmd (echo hello)."""
    if asked.rounds == 0:
        yield Command(asked.options.get("cmd", "echo hello"))
    else:
        yield f"The command ran. {asked.outcome()}"


def steps(asked):
    """Run commands one by one; a steer ends it early. Options: n (4), delay in seconds (1)."""
    total = int(asked.options.get("n", 4))
    if asked.rounds < total and not asked.steers:
        yield Command(f"sleep {asked.options.get('delay', 1)}; echo step {asked.rounds + 1}")
    else:
        yield f"Did {asked.rounds} of {total} steps. {asked.outcome()}"


def danger(asked):
    """Delete paths one by one, each of which asks for approval. Options: path (a made-up
    one), n (1; with more, their number is appended to the path)."""
    total = int(asked.options.get("n", 1))
    if asked.rounds < total:
        path = asked.options.get("path", "/tmp/hermes-voice-no-such-folder")
        yield Command(f"rm -rf {shlex.quote(path + (str(asked.rounds + 1) if total > 1 else ''))}")
    else:
        yield f"Done with the dangerous part. {asked.outcome()}"


def commentary(asked):
    """Talk before running a command, then answer. Options: cmd (echo looked)."""
    if asked.rounds == 0:
        yield "Let me look that up first."
        yield Command(asked.options.get("cmd", "echo looked"))
    else:
        yield f"Here is the answer. {asked.outcome()}"


def error(asked):
    """Fail. Options: status (500), times (for ever): answer after so many failures."""
    times = asked.options.get("times")
    if times is None or asked.repeats < int(times):
        yield Failure(int(asked.options.get("status", 500)))
    else:
        yield f"Recovered after {times} failures."


def hang(asked):
    """Send nothing, not even a status line, until the test calls `model.release()`."""
    yield Pause(None)
    yield "Finally awake."


def report(asked):
    """Tell as JSON what the model was sent. Options: find (text to look for in the system
    prompt)."""
    parts = asked.content if isinstance(asked.content, list) else [{"type": "text"}]
    told = {
        "roles": asked.roles,
        "users": asked.users,
        "parts": [part["type"] for part in parts],
        "system_has": asked.options.get("find", "") in asked.system,
    }
    yield json.dumps(told, ensure_ascii=False)


def long(asked):
    """A long answer. Options: sentences (100)."""
    for number in range(int(asked.options.get("sentences", 100))):
        yield f"This is sentence {number + 1} of a long answer. "


def table(asked):
    """A sentence to speak, then a Markdown table and code to read."""
    yield "Two of your disks are nearly full.\n\n---\n\n"
    yield "| disk | used |\n| --- | --- |\n| `/` | **91 %** |\n| `/home` | 88 % |"
    yield "\n\n```sh\ndf -h / /home\n```\n"


def empty(asked):
    """Finish without a word."""
    yield ""


def auxiliary(asked):
    """What every request without tools gets."""
    yield "A short talk"


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(plain, slow, tool, steps, danger, commentary, error, hang),
        *(report, long, table, empty, auxiliary),
    )
}


# ---- the server --------------------------------------------------------------


class ScriptedModel:
    """The model as an object; `url` is what clients call the base URL."""

    def __init__(self):
        self._lock = threading.Lock()
        self._requests = deque(maxlen=KEPT_REQUESTS)
        self._released = threading.Event()
        self._stopped = threading.Event()
        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._server.model = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stopped.set()
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def requests(self):
        """What the model was asked, oldest first, auxiliary requests included."""
        with self._lock:
            return list(self._requests)

    def release(self):
        """Let every answer that hangs, also later ones, go on."""
        self._released.set()

    def record(self, asked):
        with self._lock:
            same = (asked.text, asked.rounds)
            asked.repeats = sum((old.text, old.rounds) == same for old in self._requests)
            self._requests.append(asked)

    def pause(self, seconds):
        """Wait. Raise ConnectionAbortedError when the model is stopped meanwhile."""
        if seconds is None:
            self._released.wait()
        if self._stopped.wait(seconds or 0):
            raise ConnectionAbortedError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        """Stay silent: `model.requests` is the log."""

    def do_GET(self):
        # Hermes looks a model's context length up here, and refuses to start with a small one.
        self.send_json(200, {"data": [{"id": NAME, "object": "model", "context_length": 200_000}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            # Hermes tries whether this is an Ollama.
            return self.send_json(404, {"error": {"message": "No such route."}})
        asked = Asked(body)
        self.server.model.record(asked)
        self.streaming = False
        try:
            self.answer(asked)
        except ConnectionError:  # Hermes gave the answer up, or the test is over.
            self.close_connection = True

    def answer(self, asked):
        stream = asked.body.get("stream")
        text, calls = "", []
        for step in SCENARIOS[asked.scenario](asked):
            match step:
                case Failure(status):
                    return self.send_json(status, {"error": {"message": "Failed as told to."}})
                case Pause(seconds):
                    self.server.model.pause(seconds)
                    continue
                case Command(command):
                    calls.append(tool_call(command))
                    deltas = [{"tool_calls": [{"index": 0, **calls[0]}]}]
                case _:
                    text += step
                    deltas = [{"content": piece} for piece in re.findall("(?s).{1,12}", step)]
            for delta in deltas if stream else ():
                self.send_chunk(delta)
        finish = "tool_calls" if calls else "stop"
        if stream:
            self.send_chunk({}, finish)
            self.send_event(completion([], usage=USAGE))
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            message = {"role": "assistant", "content": text, "tool_calls": calls or None}
            choice = {"index": 0, "message": message, "finish_reason": finish}
            self.send_json(200, completion([choice], object="chat.completion", usage=USAGE))

    def send_json(self, status, answer):
        self.send_response(status)
        body = json.dumps(answer).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_chunk(self, delta, finish=None):
        """Send a piece of the answer. The head goes with the first piece, not before, so
        that a scenario can still fail or hang."""
        if not self.streaming:
            self.streaming = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.send_chunk({"role": "assistant", "content": ""})
        self.send_event(completion([{"index": 0, "delta": delta, "finish_reason": finish}]))

    def send_event(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def tool_call(command):
    """A call of Hermes's terminal tool. No scenario makes two in one answer."""
    function = {"name": "terminal", "arguments": json.dumps({"command": command})}
    return {"id": f"call_{uuid.uuid4().hex[:8]}", "type": "function", "function": function}


def completion(choices, object="chat.completion.chunk", **more):
    head = {"id": "chatcmpl-scripted", "object": object, "created": int(time.time())}
    return {**head, "model": NAME, "choices": choices, **more}
