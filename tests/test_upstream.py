"""OpenAI and Hermes as clients see them: real sockets, scripted answers.

Whatever an upstream answers becomes one of our errors, with our code and a sentence for a
person. What it said stays in `detail`, for the log.
"""

import contextlib
import io
import logging
import re
import socket
import threading
import time

import pytest
from scripted_hermes import CLOSED, CUT, HANG, REFUSED, RESET, ScriptedHermes, event, reply, sse, stream

from hermes_voice import (
    ANSWER_LIMIT,
    ConfigError,
    Garbled,
    Hermes,
    OpenAI,
    Refused,
    Unreachable,
    UpstreamError,
    _websocket_messages,
)

TIMEOUT = 10  # seconds
SHORT = 0.05  # seconds, for what is meant to time out
SAID = "words of the upstream"
KEY = "a-key-that-nobody-may-see"
SESSION = {"model": "gpt-live-1", "audio": {"output": {"voice": "marin"}}}
OFFER = "v=0\r\nm=audio 9 UDP/TLS/RTP/SAVPF 111\r\n"
OPENED = reply(201, {"session": {"id": "live_1"}, "transport": {"type": "webrtc", "sdp": "v=0\r\n"}})
STARTED = reply(202, {"run_id": "run_1", "status": "started"})


@pytest.fixture
def serve():
    """A function: start a server with these scripts."""
    with contextlib.ExitStack() as stack:
        yield lambda routes=None: stack.enter_context(ScriptedHermes(routes))


# One call of each client, with the route it takes: what holds for both is tested with both.
def open_session(url):
    return OpenAI(f"{url}/v1", KEY).open_session(SESSION, OFFER)


def start_run(url):
    return Hermes(url, KEY).start({"input": "Say hi"}, "key_1")


def read_status(url):
    return Hermes(url, KEY).status("run_1")


CALLS = [
    pytest.param(("POST", "/v1/live/sessions"), open_session, id="open_session"),
    pytest.param(("POST", "/v1/runs"), start_run, id="start_run"),
    pytest.param(("GET", "/v1/runs/run_1"), read_status, id="read_status"),
]
every_call = pytest.mark.parametrize(("route", "call"), CALLS)


def for_a_person(message):
    """A sentence or more, and nothing of the upstream's."""
    return (
        re.fullmatch(r"[A-Z].*[.]", message) is not None
        and SAID not in message
        and KEY not in message
        and not re.search(r"\b[45]\d\d\b|[{}<>_]", message)
    )


# ---- OpenAI ------------------------------------------------------------------


def test_a_session_is_opened_with_the_offer_as_it_is(serve):
    openai = serve({("POST", "/v1/live/sessions"): [OPENED]})

    assert open_session(openai.url) == ("live_1", "v=0\r\n")

    (seen,) = openai.seen
    assert seen.body == {"session": SESSION, "transport": {"type": "webrtc", "sdp": OFFER}}
    assert seen.headers["Authorization"] == f"Bearer {KEY}"
    assert seen.headers["Content-Type"] == "application/json"


def openai_error(status, code=None, param=None, headers=None):
    envelope = {"error": {"message": SAID, "type": "some_error", "code": code, "param": param}}
    return reply(status, envelope, headers)


OPENAI_REFUSALS = [
    # status, its code, its param, our code, a word of the advice
    (401, "invalid_api_key", None, "openai_key_refused", "key file"),
    (401, None, None, "openai_key_refused", "key file"),
    (403, "live_api_access_denied", None, "openai_no_access", "gpt-live-1"),
    (403, None, None, "openai_no_access", "gpt-live-1"),
    (403, "forbidden", None, "openai_voice_refused", "another"),
    (400, "invalid_value", "session.audio.output.voice", "openai_voice_refused", "another"),
    (400, "model_not_found", "session.model", "openai_no_access", "gpt-live-1"),
    (403, "invalid_model", "session.model", "openai_no_access", "gpt-live-1"),
    (400, "invalid_offer", None, "openai_offer_refused", "Reload"),
    (400, "unknown_parameter", "session.speed", "openai_settings_refused", "log"),
    (400, None, None, "openai_settings_refused", "log"),
    (429, "rate_limit_exceeded", None, "openai_rate_limit", "in a minute"),
    (429, "insufficient_quota", None, "openai_no_credit", "Top it up"),
    (402, "credit_balance_exhausted", None, "openai_no_credit", "Top it up"),
    (403, "billing_hard_limit_reached", None, "openai_no_credit", "Top it up"),
    (404, None, None, "openai_not_found", "--openai-base-url"),
    (500, None, None, "openai_trouble", "Try again"),
    (503, "server_is_overloaded", None, "openai_trouble", "Try again"),
    (418, "something_new", None, "openai_trouble", "Try again"),
]


