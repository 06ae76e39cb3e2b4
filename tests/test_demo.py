"""`--demo`: from a fresh clone, with the plain interpreter, without keys, in a real browser.

And its stand-in for Hermes, as the real client sees it, beside what a real Hermes was
recorded to say.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect
from sidecar import STOP_SECONDS

import hermes_voice
from hermes_voice import (
    RUN_UPDATES,
    SCENES,
    Config,
    ConfigError,
    DemoHermes,
    Refused,
    RunStream,
    build_server,
    parse_arguments,
    pick_scene,
    reload,
)

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "fixtures" / "hermes-0.22.2"
QUICK = 0.01  # of the time that people get
PATIENCE = 30_000  # ms, for what is worked on and spoken at the pace of people


# ---- the stand-in, through the real client -----------------------------------


@pytest.fixture
def serve():
    """A function: a client with the stand-in behind it."""
    return lambda **options: DemoHermes(**{"pace": QUICK, **options})


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
        if e["event"] in RUN_UPDATES and e["event"] != "message.delta"
    ]


def test_its_events_have_the_names_and_keys_of_a_real_hermes(serve):
    hermes, slow = serve(), serve(pace=1)  # slow enough to be interrupted
    allow = {"approval.request": lambda run_id, event: hermes.answer(run_id, "once", event["request_id"])}
    steer = {"tool.started": lambda run_id, event: slow.steer(run_id, "also this")}
    stop = {"tool.started": lambda run_id, event: slow.stop(run_id)}
    played = [
        *run_scene(hermes, "Delete the old snapshots", allow)[1],
        *run_scene(slow, "What is the disk usage?", steer)[1],
        *run_scene(hermes, "Try something that fails")[1],
        *run_scene(slow, "Look through the logs", stop)[1],
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
    hermes = serve(pace=1)
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


def test_it_knows_no_other_runs_and_no_transcripts(serve):
    hermes = serve()

    assert hermes.messages("talk") == []
    hermes.forget("talk")
    for ask in (hermes.status, hermes.events):
        with pytest.raises(Refused) as unknown:
            ask("run_1")
        assert unknown.value.answered == 404


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
        ("Since the last request:\nUser: And the logs?\nVoice assistant: The disk and its space.", 3),
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


@pytest.mark.parametrize("flag", ["--check", "--pair"])
def test_a_demo_is_neither_checked_nor_paired(capsys, flag):
    with pytest.raises(SystemExit):
        parse_arguments(["--demo", flag])

    assert "--demo goes neither with" in capsys.readouterr().err


def test_a_demo_leaves_the_machines_hermes_alone(tmp_path, monkeypatch):
    home = tmp_path / ".hermes"
    home.mkdir()
    (home / ".env").write_text("API_SERVER_KEY=canary-hermes-key\nOPENAI_API_KEY=canary-openai-key\n")
    args = parse_arguments(["--demo", "--listen", "127.0.0.1:0"])

    server, warnings = build_server(args, {"HOME": str(tmp_path), "STATE_DIRECTORY": str(tmp_path / "state")})

    server.server_close()
    assert server.app.openai is None
    assert isinstance(server.app.hermes, DemoHermes)
    assert warnings == []
    assert [path.name for path in tmp_path.iterdir()] == [".hermes"]
    assert server.app.config == Config()


def test_a_demo_stays_one_when_it_is_reloaded(tmp_path):
    environ = {"HOME": str(tmp_path)}
    args = parse_arguments(["--demo", "--listen", "127.0.0.1:0"])
    server, _ = build_server(args, environ)
    hermes = server.app.hermes

    reload(server, args, environ)

    server.server_close()
    assert server.app.openai is None
    assert server.app.hermes is hermes


# ---- the page ----------------------------------------------------------------


@pytest.fixture
def visit(tmp_path, browser):
    """Clone, start, open: a page, and short ways to its parts."""
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), clone], check=True)
    command = [sys.executable, "-I", "hermes_voice.py", "--demo", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, cwd=clone, env={"HOME": str(home)}, stderr=subprocess.PIPE, text=True)
    try:
        log = []
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"server\.listening url=(\S+)", line):
                break
        with Visit(browser, found[1]) as visit:
            yield visit
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=STOP_SECONDS)
        assert process.returncode == 0
        assert "Traceback" not in "".join(log) + rest
        assert [*home.iterdir()] == []
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


class Visit:
    def __init__(self, browser, url):
        self.url, self.faults, self.requests = url, [], []
        self.context = browser.new_context(viewport={"width": 1100, "height": 760})
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.status = self.page.get_by_role("status")
        self.log = self.page.get_by_role("log")
        self.demo = self.page.get_by_role("region", name="Demo", exact=True)

    def __enter__(self):
        self.page.goto(self.url)
        return self

    def __exit__(self, *error):
        self.context.close()
        if error[0] is None:
            assert self.faults == []
            assert [url for url in self.requests if not url.startswith((self.url, "data:"))] == []

    def button(self, name):
        return self.page.get_by_role("button", name=name, exact=True)

    def card(self, request):
        return self.page.get_by_role("article", name=f"Task: {request}", exact=True)

    def said(self, *words):
        """Wait until the voice has said this."""
        line = self.log.locator(".said.assistant").filter(has_text=re.compile(".*".join(words)))
        expect(line.last).to_be_visible(timeout=PATIENCE)

    def say(self, sentence):
        """Say a sentence that is offered, whether the voice speaks or not."""
        self.demo.get_by_role("button", name=sentence, exact=True).click()

    def start(self):
        self.button("Start call").click()
        expect(self.status).to_have_text("Listening", timeout=PATIENCE)


def test_a_demo_from_ask_to_hang_up(visit):
    expect(visit.demo).to_contain_text("Demo: no keys, no services.")
    expect(visit.demo.get_by_role("button", name="Stop", exact=True)).to_be_disabled()
    visit.start()

    visit.say("What is the disk usage?")
    card = visit.card("What is the disk usage?")
    expect(card).to_contain_text("1 step", timeout=PATIENCE)
    expect(card.get_by_role("table")).to_contain_text("Snapshots")
    visit.said("eighty-two percent full")

    visit.say("Delete the old snapshots")
    expect(visit.button("Allow once")).to_be_visible(timeout=PATIENCE)
    visit.said("Do you allow it, yes or no")
    visit.say("Yes, go ahead")
    card = visit.card("Delete the old snapshots")
    expect(card).to_contain_text("You allowed it.", timeout=PATIENCE)
    visit.said("deleted eleven snapshots", "gigabytes")

    visit.say("Compare the backup plans")
    card = visit.card("Compare the backup plans")
    expect(card.get_by_role("heading")).to_have_text("Plans for 410 GB", timeout=PATIENCE)
    expect(card).to_contain_text("restic")
    visit.said("A second disk at home")

    visit.say("Try something that fails")
    expect(visit.card("Try something that fails")).to_contain_text("Not done", timeout=PATIENCE)
    visit.said("language model did not answer")

    visit.demo.get_by_label("Say", exact=True).fill("Look through the logs")
    visit.demo.get_by_label("Say", exact=True).press("Enter")
    card = visit.card("Look through the logs")
    expect(card).to_contain_text("going through the logs", timeout=PATIENCE)
    visit.say("Stop")
    expect(card).to_contain_text("Stopped", timeout=PATIENCE)
    visit.said("Hermes has stopped the task")

    visit.button("Hang up").click()
    expect(visit.status).to_have_text("Off")
    visit.start()
    visit.say("What is the disk usage?")
    expect(visit.card("What is the disk usage?")).to_have_count(2, timeout=PATIENCE)
    expect(visit.log.locator(".said.user").last).to_have_text(re.compile("What is the disk usage"))


def test_a_demos_voice_falls_silent_when_told_to_and_when_spoken_to(visit):
    visit.start()
    visit.say("What is the disk usage?")
    visit.said("The disk is")

    visit.button("Stop speaking").click()
    expect(visit.status).to_have_text("Listening", timeout=3000)

    visit.say("Delete the old snapshots")
    visit.said("to run a command")
    visit.say("Yes, go ahead")
    expect(visit.card("Delete the old snapshots")).to_contain_text("You allowed it.", timeout=PATIENCE)
    expect(visit.log).not_to_contain_text("yes or no")


COUNTING = """
const measure = RTCPeerConnection.prototype.getStats;
let measured = 0;
RTCPeerConnection.prototype.getStats = function () {
  console.info(`measured ${++measured}`);
  return measure.call(this);
};
"""


def test_no_demo_call_shows_a_notice_that_is_not_true(visit):
    """Its sound is measured as in any call, also muted, while it speaks and while Hermes works."""
    visit.page.add_init_script(COUNTING)
    visit.page.reload()
    with visit.page.expect_console_message(lambda message: message.text == "measured 5"):
        visit.start()
    visit.say("What is the disk usage?")
    visit.said("eighty-two percent full")
    visit.button("Mute").click()
    with visit.page.expect_console_message(lambda message: message.text == "measured 18", timeout=PATIENCE):
        expect(visit.status).to_have_text("Muted: nobody hears you", timeout=PATIENCE)
    visit.button("Unmute").click()
    visit.say("Delete the old snapshots")
    visit.said("Do you allow it, yes or no")
    visit.say("Yes, go ahead")
    visit.said("deleted eleven snapshots", "gigabytes")
    visit.say("Compare the backup plans")
    expect(visit.button("Stop task")).to_be_enabled(timeout=PATIENCE)
    visit.say("Stop")
    visit.said("Hermes has stopped the task")

    assert visit.log.locator(".notice").all_text_contents() == []
    expect(visit.page.get_by_text("This call:")).to_be_hidden()


def test_where_the_device_has_no_voice_the_demo_says_so(visit):
    expect(visit.demo).to_contain_text("You hear nothing: this device has no English voice.")

    visit.page.add_init_script(VOICES)
    visit.page.reload()
    visit.start()

    expect(visit.demo).to_contain_text("Demo: no keys, no services.")
    expect(visit.demo.get_by_text("You hear nothing")).to_be_hidden()


# A browser with voices, in whose place something notes what is said.
VOICES = """
const voice = (name, localService, lang) => ({ name, localService, lang });
window.spoken = [];
window.SpeechSynthesisUtterance = class extends EventTarget {
  constructor(text) { super(); this.text = text; }
};
Object.defineProperty(window, "speechSynthesis", { value: {
  getVoices: () => [voice("far", false, "en-US"), voice("other", true, "de"), voice("near", true, "en-GB")],
  speak: (utterance) => {
    spoken.push(`${utterance.voice.name}: ${utterance.text}`);
    if (!utterance.text.startsWith("The disk")) utterance.dispatchEvent(new Event("end"));
  },
  cancel: () => spoken.push("cancel"),
  addEventListener: () => {},
} });
"""


def test_a_voice_of_the_device_speaks_and_none_that_needs_a_network(visit):
    visit.page.add_init_script(VOICES)
    visit.page.reload()
    visit.start()

    visit.say("What is the disk usage?")
    visit.said("The disk", "delete them")
    visit.say("Stop")
    visit.page.get_by_role("textbox", name="Message Hermes").fill("Will it rain?")
    visit.page.keyboard.press("Enter")

    visit.said("This is a demo", "what fails")
    expect(visit.card("Stop")).to_have_count(0)
    spoken = visit.page.evaluate("spoken")
    told = next(n for n, text in enumerate(spoken) if text.startswith("near: The disk is eighty-two"))
    assert spoken[told + 1] == "cancel"
    # Falling silent at the end of a turn may have been noted already.
    assert [text for text in spoken if text != "cancel"][-1].startswith("near: This is a demo")
    assert [text for text in spoken if not text.startswith(("near: ", "cancel"))] == []


def test_small_talk_and_mute_start_nothing(visit):
    visit.start()
    words = visit.demo.get_by_label("Say", exact=True)

    words.fill("Hello!")
    words.press("Enter")
    visit.said("Hello! Tell me what you need", "Hermes")
    visit.button("Mute").click()

    expect(words).to_be_disabled()
    expect(visit.page.get_by_role("article")).to_have_count(0)


def test_a_session_cannot_be_opened_over_openai(visit):
    offer = {"sdp": "v=0\r\nm=audio 9 UDP/TLS/RTP/SAVPF 111\r\n"}
    for path, body in (("session", offer), ("session/close", {"session_id": "live_1"})):
        answer = visit.page.request.post(visit.url + path, data=body)

        assert answer.status == 409
        assert answer.json()["error"]["code"] == "demo"
    assert visit.page.request.get(visit.url + "config").json()["demo"] is True


@pytest.mark.parametrize(("width", "height"), [(320, 640), (1100, 760)])
def test_a_demo_fits_the_screen_with_a_question_open(visit, width, height):
    visit.page.set_viewport_size({"width": width, "height": height})
    visit.start()
    visit.say("Delete the old snapshots")

    for name in ("Allow once", "Deny", "Hang up", "Send"):
        expect(visit.button(name)).to_be_in_viewport(ratio=1, timeout=PATIENCE)
    expect(visit.demo.get_by_role("button", name="Say it")).to_be_in_viewport(ratio=1, timeout=PATIENCE)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
