"""A Hermes that answers what a test has written down. Real sockets, standard library only.

    gate = threading.Event()
    with ScriptedHermes({
        ("POST", "/v1/runs"): [reply(202, {"run_id": "run_1", "status": "started"})],
        ("GET", "/v1/runs/*/events"): [stream(event("message.delta", delta="Hi"), gate, CUT)],
    }) as hermes:
        ...                                   # a client of hermes.url with hermes.key
        hermes.wait_for("GET", "/v1/runs/*/events")
        gate.set()
        assert hermes.seen[0].body == {"input": "Say hi"}

A `*` in a path stands for one segment; queries are ignored unless a script names one.
Replies are used up in order, and the last one is repeated. A path without a script gets
Hermes's plain-text 404.

`replay` makes a script from a recorded trace.
"""

import contextlib
import enum
import functools
import json
import math
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Break(enum.Enum):
    CUT = "close the connection, in the middle of a body if there is one"
    RESET = "the same with a TCP reset"


CUT, RESET = Break


# ---- replies -----------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """A head, and steps: bytes are sent, an Event is waited for, a function is called, CUT
    and RESET end it. The head goes out before the first bytes, be they empty."""

    status: int = 200
    headers: dict = field(default_factory=dict)
    steps: tuple = ()

    @property
    def chunked(self):
        return "Transfer-Encoding" in self.headers


# Nothing is answered until the server stops.
HANG = Reply(steps=(threading.Event(), CUT))
# The connection ends before any byte of an answer.
CLOSED = Reply(steps=(CUT,))
REFUSED = Reply(steps=(RESET,))


def reply(status=200, body=b"", headers=None, after=None, cut_short=False):
    """Answer, if told so after an Event. A body is bytes, a text or else JSON. `cut_short`
    announces one byte more than it sends, and closes the connection."""
    if isinstance(body, bytes):
        kind, data = "application/octet-stream", body
    elif isinstance(body, str):
        kind, data = "text/plain; charset=utf-8", body.encode()
    else:
        kind, data = "application/json; charset=utf-8", json.dumps(body).encode()
    head = {"Content-Type": kind, "Content-Length": str(len(data) + cut_short)}
    steps = (after, data, CUT if cut_short else None)
    return Reply(status, head | (headers or {}), tuple(s for s in steps if s is not None))


def stream(*steps, status=200, headers=None, after=None):
    """Answer with server-sent events, one chunk for each bytes, text or dictionary among the
    steps. The head goes out at once, or after an Event."""
    head = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
    first = (after, b"") if after else (b"",)
    return Reply(status, head | (headers or {}), first + tuple(map(_step, steps)))


def _step(step):
    if isinstance(step, dict):
        return sse(step)
    return step.encode() if isinstance(step, str) else step


def event(name, **fields):
    """An event of a run, worded as Hermes does."""
    return {"event": name, "run_id": "run_1", "timestamp": 1_800_000_000.5, **fields}


def sse(fields, number=None):
    """An event as a frame of Hermes 0.19, or, with a number, of 0.22."""
    if number is None:
        return b"data: " + json.dumps(fields).encode() + b"\n\n"
    return b"id: %d\n" % number + sse({**fields, "seq": number})


NOT_FOUND = reply(404, "404: Not Found")


# ---- the server --------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A request. The body is decoded JSON, bytes if it is none, None if there is none."""

    method: str
    path: str
    headers: dict  # of any case: headers["authorization"]
    body: object