@pytest.mark.parametrize(("status", "its_code", "param", "code", "advice"), OPENAI_REFUSALS)
def test_a_refused_session_is_explained_and_not_tried_again(serve, status, its_code, param, code, advice):
    openai = serve({("POST", "/v1/live/sessions"): [openai_error(status, its_code, param)]})

    with pytest.raises(Refused) as caught:
        open_session(openai.url)

    error = caught.value
    assert (error.code, error.status, error.answered) == (code, 502, status)
    assert advice in error.message
    assert for_a_person(error.message)
    assert SAID in error.detail
    assert len(openai.seen) == 1


def test_a_refusal_names_the_wait_that_openai_named(serve):
    openai = serve({("POST", "/v1/live/sessions"): [openai_error(429, headers={"Retry-After": "7"})]})

    with pytest.raises(Refused, match="in 7 seconds"):
        open_session(openai.url)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"session": {"id": "live_1"}},
        {"session": "live_1", "transport": {"sdp": "v=0"}},
        {"session": {"id": 5}, "transport": {"sdp": "v=0"}},
        {"session": {"id": "live_1"}, "transport": {"sdp": None}},
        [{"session": {"id": "live_1"}, "transport": {"sdp": "v=0"}}],
        "<html>It works</html>",
        "",
    ],
)
def test_an_answer_without_a_session_is_garbled(serve, body):
    openai = serve({("POST", "/v1/live/sessions"): [reply(200, body)]})

    with pytest.raises(Garbled) as caught:
        open_session(openai.url)

    assert caught.value.code == "openai_garbled"
    assert for_a_person(caught.value.message)


@pytest.mark.parametrize("status", [200, 204, 404])
def test_a_session_that_is_over_counts_as_hung_up(serve, status):
    openai = serve({("POST", "/v1/live/sessions/*/hangup"): [reply(status)]})

    was_open = OpenAI(f"{openai.url}/v1", KEY).hang_up("live_1/..%")

    assert was_open == (status != 404)
    assert openai.seen[0].path == "/v1/live/sessions/live_1%2F..%25/hangup"


def test_a_hang_up_that_is_not_confirmed_is_an_error(serve):
    openai = serve({("POST", "/v1/live/sessions/*/hangup"): [openai_error(500)]})

    with pytest.raises(Refused) as caught:
        OpenAI(f"{openai.url}/v1", KEY).hang_up("live_1")

    assert caught.value.code == "openai_hangup"


@pytest.mark.parametrize("accept", [{}, {"Sec-WebSocket-Accept": "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="}])
def test_who_speaks_no_websocket_is_not_believed_about_a_close(serve, accept):
    """An answer to somebody else's handshake, or to any request."""
    said = frame(TEXT, b'{"type": "session.closed"}') + frame(CLOSE, b"")
    attached = reply(101, said, {"Upgrade": "websocket", "Connection": "Upgrade", **accept})
    openai = serve({("POST", "/v1/live/sessions/*/hangup"): [reply(405)],
                    ("GET", "/v1/live/sessions/*/attach"): [attached]})  # fmt: skip

    with pytest.raises(Refused, match="did not confirm"):
        OpenAI(f"{openai.url}/v1", KEY).hang_up("live_1")


def frame(kind, payload, last=True):
    """A server's WebSocket frame."""
    size = len(payload)
    if size < 126:
        head = bytes([size])
    else:
        head = b"\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x7f" + size.to_bytes(8)
    return bytes([kind | (0x80 if last else 0)]) + head + payload


TEXT, MORE, PING, CLOSE = 1, 0, 9, 8


