"""`--demo`: from a fresh clone, with the plain interpreter, without keys, in a real browser.

And its stand-in for Hermes, as the real client sees it, beside what a real Hermes was
recorded to say.
"""

import json
import re
from pathlib import Path

import pytest

import hermes_voice
from hermes_voice import (
    RUN_UPDATES,
    SCENES,
    Config,
    ConfigError,
    DemoHermes,
    Hermes,
    Refused,
    RunStream,
    build_server,
    parse_arguments,
    pick_scene,
)

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "fixtures" / "hermes-0.22.2"
QUICK = 0.01  # of the time that people get


# ---- the stand-in, through the real client -----------------------------------


@pytest.fixture
def serve():
    """A function: start a stand-in and return a client of it."""
    started = []

    def serve(**options):
        started.append(DemoHermes(**{"pace": QUICK, **options}))
        return Hermes(started[-1].url, started[-1].key)

    yield serve
    for demo in started:
        demo.shutdown()
        demo.server_close()


def run_scene(hermes, asked, on=None):
    """Run a request and return its events; `on` holds what to do when an event of a name comes."""
    run_id = hermes.start({"input": asked, "session_id": "talk"}, asked)
    events, rest = [], ""
    for chunk in hermes.events(run_id).chunks():
        *lines, rest = (rest + chunk.decode()).split("\n")
        for event in [json.loads(line[6:]) for line in lines if line.startswith("data: ")]:
            events.append(event)
            if on and event["event"] in on:
                on[event["event"]](run_id, event)
    return run_id, events


def names(events):
    return [event["event"] for event in events]


def recorded(name):
    """The events of a recorded run that the client understands, without what only models send."""
    exchanges = json.loads((RECORDED / f"{name}.json").read_text())["exchanges"]
    streams = [
        e["response"]["chunks"] for e in exchanges if e.get("request", {}).get("path", "").endswith("/events")
    ]
    text = "".join(chunk for _, chunk in streams[0])
    return [
        e
        for e in map(json.loads, re.findall(r"^data: (.*)$", text, re.MULTILINE))
        if e["event"] in RUN_UPDATES
    ]


def test_its_events_have_the_names_and_keys_of_a_real_hermes(serve):
    hermes = serve()
    allow = {"approval.request": lambda run_id, event: hermes.answer(run_id, "once", event["request_id"])}
    steer = {"tool.started": lambda run_id, event: hermes.steer(run_id, "also this")}
    stop = {"tool.started": lambda run_id, event: hermes.stop(run_id)}
    played = [
        *run_scene(hermes, "Delete the old snapshots", allow)[1],
        *run_scene(hermes, "What is the disk usage?", steer)[1],
        *run_scene(hermes, "Try something that fails")[1],
        *run_scene(hermes, "Look through the logs", stop)[1],
    ]
    traces = ["approval_request_id", "commentary", "steer", "llm_error", "stop_tool"]
    real = {}
    for event in [event for name in traces for event in recorded(name)]:
        real.setdefault(event["event"], set()).update(event)

    assert {event["event"] for event in played} == set(real)
    for event in played:
        assert set(event) <= real[event["event"]], event["event"]
    assert [event["seq"] for event in run_scene(hermes, "hello")[1]] == [0]


def test_a_question_has_the_order_of_events_of_a_real_one(serve):
    hermes = serve()
    allow = {"approval.request": lambda run_id, event: hermes.answer(run_id, "once", event["request_id"])}

    _, events = run_scene(hermes, "Delete the old snapshots", allow)

    asked = names(events)[names(events).index("approval.request") - 1 :]
    assert asked == [*names(recorded("approval_once"))[:4], "run.completed"]


@pytest.mark.parametrize(
    ("choice", "words"), [("once", "deleted eleven"), ("deny", "left the snapshots alone")]
)
def test_a_question_waits_for_its_answer_and_obeys_it(serve, choice, words):
    hermes = serve()
    answer = {"approval.request": lambda run_id, event: hermes.answer(run_id, choice, event["request_id"])}

    run_id, events = run_scene(hermes, "Delete the old snapshots", answer)

    assert words in events[-1]["output"]
    assert hermes.status(run_id)["status"] == "completed"


def test_a_question_that_nobody_answers_is_a_no(serve):
    hermes = serve(approval_seconds=0.05)

    run_id, events = run_scene(hermes, "Delete the old snapshots")

    assert "left the snapshots alone" in events[-1]["output"]
    with pytest.raises(Refused) as refused:
        hermes.answer(run_id, "once", None)
    assert refused.value.answered == 409


def test_an_answer_to_another_question_changes_nothing(serve):
    hermes = serve()
    refusals = []

    def answer(run_id, event):
        with pytest.raises(Refused) as refused:
            hermes.answer(run_id, "once", "another")
        refusals.append(refused.value.answered)
        assert hermes.status(run_id)["status"] == "waiting_for_approval"
        hermes.answer(run_id, "deny", event["request_id"])

    _, events = run_scene(hermes, "Delete the old snapshots", {"approval.request": answer})

    assert refusals == [409]
    assert "left the snapshots alone" in events[-1]["output"]


def test_words_are_read_at_the_next_tools_end_and_told_in_the_answer(serve):
    hermes = serve()
    steer = {"tool.started": lambda run_id, event: hermes.steer(run_id, "In gigabytes, please.")}

    _, events = run_scene(hermes, "What is the disk usage?", steer)

    assert events[-1]["output"].startswith("You also said: In gigabytes, please. The disk")
    assert "pending_steer" not in events[-1]


