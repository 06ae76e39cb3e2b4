"""Canaries: what must not get out goes through whole flows, then every place is searched for it.

Secrets and SDP may be in no log line at any level, in no answer and in no file. What was
said, commanded and answered may be in answers and in the journal, and in the log at DEBUG only.
"""

import contextlib
import json
import logging

import pytest
from scripted_hermes import reply
from test_server import RECEIVED, SECRETS, House, opened
from working_hermes import join_workers

from hermes_voice import LOG_FORMATS, Journal, Warnings

SDP = "v=0\r\nm=audio 9\r\na=ice-ufrag:canary-ufrag\r\na=ice-pwd:canary-ice-password\r\n"
ANSWER = "v=0\r\na=ice-pwd:canary-answered-password\r\n"
IN_SDP = ["canary-ufrag", "canary-ice-password"]
SAID = [
    "canary-request-words",
    "canary-history-words",
    "canary-heard-words",
    "canary-line-words",
    "canary-command",
    "canary-answer-words",
    "canary-progress-words",
    "canary-error-words",
]
WRONG_TOKEN = "canary-wrong-token"


@pytest.fixture(params=LOG_FORMATS)
def written(request):
    """All that the log holds: (level, line) in the order of writing."""
    logger, formatter = logging.getLogger("hermes_voice"), LOG_FORMATS[request.param]()
    lines, handler, level = [], logging.Handler(), logger.level
    handler.emit = lambda record: lines.append((record.levelno, formatter.format(record)))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def house(tmp_path):
    """A running server with a token and a journal."""
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "index.html").write_text("The page")
    RECEIVED.clear()
    with contextlib.ExitStack() as stack:
        stack.callback(join_workers)
        house = House(stack, tmp_path / "static", access=SECRETS["access"])
        house.app.journal = Journal(tmp_path / "state")
        house.state = tmp_path / "state"
        yield house.start()


def echo(status, *quoted):
    """An upstream's refusal that quotes all it was sent."""
    return reply(status, {"error": {"message": f"cannot do that: {' '.join(quoted)}", "code": "odd"}})


def open_calls(house):
    history = [{"speaker": "user", "text": "canary-history-words, if you remember."}]
    body = {"sdp": SDP, "history": history}
    for answer in (
        echo(400, SECRETS["openai"], SDP, history[0]["text"]),
        echo(401, f"Bearer {SECRETS['openai']}"),
        reply(500, f"<pre>{json.dumps(body)} {SECRETS['openai']}</pre>"),
        reply(200, {"session": SDP, "transport": SECRETS["openai"]}),
    ):
        house.openai.add("POST", "/v1/live/sessions", answer)
        assert house.ask("POST", "/session", body).status == 502
    house.openai.add("POST", "/v1/live/sessions", opened())
    house.openai.add("POST", "/v1/live/sessions/live_1/hangup", echo(500, SECRETS["openai"]), reply(200))
    assert house.ask("POST", "/session", body).status == 200
    house.ask("POST", "/session/close", {"session_id": "live_1"})


def do_work(house):
    lines = [{"key": "k1", "speaker": "user", "text": "canary-line-words"}]
    assert house.ask("POST", "/conversations/c1/lines", {"lines": lines}).status == 200
    house.hermes.once("POST", "/v1/runs/*/approval", echo(503, SECRETS["hermes"], "canary-command"))
    stream = house.delegate("canary-request-words, please.", delegation_id="d1")
    run = house.hermes.run()
    run.emit("tool.started", tool="terminal", preview="canary-command --all")
    run.emit("message.interim", text="canary-progress-words come first.")
    run.ask(command="canary-command --all", request_id="q_1")
    stream.wait("approval")
    for heard in ("canary-heard-words", "Yes."):
        house.ask("POST", "/approve", {"run_id": stream.run_id, "heard": heard})
    house.ask("POST", "/approve", {"run_id": stream.run_id, "choice": "deny"})
    run.send(b"data: {canary-answer-words\n\n")
    run.settle("completed", output="canary-answer-words, and that is all.")
    run.cut(None)
    assert "canary-answer-words" in stream.read()[-1]["show"]


def fail_to_work(house):
    asked = "canary-request-words once more."
    house.hermes.once("POST", "/v1/runs", echo(400, SECRETS["hermes"], asked))
    house.delegate(asked).read()
    stream = house.delegate("canary-request-words for the third time.")
    house.hermes.run(2).end("failed", error="canary-error-words of a tool")
    stream.read()


def knock(house):
    for headers in (
        {"Authorization": f"Bearer {WRONG_TOKEN}"},
        {"Authorization": f"Basic {WRONG_TOKEN}"},
        {"Origin": f"http://{WRONG_TOKEN}.example"},
        {"Cookie": f"token={SECRETS['access']}", "Authorization": None},
    ):
        house.ask("GET", f"/config?token={SECRETS['access']}", **headers)
        house.server.warnings = Warnings()
    house.raw(f"{SECRETS['access']}\r\n\r\n".encode())
    house.raw(f"GET / HTTP/1.1\r\nHost: localhost\r\nBad {SECRETS['access']}\r\n\r\n".encode())
    house.ask("POST", "/approve", b'{"sdp": "' + SDP.encode())
    house.ask("POST", "/session", {"sdp": SDP[4:]})
    house.ask("POST", "/session", {"sdp": SDP, "voice": WRONG_TOKEN})


def test_what_must_not_get_out_is_nowhere(house, written):
    open_calls(house)
    do_work(house)
    fail_to_work(house)
    knock(house)
    house.app.openai.open_session = None
    assert house.ask("POST", "/session", {"sdp": SDP}).status == 500

    events = "\n".join(line for _, line in written)
    for event in ("session.opened", "session.unclosed", "approval.failed", "run.trouble", "run.garbled",
                  "request.refused", "request.malformed", "request.crashed", "run.updated"):  # fmt: skip
        assert event in events
    secret = [*SECRETS.values(), *IN_SDP, WRONG_TOKEN]
    for level, line in written:
        private = secret + ["canary-answered-password"] + (SAID if level > logging.DEBUG else [])
        assert not [canary for canary in private if canary in line], line
    answers = "\n".join(RECEIVED)
    assert not [canary for canary in secret if canary in answers]
    files = b"".join(path.read_bytes() for path in house.state.iterdir())
    assert b"canary-request-words" in files
    assert not [canary for canary in secret if canary.encode() in files]