@pytest.mark.parametrize(
    ("frames", "messages"),
    [
        ([frame(TEXT, b"a"), frame(TEXT, b""), frame(CLOSE, b""), frame(TEXT, b"late")], [b"a", b""]),
        ([frame(TEXT, b"a" * size) for size in (125, 126, 65_535, 65_536)], [125, 126, 65_535, 65_536]),
        ([frame(TEXT, b"a", last=False), frame(PING, b"p"), frame(MORE, b"b")], [b"ab"]),
        ([frame(TEXT, b"a"), b"\x81\x7f" + (1 << 40).to_bytes(8)], [b"a"]),
        ([frame(TEXT, b"a" * (5 << 20), last=False), frame(MORE, b"b" * (5 << 20))], []),
    ],
    ids=["close", "lengths", "pieces", "too long", "too long in pieces"],
)
def test_websocket_messages_are_read_whole(frames, messages):
    stream = io.BufferedReader(io.BytesIO(b"".join([*frames, frame(CLOSE, b"")])))

    found = [*_websocket_messages(stream, time.monotonic() + 60)]

    assert found == [b"a" * each if isinstance(each, int) else each for each in messages]


def test_a_websocket_that_talks_on_is_left_when_the_time_is_over():
    stream = io.BufferedReader(io.BytesIO(frame(TEXT, b"a") * 1000))

    assert [*_websocket_messages(stream, time.monotonic())] == []


# ---- Hermes ------------------------------------------------------------------

HERMES_REFUSALS = [
    # status, our code, a word of the advice
    (400, "hermes_trouble", "log"),
    (401, "hermes_key_refused", "key file"),
    (403, "hermes_key_refused", "key file"),
    (404, "hermes_unknown", "too old"),
    (405, "hermes_trouble", "log"),
    (409, "hermes_conflict", "any more"),
    (413, "hermes_too_large", "too long"),
    (429, "hermes_busy", "in a moment"),
    (500, "hermes_trouble", "log"),
    (503, "hermes_draining", "in a minute"),
]


