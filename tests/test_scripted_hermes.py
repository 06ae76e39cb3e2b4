"""The scripted Hermes does what its scripts say, on real sockets."""

import contextlib
import http.client
import json
import threading

import pytest
from scripted_hermes import (
    CLOSED,
    CUT,
    HANG,
    REFUSED,
    ScriptedHermes,
    event,
    replay,
    reply,
    sse,
    stream,
)

TIMEOUT = 10  # seconds


class Client:
    def __init__(self, hermes, stack):
        self.connection = http.client.HTTPConnection("127.0.0.1", hermes.port, timeout=TIMEOUT)
        self.key = hermes.key
        self.stack = stack
        stack.callback(self.connection.close)

    def open(self, method, path, body=None):
        headers = {"Authorization": f"Bearer {self.key}"}
        self.connection.request(method, path, body and json.dumps(body), headers)
        return self.stack.enter_context(self.connection.getresponse())

    def read(self, method, path, body=None):
        response = self.open(method, path, body)
        return response.status, response.read()


@pytest.fixture
def connect():
    with contextlib.ExitStack() as stack:
        yield lambda hermes: Client(hermes, stack)


def test_replies_come_in_order_and_the_last_is_repeated(connect):
    routes = {("GET", "/v1/runs/*"): [reply(503), reply(200, {"status": "completed"})]}
    with ScriptedHermes(routes) as hermes:
        client = connect(hermes)

        answers = [client.read("GET", "/v1/runs/run_1") for _ in range(3)]

        done = (200, b'{"status": "completed"}')
        assert answers == [(503, b""), done, done]
        hermes.add("GET", "/v1/runs/*", reply(404, "gone"))
        assert client.read("GET", "/v1/runs/run_1") == (404, b"gone")


def test_requests_are_seen_with_headers_and_decoded_body(connect):
    with ScriptedHermes({("POST", "/v1/runs"): [reply(202)]}) as hermes:
        connect(hermes).read("POST", "/v1/runs", {"input": "Say hi"})

        (seen,) = hermes.seen
        assert (seen.method, seen.path, seen.body) == ("POST", "/v1/runs", {"input": "Say hi"})
        assert seen.headers["authorization"] == f"Bearer {hermes.key}"


def test_a_star_stands_for_one_segment_and_the_rest_is_404(connect):
    with ScriptedHermes({("GET", "/v1/runs/*"): [reply()]}) as hermes:
        client = connect(hermes)

        assert client.read("GET", "/v1/runs/run_1?limit=5")[0] == 200
        assert client.read("GET", "/v1/runs/run_1/events") == (404, b"404: Not Found")
        assert client.read("POST", "/v1/runs/run_1") == (404, b"404: Not Found")


def test_a_script_that_names_a_query_comes_first(connect):
    routes = {
        ("GET", "/v1/runs/*"): [reply(200, "any")],
        ("GET", "/v1/runs/run_1"): [reply(200, "this run")],
        ("GET", "/v1/runs/run_1?after=2"): [reply(200, "this query")],
    }
    with ScriptedHermes(routes) as hermes:
        client = connect(hermes)
        paths = ["/v1/runs/run_1?after=2", "/v1/runs/run_1", "/v1/runs/run_2?after=2"]

        answers = [client.read("GET", path)[1] for path in paths]

        assert answers == [b"this query", b"this run", b"any"]


def test_a_stream_waits_for_the_test_between_two_events(connect):
    gate = threading.Event()
    events = [event("message.delta", delta="Hi"), event("run.completed", output="Hi")]
    script = stream(": open\n\n", sse(events[0], 0), gate, events[1])
    with ScriptedHermes({("GET", "/v1/runs/*/events"): [script]}) as hermes:
        response = connect(hermes).open("GET", "/v1/runs/run_1/events")
        first = b": open\n\n" + sse(events[0], 0)

        assert response.read(len(first)) == first
        assert response.getheader("Content-Type") == "text/event-stream"
        gate.set()
        assert response.read() == sse(events[1])


@pytest.mark.parametrize(
    "broken", [stream(event("message.delta"), CUT), reply(200, {"a": 1}, cut_short=True)]
)
def test_a_body_that_is_cut_has_no_end(connect, broken):
    with ScriptedHermes({("GET", "/"): [broken]}) as hermes:
        response = connect(hermes).open("GET", "/")

        with pytest.raises(http.client.IncompleteRead):
            response.read()


