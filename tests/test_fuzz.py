"""Ten thousand requests that make no sense, against one server.

None may be answered with a 5xx, put a traceback into the log, or leave a thread or a
descriptor behind. The cases are the same in every run, so that a change is judged by what it
changes; another seed looks elsewhere: HERMES_VOICE_FUZZ_SEED=5 pytest tests/test_fuzz.py
"""

import contextlib
import copy
import json
import logging
import os
import random
import re
import socket
import threading
import time

import pytest
from scripted_hermes import reply
from test_server import SECRETS, House
from working_hermes import WorkingHermes, join_workers

from hermes_voice import ROUTES, WrongTokens

SEED = int(os.environ.get("HERMES_VOICE_FUZZ_SEED") or 1)
RAW, BODIES = 5_000, 5_000  # cases
TIMEOUT = 20  # seconds
IDS = ("c1", "c2", "a" * 64, "-", "_")

# What is odd on its own, for any place in a body.
ODD = [
    *(None, True, False, 0, -1, 1.5, 1e308, 10**30, "", " ", "\n", "\x00", "\x7f", "\ud800", "\udfff\ud800"),
    *("\U0001f600", "\u202e", "a\u0300" * 50, "..", "a/b", "%2e%2e", "'", '"', "{}", "null", "NaN", "yes"),
    *([], {}, [[]], [None], {"": ""}, [{}], {"speaker": "user"}, [{"speaker": "user", "text": " "}]),
    *("x" * 3000, "```" * 100, "<script>", "id: 1\ndata: x", "v=0", "v=0\r\nm=audio", "user", "once", "deny"),
]
LINES = [
    {"speaker": "user", "text": "Work.", "key": "k1"},
    {"speaker": "assistant", "text": "Yes?", "key": "k2"},
]
WELL_FORMED = {
    "/session": {"sdp": "v=0\r\nm=audio 9\r\n", "voice": "marin", "conversation": "c1", "history": LINES},
    "/session/meter": {"session_id": "live_1", "seconds": 61.5},
    "/session/close": {"session_id": "live_1", "seconds": 61.5, "reason": "server_error"},
    "/delegate": {"hermes_session": "c1", "lines": LINES, "delegation_id": "d1"},
    "/runs/<id>/stop": {},
    "/runs/<id>/delivered": {"page": "p1", "told": True},
    "/conversations/<id>/lines": {"lines": LINES},
    "/pair": {"code": "a" * 32},
    "/approve": {"run_id": "abc", "request_id": "q_1", "choice": "once", "heard": "Yes."},
}


class QuickHermes(WorkingHermes):
    """A Hermes whose runs end at once."""

    def start(self, request):
        answer = super().start(request)
        self.runs[-1].end("completed", output="Done.")
        return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    (folder / "index.html").write_text("The page")
    return folder


@pytest.fixture
def house(folder, caplog):
    """A running server with a token, between upstreams that do all that they are asked."""
    caplog.set_level(logging.INFO, "hermes_voice")
    opened = {"session": {"id": "live_1"}, "transport": {"type": "webrtc", "sdp": "v=0 answer\r\n"}}
    with contextlib.ExitStack() as stack:
        stack.callback(join_workers)
        house = House(stack, folder, access=SECRETS["access"], hermes=QuickHermes(), connections=50)
        house.openai.add("POST", "/v1/live/sessions", reply(201, opened))
        house.openai.add("POST", "/v1/live/sessions/*/hangup", reply(200))
        yield house.start()