class ScriptedHermes:
    """The server as an object. `port` brings one back where another was."""

    def __init__(self, routes=None, port=0):
        self.key = secrets.token_hex(24)
        self.seen = []
        self.connections = set()
        self._changed = threading.Condition()
        self._scripts = {}
        for (method, pattern), replies in (routes or {}).items():
            self.add(method, pattern, *replies)
        self._server = Server(("127.0.0.1", port), Handler)
        self._server.hermes = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def stop(self):
        """Vanish like a killed process: every connection ends where it is."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def add(self, method, pattern, *replies):
        """Append replies to a script, also while the server runs."""
        with self._changed:
            self._scripts.setdefault((method, pattern), Script()).replies.extend(replies)

    def take(self, request):
        """Note a request and return the reply that is its turn."""
        with self._changed:
            self.seen.append(request)
            self._changed.notify_all()
            for (method, pattern), script in self._by_precision(request.path):
                if method == request.method and matches(pattern, request.path):
                    return script.next()
        return NOT_FOUND

    def _by_precision(self, path):
        """The scripts, first the one for exactly this path, query included."""
        return sorted(self._scripts.items(), key=lambda item: item[0][1] != path)

    def wait_for(self, method, pattern, count=1, timeout=10):
        """Wait until so many such requests were seen, and return the last of them."""

        def found():
            return [r for r in self.seen if r.method == method and matches(pattern, r.path)]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= count, timeout):
                seen = [f"{request.method} {request.path}" for request in self.seen]
                raise AssertionError(f"{method} {pattern} did not come, only {seen}")
            return found()[count - 1]


class Script:
    """Replies in order, the last one for ever."""

    def __init__(self):
        self.replies = deque()
        self._last = NOT_FOUND

    def next(self):
        if self.replies:
            self._last = self.replies.popleft()
        return self._last


def matches(pattern, path):
    """Does a path match, with its query or without?"""
    expression = re.escape(pattern).replace(r"\*", "[^/?]+") + r"(\?.*)?"
    return re.fullmatch(expression, path) is not None


class QuietServer(ThreadingHTTPServer):
    """A server whose clients may vanish at any moment, as killed processes do."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Server(QuietServer):
    request_queue_size = 128

    def shutdown_request(self, request):
        # Without the FIN that the base class sends first, which would hide a reset.
        self.close_request(request)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        """Stay silent: `hermes.seen` is the log."""

    def setup(self):
        super().setup()
        self.server.hermes.connections.add(self.connection)

    def finish(self):
        self.server.hermes.connections.discard(self.connection)
        super().finish()

    def serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
        with contextlib.suppress(ValueError, TypeError):
            body = json.loads(body)
        try:
            self.send(self.server.hermes.take(Seen(self.command, self.path, self.headers, body)))
        except ConnectionError:  # The client has gone, or the server was stopped.
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = serve

    def send(self, answer):
        head_sent = False
        for step in answer.steps:
            if isinstance(step, bytes):
                if not head_sent:
                    self.send_head(answer)
                    head_sent = True
                self.send_piece(step, answer.chunked)
            elif isinstance(step, threading.Event):
                step.wait()
            elif isinstance(step, Break):
                self.break_off(step)
                return
            else:
                step()
        if answer.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def send_head(self, answer):
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_piece(self, piece, chunked):
        if chunked and piece:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self.wfile.write(piece)

    def break_off(self, how):
        self.close_connection = True
        if how is RESET:
            linger_not = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_not)


# ---- traces ------------------------------------------------------------------

# What a recorder wrote in place of the middle of a long stream.
LEFT_OUT = re.compile(r"\(\d+ chunks left out\)")


def replay(path, speed=0, in_step=False):
    """A server that answers as a recorded trace does: requests of one method and path in
    their order, streams chunk by chunk, broken ones broken.

    A speed of 1 keeps the recorded pauses, 2 halves them, 0 leaves them out. `in_step` holds
    each chunk back until the POSTs that were made before it have been made and answered.
    """
    hermes = ScriptedHermes()
    trace = json.loads(Path(path).read_text().replace("<API_SERVER_KEY>", hermes.key))
    exchanges = [
        (exchange["request"]["method"], exchange, threading.Event())
        for exchange in trace["exchanges"]
        if "request" in exchange
    ]
    posts = [(e["at"], answered) for method, e, answered in exchanges if method == "POST"]
    for method, exchange, answered in exchanges:
        recorded = _recorded(exchange, answered, posts if in_step else [], speed)
        hermes.add(method, exchange["request"]["path"], recorded)
    return hermes


def _recorded(exchange, answered, posts, speed):
    """The reply to one recorded request, which waits for posts and tells of its own end."""
    if "response" not in exchange:
        return REFUSED
    response = exchange["response"]
    headers = {k: v for k, v in response["headers"].items() if k != "Content-Length"}
    chunks = [(at, text.encode()) for at, text in response["chunks"] if not LEFT_OUT.match(text)]
    if "Transfer-Encoding" not in headers:
        # Placeholders have changed the length.
        headers["Content-Length"] = str(sum(len(data) for _, data in chunks))
    # Itself is not waited for, nor what was sent at the same moment.
    steps, clock = [], math.nextafter(exchange["at"], math.inf)
    for at, data in [(response["at"], b""), *chunks]:
        steps += [post for posted, post in posts if clock <= posted < at]
        if speed and at > clock:
            steps.append(functools.partial(time.sleep, (at - clock) / speed))
        steps.append(data)
        clock = at
    steps.append(CUT if "aborted" in response else answered.set)
    return Reply(response["status"], headers, tuple(steps))