@pytest.mark.parametrize("body", [{"error": {"message": SAID, "code": None}}, f"500: {SAID}"])
@pytest.mark.parametrize(("status", "code", "advice"), HERMES_REFUSALS)
def test_a_refusal_of_hermes_is_explained_whatever_its_body(serve, body, status, code, advice):
    hermes = serve({("GET", "/v1/runs/*"): [reply(status, body)]})

    with pytest.raises(Refused) as caught:
        read_status(hermes.url)

    error = caught.value
    assert (error.code, error.status, error.answered) == (code, 502, status)
    assert advice in error.message
    assert for_a_person(error.message)
    assert error.detail == str(status)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("1", 1.0),
        ("0.5", 0.5),
        ("0", 0.0),
        ("99999", 3600.0),
        ("-1", None),
        ("", None),
        ("soon", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_a_wait_is_taken_from_retry_after_if_it_is_a_number(serve, header, seconds):
    hermes = serve({("GET", "/v1/runs/*"): [reply(503, headers={"Retry-After": header})]})

    with pytest.raises(Refused) as caught:
        read_status(hermes.url)

    assert caught.value.retry_after == seconds


def test_a_run_is_started_with_its_key(serve):
    hermes = serve({("POST", "/v1/runs"): [STARTED]})

    assert start_run(hermes.url) == "run_1"

    (seen,) = hermes.seen
    assert seen.body == {"input": "Say hi"}
    assert seen.headers["Idempotency-Key"] == "key_1"
    assert seen.headers["Authorization"] == f"Bearer {KEY}"
    # Hermes answers a foreign origin with an empty 403.
    assert "Origin" not in seen.headers


@pytest.mark.parametrize("run_id", [None, 5, "", "run/../1", "run_1 ", "r" * 65, ["run_1"]])
def test_a_started_run_needs_an_id_that_fits_into_a_path(serve, run_id):
    hermes = serve({("POST", "/v1/runs"): [reply(202, {"run_id": run_id})]})

    with pytest.raises(Garbled) as caught:
        start_run(hermes.url)

    assert caught.value.code == "hermes_garbled"


def test_a_base_url_may_have_a_path(serve):
    hermes = serve({("GET", "/behind/a/proxy/v1/runs/run_1"): [reply(200, {"status": "running"})]})

    assert read_status(f"{hermes.url}/behind/a/proxy/") == {"status": "running"}


@pytest.mark.parametrize("status", [200, 404, 409])
def test_stopping_a_run_that_is_over_is_no_error(serve, status):
    hermes = serve({("POST", "/v1/runs/*/stop"): [reply(status, {"status": "stopping"})]})

    Hermes(hermes.url, KEY).stop("run_1")

    assert hermes.seen[0].path == "/v1/runs/run_1/stop"


def test_a_stop_that_fails_is_an_error(serve):
    hermes = serve({("POST", "/v1/runs/*/stop"): [reply(500, "500: Internal Server Error")]})

    with pytest.raises(Refused):
        Hermes(hermes.url, KEY).stop("run_1")


@pytest.mark.parametrize(
    ("bound", "body"),
    [("q_1", {"choice": "once", "request_id": "q_1"}), (None, {"choice": "once"})],
)
def test_an_answer_names_its_question_where_hermes_did(serve, bound, body):
    hermes = serve({("POST", "/v1/runs/*/approval"): [reply(200, {"resolved": 1})]})

    Hermes(hermes.url, KEY).answer("run_1", "once", bound)

    assert hermes.seen[0].body == body


@pytest.mark.parametrize(
    ("answer", "messages"),
    [
        (reply(200, {"data": [{"role": "user"}, 5, None]}), [{"role": "user"}]),
        (reply(200, {"data": None}), []),
        (reply(404, {"error": {"code": "session_not_found"}}), []),
    ],
)
def test_a_transcript_is_a_list_of_messages(serve, answer, messages):
    hermes = serve({("GET", "/api/sessions/c1/messages"): [answer]})

    assert Hermes(hermes.url, KEY).messages("c1") == messages


def test_a_transcript_that_cannot_be_read_is_not_taken_for_an_empty_one(serve):
    cut = reply(200, {"data": [{"role": "user", "content": "Hi"}]}, cut_short=True)
    hermes = serve({("GET", "/api/sessions/c1/messages"): [reply(500), cut]})

    for _ in range(2):
        with pytest.raises(UpstreamError):
            Hermes(hermes.url, KEY).messages("c1")


@pytest.mark.parametrize(
    ("capabilities", "idempotent"),
    [
        ({"features": {"runs_idempotency": {"supported": True, "durable": True}}}, True),
        ({"features": {"run_stop": True}}, False),
        ({"features": {"runs_idempotency": None}}, False),
        ({"features": ["runs_idempotency"]}, False),
        ({"model": "hermes"}, False),
    ],
)
def test_idempotency_is_read_from_the_capabilities(serve, capabilities, idempotent):
    hermes = serve({("GET", "/v1/capabilities"): [reply(200, capabilities)]})

    assert Hermes(hermes.url, KEY).is_idempotent() is idempotent


# ---- both --------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_with_the_key(serve, route, call, status):
    other = serve()
    upstream = serve({route: [reply(status, headers={"Location": f"{other.url}/v1/runs"})]})

    with pytest.raises(Refused):
        call(upstream.url)

    assert len(upstream.seen) == 1
    assert (other.seen, other.connections) == ([], set())


@every_call
def test_a_refused_connection_did_not_carry_the_request(route, call):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))

        with pytest.raises(Unreachable) as caught:
            call(f"http://127.0.0.1:{unused.getsockname()[1]}")

    assert_unreachable(caught.value, "cannot be reached", arrived=False)


@every_call
def test_a_name_that_cannot_be_looked_up_did_not_carry_the_request(route, call):
    with pytest.raises(Unreachable) as caught:
        call("http://hermes..home")

    assert_unreachable(caught.value, "cannot be reached", arrived=False)


BROKEN = {
    "closed without an answer": CLOSED,
    "reset without an answer": REFUSED,
    "body cut by its length": reply(200, {"a": 1}, cut_short=True),
    "body cut in its chunks": stream('{"a":', CUT),
    "body reset in its chunks": stream('{"a":', RESET),
}


@every_call
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_answer_leaves_open_whether_the_request_arrived(serve, route, call, broken):
    upstream = serve({route: [broken]})

    with pytest.raises(Unreachable) as caught:
        call(upstream.url)

    assert_unreachable(caught.value, "cannot be reached", arrived=True)
    assert len(upstream.seen) == 1