def leftovers():
    """What a connection or a run could leave behind."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def wait_until_nothing_is_left(house, before):
    with house.app.changed:  # as long as a call is up, a thread watches its time
        house.app.live_session = ""
        house.app.changed.notify_all()
    until = time.monotonic() + TIMEOUT
    while any(now > then for now, then in zip(leftovers(), before, strict=True)):
        if time.monotonic() > until:
            names = sorted(thread.name for thread in threading.enumerate())
            raise AssertionError(f"seed {SEED}: {leftovers()} after {before}: {names}")
        time.sleep(0.01)
    assert house.server.waiting == {}
    assert house.server.streams == 0


def wrong_in(data):
    """The statuses of answers that a client may never see."""
    return [status for status in re.findall(rb"^HTTP/1\.[01] (\d{3})", data, re.M) if status[:1] == b"5"]


def check_log(caplog, case):
    crashed = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not crashed, f"seed {SEED}, {case}: {crashed}\n{caplog.text[-3000:]}"
    caplog.clear()


# ---- bytes -------------------------------------------------------------------

TOKENS = [
    *(
        b"GET",
        b"POST",
        b"HEAD",
        b"DELETE",
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b"\x00",
        b"\xff\xfe",
        b" ",
        b"\t",
    ),
    *(
        b":",
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"HTTP/0.9",
        b"HTTP/1.1\r\nHost: localhost",
        b"/",
        b"//",
        b"..",
        b"%00",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"5\r\nabcde\r\n",
    ),
    *(b"Expect: 100-continue\r\n", b"Connection: keep-alive\r\n", b"Connection: close\r\n", b"Host: x\r\n"),
    *(
        b"Origin: null\r\n",
        b"X-Forwarded-For: 1.2.3.4\r\n",
        b"Upgrade: websocket\r\n",
        b"{",
        b"}",
        b'"',
        b"\\u0000",
    ),
    *(b"X: " + b"y" * 5000 + b"\r\n", b"x" * 5000, b"X: y\r\n" * 120, b"\x16\x03\x01\x02\x00"),
]


def well_formed_requests(port):
    """A request for each route, as bytes."""
    for method, path, *_ in ROUTES:
        body = json.dumps(WELL_FORMED.get(path, {})).encode() if method == "POST" else b""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"Host: localhost:{port}\r\nAuthorization: Bearer {SECRETS['access']}\r\n{kind}"
        path = path.replace("<id>", "abc") + ("?conversation=c1" if path == "/runs" else "")
        yield f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def spoil(data, chance):
    """The bytes, with up to four things wrong."""
    data = bytearray(data)
    for _ in range(chance.randint(0, 4)):
        at = chance.randrange(len(data) + 1)
        upto = min(len(data), at + chance.choice((1, 1, 2, 5, 30)))
        change = chance.randrange(6)
        if change == 0:
            data[at:upto] = b""
        elif change == 1:
            data[at:at] = chance.choice(TOKENS)
        elif change == 2:
            data[at:upto] = chance.randbytes(upto - at)
        elif change == 3:
            data[at:at] = data[at : at + chance.randrange(60)]
        elif change == 4:
            del data[at:]
        else:
            data[at:upto] = bytes(data[at:upto]).swapcase()
    return bytes(data)


def talk(port, data, chance):
    """Send bytes in pieces, hang up in one of three ways, and return what was answered."""
    received = b""
    with (
        socket.create_connection(("127.0.0.1", port), TIMEOUT) as client,
        contextlib.suppress(ConnectionError),
    ):
        for piece in pieces(data, chance):
            client.sendall(piece)
        ending = chance.randrange(10)
        if ending == 0:
            return b""  # it hangs up without reading
        client.shutdown(socket.SHUT_WR)
        if ending == 1:
            return client.recv(10)
        while chunk := client.recv(1 << 16):
            received += chunk
    return received


def pieces(data, chance):
    """The bytes cut at odd places."""
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice((0, 0, 0, 1, 1, 3, 7))))
    return [
        data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if data[start:end]
    ]


def test_spoiled_requests_do_no_harm(house, caplog):
    chance = random.Random(SEED)
    requests = list(well_formed_requests(house.port))
    before = leftovers()

    for number in range(RAW):
        data = b"".join(chance.choices(requests, k=chance.choice((1, 1, 1, 2, 3))))
        data = spoil(data, chance)
        quiet(house)
        answered = talk(house.port, data, chance)
        # An unknown method or version is what the client did wrong; HTTP says 501 and 505 for it.
        wrong = set(wrong_in(answered)) - {b"501", b"505"}
        assert not wrong, f"seed {SEED}, case {number}: {wrong} for {data!r}"
        check_log(caplog, f"case {number}: {data!r}")

    wait_until_nothing_is_left(house, before)
    assert house.ask("GET", "/healthz").status == 200


def quiet(house):
    """Let neither limit of rates hide what is behind it."""
    house.app.starts.clear()
    house.server.wrong_tokens = WrongTokens()


# ---- bodies ------------------------------------------------------------------


def odd_value(chance, depth=0):
    """Any JSON value."""
    kind = chance.randrange(8)
    if kind < 6 or depth > 3:
        return copy.deepcopy(chance.choice(ODD))
    if kind == 6:
        return [odd_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    keys = ["text", "speaker", "key", "id", "", "sdp"]
    return {chance.choice(keys): odd_value(chance, depth + 1) for _ in range(chance.randrange(4))}


def spoiled_body(body, chance):
    """The body with some of its values, at any depth, replaced, left out or added to."""
    body = json.loads(json.dumps(body))
    for _ in range(chance.randint(0, 3)):
        inner = body
        while isinstance(inner, dict | list) and inner and chance.random() < 0.5:
            inner = inner[chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))]
        if isinstance(inner, dict):
            key = chance.choice([*inner, "more"])
            if chance.random() < 0.2:
                inner.pop(key, None)
            else:
                inner[key] = odd_value(chance)
        elif isinstance(inner, list):
            inner.insert(chance.randint(0, len(inner)), odd_value(chance))
    return body if chance.random() < 0.97 else odd_value(chance)


def odd_query(chance):
    keys = ["conversation", "after", "x", ""]
    values = [*IDS, "..", "%00", "%ff", "-1", "99999999999", "1e3", "%F0%9F%98%80", "&&", "="]
    return "&".join(f"{chance.choice(keys)}={chance.choice(values)}" for _ in range(chance.randrange(3)))


def test_spoiled_bodies_do_no_harm(house, caplog):
    chance = random.Random(SEED + 1)
    routes = [(method, path) for method, path, *_ in ROUTES]
    run_ids = ["abc"]
    before = leftovers()

    with house.connect() as connection:
        for number in range(BODIES):
            method, pattern = chance.choice(routes)
            path = f"{pattern.replace('<id>', chance.choice([*IDS, *run_ids]))}?{odd_query(chance)}"
            body = spoiled_body(WELL_FORMED[pattern], chance) if method == "POST" else None
            if isinstance(body, dict) and "run_id" in body and chance.random() < 0.5:
                body["run_id"] = chance.choice(run_ids)
            quiet(house)
            data = None if body is None else json.dumps(body).encode()
            answer = connection.ask(method, path, data)
            assert answer.status < 500, (
                f"seed {SEED}, case {number}: {answer.status} for {method} {path} {body!r}"
            )
            check_log(caplog, f"case {number}: {method} {path} {body!r}")
            if pattern == "/delegate" and answer.status == 200:
                run_ids = [*run_ids[-20:], json.loads(answer.data.splitlines()[0])["run_id"]]
            if answer.will_close:
                connection.socket.close()
                connection.__init__(house)

    assert len(run_ids) > 1, f"seed {SEED}: no request was accepted"
    wait_until_nothing_is_left(house, before)