@pytest.mark.parametrize(
    ("broken", "error"), [(CLOSED, http.client.RemoteDisconnected), (REFUSED, ConnectionError)]
)
def test_a_connection_can_end_without_an_answer(connect, broken, error):
    with ScriptedHermes({("GET", "/"): [broken]}) as hermes:
        client = connect(hermes)

        with pytest.raises(error):
            client.open("GET", "/")


def test_a_reset_is_not_mistaken_for_an_end(connect):
    with ScriptedHermes({("GET", "/"): [REFUSED]}) as hermes:
        client = connect(hermes)

        with pytest.raises(ConnectionResetError) as caught:
            client.open("GET", "/")
        assert not isinstance(caught.value, http.client.RemoteDisconnected)


def test_a_held_reply_comes_when_the_test_lets_it(connect):
    gate = threading.Event()
    with ScriptedHermes({("GET", "/health"): [reply(200, "ok", after=gate)]}) as hermes:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(connect(hermes).read("GET", "/health")))
        asking.start()

        hermes.wait_for("GET", "/health")
        assert answers == []
        gate.set()
        asking.join(TIMEOUT)
        assert answers == [(200, b"ok")]


def test_stopping_ends_a_hanging_connection_and_another_takes_the_port(connect):
    failures = []

    def ask(hermes):
        try:
            connect(hermes).open("GET", "/health")
        except ConnectionError as error:
            failures.append(error)

    with ScriptedHermes({("GET", "/health"): [HANG]}) as hermes:
        asking = threading.Thread(target=ask, args=(hermes,))
        asking.start()
        hermes.wait_for("GET", "/health")
        hermes.stop()
        asking.join(TIMEOUT)
        assert len(failures) == 1

    with ScriptedHermes({("GET", "/health"): [reply(200, "back")]}, hermes.port) as again:
        assert connect(again).read("GET", "/health") == (200, b"back")


def test_waiting_for_a_request_that_does_not_come_says_what_came(connect):
    with ScriptedHermes() as hermes:
        connect(hermes).read("GET", "/health")

        with pytest.raises(AssertionError, match="GET /health"):
            hermes.wait_for("POST", "/v1/runs", timeout=0)


# ---- traces ------------------------------------------------------------------

RUN = "/v1/runs/run_7"


def recorded(method, path, at, chunks, **response):
    headers = {"Authorization": "Bearer <API_SERVER_KEY>"}
    kind = {"Transfer-Encoding": "chunked"} if path.endswith("/events") else {}
    answer = {"at": at, "status": 200, "reason": "OK", "headers": kind, "chunks": chunks}
    request = {"method": method, "path": path, "headers": headers}
    return {"at": at, "request": request, "response": answer | response}


@pytest.fixture
def trace(tmp_path):
    exchanges = [
        recorded("GET", RUN, 0.0, [[0.0, '{"status": "running", "key": "<API_SERVER_KEY>"}']]),
        recorded(
            "GET",
            f"{RUN}/events",
            0.1,
            [[0.1, "data: asked\n\n"], [0.2, "(9 chunks left out)"], [0.9, "data: done\n\n"]],
            ended=0.9,
        ),
        recorded("POST", f"{RUN}/approval", 0.5, [[0.5, '{"resolved": 1}']], ended=0.5),
        {"at": 1.0, "note": "the gateway was killed"},
        recorded("GET", f"{RUN}/events", 1.1, [[1.2, "data: again\n\n"]], aborted=[1.3, "x"]),
        {"at": 1.4, "request": {"method": "GET", "path": RUN}, "error": {"text": "refused"}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"hermes": "0.19.0", "exchanges": exchanges}))
    return path


def test_a_trace_is_replayed_request_by_request(connect, trace):
    with replay(trace) as hermes:
        client = connect(hermes)

        status = json.loads(client.read("GET", RUN)[1])
        assert status == {"status": "running", "key": hermes.key}
        assert client.read("GET", f"{RUN}/events") == (200, b"data: asked\n\ndata: done\n\n")
        with pytest.raises(http.client.IncompleteRead, match="13 bytes read"):
            client.read("GET", f"{RUN}/events")
        with pytest.raises(ConnectionResetError):
            connect(hermes).read("GET", RUN)


def test_a_replay_in_step_waits_for_the_posts_of_the_trace(connect, trace):
    with replay(trace, in_step=True) as hermes:
        response = connect(hermes).open("GET", f"{RUN}/events")
        first = b"data: asked\n\n"

        assert response.read(len(first)) == first
        assert connect(hermes).read("POST", f"{RUN}/approval", {"choice": "once"})[0] == 200
        assert response.read() == b"data: done\n\n"