@pytest.mark.parametrize("hung", [HANG, stream('{"a":', HANG.steps[0])], ids=["at once", "in the body"])
def test_an_upstream_that_hangs_is_given_up(serve, hung):
    upstream = serve({("GET", "/v1/runs/*"): [hung], ("POST", "/v1/live/sessions"): [hung]})
    hermes, openai = Hermes(upstream.url, KEY), OpenAI(f"{upstream.url}/v1", KEY)
    hermes.read_seconds = openai.read_seconds = SHORT

    for call in (lambda: hermes.status("run_1"), lambda: openai.open_session(SESSION, OFFER)):
        with pytest.raises(Unreachable) as caught:
            call()
        assert_unreachable(caught.value, "did not answer", arrived=True)
    assert len(upstream.seen) == 2


def test_an_answer_that_trickles_is_given_up(serve):
    """Each of its bytes comes in time, all of them do not."""
    hermes = serve({("GET", "/v1/runs/*"): [stream('{"status":', '"running"}')]})
    client = Hermes(hermes.url, KEY)
    client.answer_seconds = 0

    with pytest.raises(Unreachable) as caught:
        client.status("run_1")

    assert_unreachable(caught.value, "did not answer", arrived=True)


def assert_unreachable(error, words, arrived):
    assert error.code in ("openai_unreachable", "hermes_unreachable")
    assert (error.status, error.answered, error.arrived) == (504, None, arrived)
    assert words in error.message
    assert for_a_person(error.message)


@every_call
def test_what_is_no_http_is_unreachable(route, call):
    with RawServer(b"SSH-2.0-OpenSSH_9.2\r\n") as server, pytest.raises(Unreachable) as caught:
        call(server.url)

    assert_unreachable(caught.value, "cannot be reached", arrived=True)


@every_call
@pytest.mark.parametrize(
    "body", ["<html>It works</html>", "", "[]", '"text"', "null", "[" * 100_000, b"\xff\xfe\x00"]
)
def test_an_answer_that_is_no_json_object_is_garbled(serve, route, call, body):
    upstream = serve({route: [reply(200, body)]})

    with pytest.raises(Garbled) as caught:
        call(upstream.url)

    assert caught.value.code in ("openai_garbled", "hermes_garbled")
    assert for_a_person(caught.value.message)