def test_words_after_the_last_tool_come_back_unread(serve):
    hermes = serve(pace=1)
    run_id = hermes.start({"input": "What can you do?"}, "key")

    hermes.steer(run_id, "Hurry up.")

    chunks = b"".join(hermes.events(run_id).chunks()).decode()
    assert '"pending_steer": "Hurry up."' in chunks
    assert "You also said" not in chunks


@pytest.mark.parametrize("at", ["tool.started", "approval.request"])
def test_a_stop_ends_the_run_wherever_it_is(serve, at):
    hermes = serve(pace=1 if at == "tool.started" else QUICK)

    run_id, events = run_scene(
        hermes, "Delete the old snapshots", {at: lambda run_id, event: hermes.stop(run_id)}
    )

    assert names(events)[-2:] == ["tool.completed", "run.cancelled"]
    assert hermes.status(run_id)["status"] == "cancelled"


def test_a_start_that_is_repeated_finds_its_run(serve):
    hermes = serve()

    assert hermes.is_idempotent()
    assert hermes.start({"input": "a"}, "key") == hermes.start({"input": "a"}, "key")
    assert hermes.start({"input": "a"}, "other") != hermes.start({"input": "a"}, "key")


def test_it_knows_no_other_runs_no_transcripts_and_no_other_key(serve):
    hermes = serve()

    assert hermes.messages("talk") == []
    hermes.forget("talk")
    with pytest.raises(Refused) as unknown:
        hermes.status("run_1")
    with pytest.raises(Refused) as stranger:
        Hermes(f"http://{hermes._host}:{hermes._port}", "x" * 48).is_idempotent()
    assert (unknown.value.answered, stranger.value.answered) == (404, 401)


def test_runs_are_forgotten_beyond_the_limit(serve, monkeypatch):
    monkeypatch.setattr(hermes_voice, "RUNS_LIMIT", 2)
    hermes = serve()

    run_ids = [hermes.start({"input": "hello"}, f"key{n}") for n in range(3)]

    with pytest.raises(Refused):
        hermes.status(run_ids[0])
    assert hermes.status(run_ids[2])["run_id"] == run_ids[2]
    assert hermes.start({"input": "hello"}, "key0") not in run_ids


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ("What is the disk usage?", 0),
        ("delete the old snapshots", 1),
        ("Compare the backup plans", 2),
        ("Look through the logs.", 3),
        ("Try something that fails", 4),
        ("Since the last request:\nUser: Delete it.\nVoice assistant: One moment.\nUser: And the disk?", 0),
    ],
)
def test_a_scene_is_picked_by_the_newest_words(asked, number):
    assert pick_scene(asked) is SCENES[number][1]


@pytest.mark.parametrize("asked", ["What can you do?", "Show me the diskette", "", "User: "])
def test_other_words_get_the_help(asked):
    assert "This is a demo" in pick_scene(asked)[0][1]


def test_every_scene_ends_and_reads_as_an_answer(serve):
    hermes = serve()
    allow = {"approval.request": lambda run_id, event: hermes.answer(run_id, "once", event["request_id"])}
    for words, _ in SCENES:
        stream = RunStream()
        _, events = run_scene(hermes, words.split()[0], allow)
        updates = [u for e in events for u in stream.feed(f"data: {json.dumps(e)}\n\n".encode(), 0)]

        assert updates[-1]["type"] == "done"
        assert updates[-1]["say"]
        assert not re.search(r"[|`#]|---", " ".join(updates[-1]["say"]))


# ---- the flags ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--hermes-url", "http://127.0.0.1:1"], "--hermes-url: a demo uses no service and no key"),
        (["--hermes-key-file", "key"], "--hermes-key-file: a demo uses no service and no key"),
        (["--openai-key-file", "key"], "--openai-key-file: a demo uses no service and no key"),
        (["--openai-base-url", "http://127.0.0.1:1"], "--openai-base-url: a demo uses no service and no key"),
        (["--listen", "0.0.0.0:0"], "--listen 0.0.0.0:0: a demo is for this machine only"),
    ],
)
def test_a_demo_with_keys_or_for_others_is_refused(tmp_path, flags, problem):
    token = tmp_path / "token"
    token.write_text("a-token-for-tests-1234")
    token.chmod(0o600)
    args = parse_arguments(["--demo", "--listen", "127.0.0.1:0", "--access-token-file", str(token), *flags])

    with pytest.raises(ConfigError) as refused:
        build_server(args, {"HOME": str(tmp_path)})

    assert [found.partition(";")[0] for found in refused.value.problems] == [problem]


def test_a_demo_leaves_the_machines_hermes_alone(tmp_path, monkeypatch):
    home = tmp_path / ".hermes"
    home.mkdir()
    (home / ".env").write_text("API_SERVER_KEY=canary-hermes-key\nOPENAI_API_KEY=canary-openai-key\n")
    args = parse_arguments(["--demo", "--listen", "127.0.0.1:0"])

    server, warnings = build_server(args, {"HOME": str(tmp_path), "STATE_DIRECTORY": str(tmp_path / "state")})

    server.server_close()
    assert server.app.openai is None
    assert server.app.hermes._key not in (home / ".env").read_text()
    assert warnings == []
    assert [path.name for path in tmp_path.iterdir()] == [".hermes"]
    assert server.app.config == Config()