@every_call
def test_an_answer_without_an_end_is_not_read_to_its_end(serve, route, call):
    megabyte = b" " * (1 << 20)
    endless = stream(*[megabyte] * (ANSWER_LIMIT // len(megabyte) + 1), HANG.steps[0])
    upstream = serve({route: [endless]})

    with pytest.raises(Garbled) as caught:
        call(upstream.url)

    assert for_a_person(caught.value.message)


@every_call
def test_a_key_that_the_upstream_quotes_does_not_reach_the_log(serve, route, call, caplog):
    caplog.set_level(logging.DEBUG, "hermes_voice")
    upstream = serve({route: [reply(401, f"wrong: Bearer {KEY}")]})

    with pytest.raises(Refused) as caught:
        call(upstream.url)

    assert "401" in caught.value.detail
    assert KEY not in caught.value.detail + caplog.text


# ---- proxies -----------------------------------------------------------------


@pytest.fixture
def proxy(monkeypatch):
    """A proxy that the environment names, for every scheme and host."""
    with Proxy() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.delenv(name.upper(), raising=False)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield proxy


def test_hermes_is_never_reached_through_a_proxy(serve, proxy):
    hermes = serve({("POST", "/v1/runs"): [STARTED], ("GET", "/v1/runs/*/events"): [stream("x")]})

    start_run(hermes.url)
    events = b"".join(Hermes(hermes.url, KEY).events("run_1").chunks())

    assert events == b"x"
    assert len(hermes.seen) == 2
    assert proxy.asked == []


def test_openai_is_reached_through_the_environment_s_proxy(serve, proxy):
    openai = serve({("POST", "/v1/live/sessions"): [OPENED]})

    assert open_session(openai.url) == ("live_1", "v=0\r\n")

    (asked,) = proxy.asked
    assert asked.startswith(f"CONNECT 127.0.0.1:{openai.port} ".encode())
    # The key is for the far end of the tunnel only.
    assert KEY.encode() not in asked
    assert openai.seen[0].headers["Authorization"] == f"Bearer {KEY}"


def test_a_host_that_needs_no_proxy_is_reached_without(serve, proxy, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    openai = serve({("POST", "/v1/live/sessions"): [OPENED]})

    assert open_session(openai.url) == ("live_1", "v=0\r\n")

    assert proxy.asked == []


def test_a_proxy_that_says_no_did_not_carry_the_request(serve, proxy):
    openai = serve()
    proxy.answer = b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"

    with pytest.raises(Unreachable) as caught:
        open_session(openai.url)

    assert_unreachable(caught.value, "cannot be reached", arrived=False)
    assert openai.seen == []


@pytest.mark.parametrize("named", ["http://proxy:port", "proxy:70000", "http://:3128", "http://"])
def test_a_proxy_that_is_no_address_is_named_at_the_start(monkeypatch, proxy, named):
    monkeypatch.setenv("https_proxy", named)

    with pytest.raises(ConfigError, match="https_proxy in the environment"):
        OpenAI("https://api.openai.example/v1", KEY)


class RawServer:
    """Sends bytes to whoever connects, and closes."""

    def __init__(self, data=b""):
        self.data = data
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(TIMEOUT)

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with connection, contextlib.suppress(OSError):
                    self.serve(connection)

    def serve(self, connection):
        connection.sendall(self.data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


class Proxy(RawServer):
    """An HTTP proxy for tunnels. `asked` are the heads it was sent."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.answer = b"HTTP/1.1 200 Connection established\r\n\r\n"

    def serve(self, connection):
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1)
        self.asked.append(head)
        connection.sendall(self.answer)
        if b" 200 " not in self.answer:
            return
        host, _, port = head.split()[1].decode().rpartition(":")
        with socket.create_connection((host, int(port))) as far:
            there = threading.Thread(target=pump, args=(connection, far))
            there.start()
            pump(far, connection)
            there.join(TIMEOUT)


def pump(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


# ---- event streams -----------------------------------------------------------


def test_events_come_as_they_are_sent(serve):
    gate = threading.Event()
    hermes = serve({("GET", "/v1/runs/run_1/events"): [stream(sse({"n": 1}), gate, sse({"n": 2}))]})

    chunks = Hermes(hermes.url, KEY).events("run_1").chunks()

    assert next(chunks) == sse({"n": 1})
    gate.set()
    assert b"".join(chunks) == sse({"n": 2})


@pytest.mark.parametrize(
    "ending",
    [stream("x"), stream("x", CUT), stream("x", RESET), reply(200, "x"), reply(200, "x", cut_short=True)],
    ids=["ends", "cut", "reset", "whole", "cut short"],
)
def test_every_end_of_a_stream_looks_the_same(serve, ending):
    hermes = serve({("GET", "/v1/runs/run_1/events"): [ending]})

    assert b"".join(Hermes(hermes.url, KEY).events("run_1").chunks()) in (b"x", b"")


def test_a_refused_stream_holds_no_events(serve):
    said = event("run.completed", output="of another run")
    hermes = serve({("GET", "/v1/runs/run_1/events"): [stream(said, status=404)]})

    assert list(Hermes(hermes.url, KEY).events("run_1").chunks()) == []


def test_a_stream_that_is_silent_for_too_long_ends(serve):
    hermes = serve({("GET", "/v1/runs/run_1/events"): [stream("x", HANG.steps[0])]})
    client = Hermes(hermes.url, KEY)
    client.events_seconds = SHORT

    assert list(client.events("run_1").chunks()) == [b"x"]


def test_closing_a_stream_wakes_its_reader(serve):
    hermes = serve({("GET", "/v1/runs/run_1/events"): [stream("x", HANG.steps[0])]})
    events = Hermes(hermes.url, KEY).events("run_1")
    chunks, begun = [], threading.Event()

    def read():
        for chunk in events.chunks():
            chunks.append(chunk)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(TIMEOUT)
    events.close()
    reader.join(TIMEOUT)

    assert not reader.is_alive()
    assert chunks == [b"x"]


def test_a_stream_can_be_closed_at_any_time_and_twice(serve):
    hermes = serve({("GET", "/v1/runs/run_1/events"): [stream("x", HANG.steps[0]), stream("x")]})
    client = Hermes(hermes.url, KEY)

    unread, ended = client.events("run_1"), client.events("run_1")
    assert list(ended.chunks()) == [b"x"]
    for events in (unread, ended, unread, ended):
        events.close()

    assert list(unread.chunks()) in ([], [b"x"])
