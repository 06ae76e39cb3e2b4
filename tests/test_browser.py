"""The page in a real browser, with a scripted Hermes: its controls, and what can go wrong."""

import contextlib
import json
import threading
import urllib.request

import pytest
from live_service import LiveService
from playwright.sync_api import expect
from scripted_hermes import ScriptedHermes, event, reply, stream
from sidecar import TOKEN, Sidecar, conversation_of
from working_hermes import WorkingHermes

IDEMPOTENT = {"features": {"runs_idempotency": {"supported": True}}}
RUNNING = {"status": "running"}


def hermes_that(*steps):
    """A Hermes whose every run sends these events."""
    return ScriptedHermes(
        {
            ("GET", "/v1/capabilities"): [reply(200, IDEMPOTENT)],
            ("POST", "/v1/runs"): [reply(202, {"run_id": "run_1", "status": "started"})],
            ("GET", "/v1/runs/*/events"): [stream(*steps)],
            ("GET", "/v1/runs/*"): [reply(200, RUNNING)],
            ("POST", "/v1/runs/*/stop"): [reply(200, {"status": "stopping"})],
        }
    )


def answering(text):
    return hermes_that(event("run.completed", output=text))


class Line:
    """A page, what it talks to, and short ways to its parts."""

    def __init__(self, browser, hermes, config=None, token=None, **live):
        self.browser, self.hermes = browser, hermes
        self.live = LiveService(**live)
        self.options = {"config": config, "token": token}

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.hermes = stack.enter_context(self.hermes)
            stack.enter_context(self.live)
            self.sidecar = Sidecar(self.live, self.hermes.url, self.hermes.key, **self.options)
            stack.enter_context(self.sidecar)
            self.parts = stack
            self.open()
            self.parts = stack.pop_all()
        return self

    def open(self):
        """Open the page, as on another device if it is open already, and look at that."""
        self.page = self.sidecar.open(self.browser)
        self.parts.callback(self.page.context.close)
        self.log = self.page.get_by_role("log")
        self.status = self.page.get_by_role("status")
        self.card = self.page.get_by_role("article")

    def __exit__(self, *error):
        self.parts.__exit__(*error)
        if error[0] is None:
            assert self.page.faults == []
            assert self.live.violations == []

    def button(self, name):
        return self.page.get_by_role("button", name=name, exact=True)

    def start(self, status=""):
        """Open a call, and wait until the status line holds this."""
        before = len(self.live.sessions)
        self.button("Start call").click()
        session = self.live.wait_live(count=before + 1)
        expect(self.status).to_contain_text(status)
        return session

    def runs(self):
        """The runs that the sidecar has of the page's conversation."""
        return self.sidecar.get(f"runs?conversation={conversation_of(self.page)}")["runs"]

    def type(self, text):
        self.page.get_by_role("textbox", name="Message Hermes").fill(text)
        self.button("Send").click()


def test_a_typed_message_is_answered_without_a_call_and_spoken_in_the_next_one(browser):
    with Line(browser, answering("It rains.")) as line:
        line.type("What is the weather?")

        expect(line.card).to_contain_text("It rains.")
        expect(line.log).to_contain_text("What is the weather?")
        line.start()
        assert line.live.wait_spoken("It rains.").delegation_id is None


def test_a_message_typed_in_a_call_is_answered_aloud(browser):
    with Line(browser, answering("It rains.")) as line:
        session = line.start()

        line.page.get_by_role("textbox", name="Message Hermes").fill("And the weather?")
        line.page.keyboard.press("Enter")

        line.live.wait_spoken("It rains.")
        assert any("And the weather?" in note for note in session.contents("thinking"))


def test_a_double_click_opens_one_session(browser):
    with Line(browser, answering("Yes."), create_delay=0.3) as line:
        line.button("Start call").dblclick(delay=100)  # as slow as people are

        line.live.wait_live()
        expect(line.status).to_have_text("Listening")
        assert line.live.creates == 1


def test_start_stop_start_leaves_one_session_and_hangs_the_other_up(browser):
    with Line(browser, answering("Yes."), create_delay=0.5) as line:
        line.button("Start call").click()
        line.live.wait_for(lambda: line.live.creates == 1)
        line.button("Hang up").click()
        line.button("Start call").click()

        line.live.wait_for(lambda: len(line.live.sessions) == 2, about="the second session")
        line.live.wait_for(lambda: len(line.live.open_sessions) == 1, about="the loser's end")
        line.live.wait_live()
        assert line.live.creates == 2
        expect(line.status).to_have_text("Listening")


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("invalid_api_key", "OpenAI refused the API key"),
        ("live_api_access_denied", "may not use the voice model"),
        ("model_not_found", "may not use the voice model"),
        ("insufficient_quota", "no credit left"),
        ("rate_limit", "OpenAI is limiting calls"),
        ("server_error", "OpenAI has trouble"),
        ("reset", "OpenAI cannot be reached"),
        ("nonsense", "makes no sense"),
    ],
)
def test_a_refused_call_says_what_to_do_and_is_not_repeated(browser, failure, words):
    with Line(browser, answering("Yes.")) as line:
        line.live.fail_next(failure)

        line.button("Start call").click()

        expect(line.log).to_contain_text(words)
        expect(line.button("Start call")).to_be_visible()
        assert line.live.creates == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NotAllowedError", "The microphone is not allowed"),
        ("NotReadableError", "in use by another program"),
        ("NotFoundError", "No microphone was found"),
    ],
)
def test_a_missing_microphone_is_named_and_opens_no_session(browser, name, words):
    with Line(browser, answering("Yes.")) as line:
        refuse = "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('', name));"
        line.page.evaluate(f"name => {{ {refuse} }}", name)

        line.button("Start call").click()

        expect(line.log).to_contain_text(words)
        assert line.live.creates == 0


def test_plain_http_gets_the_ways_out_and_not_a_denied_permission(browser):
    with Line(browser, answering("Yes.")) as line:
        line.page.evaluate("Object.defineProperty(window, 'isSecureContext', { value: false })")

        line.button("Start call").click()

        expect(line.log).to_contain_text("plain http")
        expect(line.log).to_contain_text("ssh -L")
        expect(line.log).to_contain_text("tailscale serve")
        assert line.live.creates == 0


def test_without_a_network_no_session_is_opened(browser):
    with Line(browser, answering("Yes.")) as line:
        # Only a relay would do, and there is none: as on a machine without a network.
        relayed = (
            "class extends RTCPeerConnection { constructor() { super({ iceTransportPolicy: 'relay' }); } }"
        )
        line.page.evaluate(f"() => {{ window.RTCPeerConnection = {relayed}; }}")

        line.button("Start call").click()

        expect(line.log).to_contain_text("found no network")
        expect(line.button("Start call")).to_be_visible()
        assert line.live.creates == 0


def test_mute_keeps_the_audio_here_and_the_track_running(browser):
    with Line(browser, answering("Yes.")) as line:
        session = line.start()
        line.live.wait_for(lambda: session.sound_heard_at, about="the fake microphone's beep")

        line.button("Mute").click()
        expect(line.status).to_contain_text("Muted")
        line.live.wait_for(lambda: session.microphone_silent)
        session.wait_event("session.input_audio.mute")

        line.button("Unmute").click()
        session.wait_event("session.input_audio.unmute")
        line.live.wait_for(lambda: not session.microphone_silent)


def test_stop_speaking_silences_the_voice_and_not_the_work(browser):
    gate = threading.Event()
    hermes = hermes_that(gate, event("run.completed", output="The end of it."))
    with Line(browser, hermes) as line:
        session = line.start()
        session.user_says("Do it.", delegate=True)
        expect(line.card).to_contain_text("Working")
        session.assistant_says("A very long story. " * 20, wait=False)
        line.live.wait_for(lambda: "long story" in session.spoken[-1].said, about="the story")

        line.button("Stop speaking").click()

        voice = line.page.locator("#voice")
        expect(voice).to_have_js_property("muted", True)
        expect(voice).to_have_js_property("muted", False)
        gate.set()
        line.live.wait_spoken("The end of it.")


def test_hanging_up_waits_for_the_end_and_says_goodbye(browser):
    with Line(browser, answering("Yes.")) as line:
        session = line.start()

        line.button("Hang up").click()

        line.live.wait_for(lambda: session.closed_reason == "close_requested")
        expect(line.status).to_have_text("Off")
        (closed,) = [message.event for message in session.sent if message.type == "session.closed"]
        assert closed["client_event_id"] == session.wait_event("session.close").event["event_id"]


def test_a_call_that_dies_while_hermes_works_loses_nothing(browser):
    gate = threading.Event()
    with Line(browser, hermes_that(gate, event("run.completed", output="Found it."))) as line:
        session = line.start()
        session.user_says("Find it.", delegate=True)
        expect(line.card).to_contain_text("Working")

        session.die()
        expect(line.log).to_contain_text("The connection was lost")
        gate.set()
        expect(line.card).to_contain_text("Found it.")

        line.start()
        assert line.live.wait_spoken("Found it.").delegation_id is None
        assert [spoken.said for spoken in line.live.session.spoken] == [
            "About what you asked before, “Find it.”: Found it."
        ]


def test_a_hermes_that_is_down_is_named_aloud_and_on_the_screen(browser):
    hermes = ScriptedHermes({})
    with Line(browser, hermes) as line:
        hermes.stop()
        session = line.start()

        session.user_says("Do it.", delegate=True)

        line.live.wait_spoken("Hermes cannot be reached")
        expect(line.card).to_contain_text("Not done")


def test_what_was_not_done_goes_along_with_nothing_and_is_asked_for_again_by_a_click(browser):
    hermes = WorkingHermes()
    hermes.once("POST", "/v1/runs", reply(400, {"error": {"message": "No."}}))
    with Line(browser, hermes) as line:
        line.type("Check staging.")
        expect(line.card).to_contain_text("Not done")
        line.type("Check the wiki.")
        hermes.run(1).end("completed", output="Fine.")

        line.button("Ask again").click()
        hermes.run(2).end("completed", output="Healthy.")

        expect(line.card.last).to_contain_text("Healthy.")
        expect(line.button("Ask again")).to_have_count(0)
        assert [run.body["input"] for run in hermes.runs] == ["Check the wiki.", "Check staging."]


@pytest.mark.parametrize(
    "text", ["漢字" * 31_900, f"{'line of a list, ' * 4}\n" * 900], ids=["wide", "lines"]
)
def test_a_long_message_reaches_hermes_whole_and_is_kept_whole(browser, text):
    with Line(browser, answering("Read.")) as line:
        line.type(text)

        expect(line.card).to_contain_text("Read.")
        (asked,) = [seen.body["input"] for seen in line.hermes.seen if seen.path == "/v1/runs"]
        assert asked == text.strip()
        path = f"conversations/{conversation_of(line.page)}"
        kept = lambda: [said["text"] for said in line.sidecar.get(path)["lines"]]  # noqa: E731
        line.live.wait_for(lambda: kept() == [text.strip()], about="the journal")


def test_a_message_that_is_too_long_comes_back_with_the_reason(browser):
    with Line(browser, answering("Read.")) as line:
        line.type("x" * 64_001)

        expect(line.log).to_contain_text("longer than 64,000 characters")
        expect(line.page.get_by_role("textbox", name="Message Hermes")).to_have_value("x" * 64_001)
        assert line.runs() == []


def test_the_token_is_asked_for_kept_as_chosen_and_never_in_a_url(browser):
    with Line(browser, answering("Yes."), token=TOKEN) as line:
        field = line.page.get_by_label("Access token", exact=True)
        expect(field).to_be_visible()
        expect(line.button("Start call")).to_be_hidden()
        # Nothing was refused to learn that: neither the console nor the log has a complaint.
        asked = line.page.evaluate("performance.getEntriesByType('resource').map(({ name }) => name)")
        assert not [url for url in asked if url.endswith("/config")]
        assert "WARNING" not in line.sidecar.log

        field.fill("a-wrong-token")
        line.button("Let me in").click()
        expect(line.page.get_by_text("was not accepted")).to_be_visible()

        field.fill(TOKEN)
        line.page.get_by_label("Remember it on this device").check()
        line.button("Let me in").click()
        expect(line.button("Start call")).to_be_visible()
        line.page.reload()
        expect(line.button("Start call")).to_be_visible()
        line.start()
        assert TOKEN not in line.page.url


def test_an_answer_with_markup_stays_text(browser):
    answer = (
        "Look.\n---\n<img src=x onerror=\"document.title='hacked'\">"
        "<script>document.title='hacked'</script>\n\n"
        "[click](javascript:document.title='hacked') and [fine](https://example.org/)"
    )
    with Line(browser, answering(answer)) as line:
        line.type("Show me.")

        expect(line.card).to_contain_text("<img src=x")
        assert line.card.locator("img, script").count() == 0
        assert line.card.get_by_role("link").all_text_contents() == ["fine"]
        assert line.page.title() == "Hermes"


def test_no_key_pressed_for_something_else_answers_a_question(browser):
    asked = event("approval.request", command="rm -rf /", description="it deletes", choices=["once", "deny"])
    gate = threading.Event()
    with Line(browser, hermes_that(gate, asked, threading.Event())) as line:
        line.type("Clean up.")
        box = line.page.get_by_role("textbox", name="Message Hermes")
        box.focus()
        gate.set()
        expect(line.button("Allow once")).to_be_visible()

        for key in ("Enter", "Space", "y", "Escape"):
            line.page.keyboard.press(key)

        expect(line.button("Allow once")).to_be_enabled()
        expect(line.button("Deny")).to_be_enabled()
        expect(line.button("Allow for this task")).to_have_count(0)
        assert not any(path.endswith("/approval") for path in [seen.path for seen in line.hermes.seen])


# Where each character of an element's text stands, in the order of the text.
PLACES = """element => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (let at = 0; at < node.length; at += 1) {
      const range = new Range();
      range.setStart(node, at);
      range.setEnd(node, at + 1);
      const { left, top } = range.getBoundingClientRect();
      found.push([node.data[at], top, left]);
    }
  }
  return found;
}"""


def as_read(element):
    """An element's text from left to right on the screen; a word from right to left is its first letter."""
    signs = []
    was_turned = False
    for character, top, left in element.evaluate(PLACES):
        turned = "\u0590" <= character <= "\u08ff"
        if turned and was_turned:
            signs[-1][1] = min(signs[-1][1], left)
        elif character != "\n":
            signs.append([top, left, character])
        was_turned = turned
    return "".join(character for _, _, character in sorted(signs))


@pytest.mark.parametrize(
    ("command", "seen"),
    [
        ("rm -rf /x/\u202ephotos/2024", "rm -rf /x/\\u{202E}photos/2024"),
        ("rm \u2067/a/\u2069/b", "rm \\u{2067}/a/\\u{2069}/b"),
        # Words from right to left turn nothing around them, in the order of a path least of all.
        ("rm -rf /x/שלום/2024/עולם/y", "rm -rf /x/ש/2024/ע/y"),
        ("שלום/2024; rm سلام", "ש/2024; rm س"),
    ],
)
def test_a_question_shows_the_command_in_the_order_in_which_it_runs(browser, command, seen):
    asked = event("approval.request", command=command, description=command, choices=["once", "deny"])
    gate = threading.Event()
    with Line(browser, hermes_that(asked, gate, event("run.completed", output="Done."))) as line:
        line.page.set_viewport_size({"width": 1280, "height": 700})
        line.type("Clean up.")
        expect(line.button("Allow once")).to_be_visible()
        line.page.reload()
        asks = line.page.get_by_role("region", name="Hermes asks")
        expect(asks).to_be_visible()

        assert as_read(asks.locator("pre")) == seen
        assert as_read(asks.locator("p").nth(1)) == f"Hermes asks before it does this ({seen}):"
        gate.set()
        expect(line.card).to_contain_text("Done.")
        assert as_read(line.card.locator("pre").first) == seen


def test_lines_and_tabs_of_a_command_are_told_from_what_looks_like_them(browser):
    command = 'for f in *; do\n\trm -- "$f"\n\ndone; echo ' + "x " * 200 + "\n"
    asked = event("approval.request", command=command, choices=["once", "deny"])
    with Line(browser, hermes_that(asked, threading.Event())) as line:
        line.type("Clean up.")
        code = line.page.get_by_role("region", name="Hermes asks").locator("code")

        expect(code).to_be_visible()
        assert code.evaluate("code => code.textContent") == command
        assert code.locator(".line").count() == 5
        assert code.locator(".tab").evaluate_all("tabs => tabs.map((tab) => tab.textContent)") == ["\t"]
        number = "line => getComputedStyle(line, '::before').content"
        assert "counter(line)" in code.locator(".line").first.evaluate(number)
        expect(line.page.get_by_text(f"5 lines, {len(command)} characters")).to_be_visible()


@pytest.mark.parametrize(("width", "height"), [(320, 568), (390, 844), (1280, 800)])
def test_a_long_command_is_shown_whole_with_its_buttons_in_reach(browser, width, height):
    command = "rm -rf " + "/srv/backups/2024 " * 200 + "/last"
    asked = event("approval.request", command=command, choices=["once", "session", "deny"])
    with Line(browser, hermes_that(asked, threading.Event())) as line:
        line.page.set_viewport_size({"width": width, "height": height})
        line.type("Clean up.")
        asks = line.page.get_by_role("region", name="Hermes asks")

        for name in ("Allow once", "Allow for this task", "Deny"):
            expect(line.button(name)).to_be_in_viewport(ratio=1)
        # Nothing but the place of the questions scrolls, and at its end the command ends.
        assert asks.locator("pre").evaluate("pre => pre.scrollHeight <= pre.clientHeight")
        asks.evaluate("asks => asks.scrollTo(0, asks.scrollHeight)")
        end = asks.locator("pre").bounding_box()
        assert end["y"] + end["height"] <= line.button("Allow once").bounding_box()["y"]
        assert line.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_question_that_can_only_be_denied_says_so(browser):
    asked = event("approval.request", command="rm", choices=["always"])
    with Line(browser, hermes_that(asked, threading.Event())) as line:
        line.type("Clean up.")

        expect(line.button("Deny")).to_be_enabled()
        expect(line.page.get_by_text("It cannot be allowed from here.")).to_be_visible()
        assert line.page.get_by_role("button", name="Allow").count() == 0


@pytest.mark.parametrize("width", [320, 900])
def test_nothing_is_wider_than_the_screen(browser, width):
    answer = "Here.\n---\n" + "| a | b |\n|---|---|\n" + "| " + "x" * 300 + " | y |\n\n`" + "z" * 300 + "`"
    with Line(browser, answering(answer)) as line:
        line.page.set_viewport_size({"width": width, "height": 640})
        line.type("w" * 300)
        expect(line.card.get_by_role("table")).to_be_visible()

        assert line.page.evaluate("document.documentElement.scrollWidth") <= width
        assert line.page.evaluate("document.getElementById('log').scrollWidth") <= width


SCREENS = [(320, 568), (390, 844), (1280, 800)]
screens = pytest.mark.parametrize(("width", "height"), SCREENS)


def fill_log(line, count=80):
    """Give the conversation lines, and show them."""
    lines = [
        {"key": f"k{number}", "speaker": ("user", "assistant")[number % 2], "text": f"Line {number}. " * 9}
        for number in range(count)
    ]
    url = f"{line.sidecar.url}conversations/{conversation_of(line.page)}/lines"
    kind = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps({"lines": lines}).encode(), kind)).close()
    line.page.reload()
    expect(line.log).to_contain_text(f"Line {count - 1}.")


def scrolled(line):
    """How far the document is scrolled and can be, and the log."""
    return line.page.evaluate(
        """() => {
            const { scrollTop, scrollLeft, scrollHeight, clientHeight } = document.scrollingElement;
            const log = document.getElementById("log");
            const beyond = [scrollHeight - clientHeight, document.body.scrollHeight - innerHeight];
            return { document: [scrollTop, scrollLeft, ...beyond, scrollY], log: log.scrollTop };
        }"""
    )


@screens
@pytest.mark.parametrize("asking", [False, True])
def test_nothing_scrolls_but_the_log(browser, width, height, asking):
    asked = event("approval.request", command="rm -rf /x " * 40, description="it deletes", choices=["once"])
    with Line(browser, hermes_that(asked, threading.Event()) if asking else answering("Yes.")) as line:
        line.page.set_viewport_size({"width": width, "height": height})
        fill_log(line)
        if asking:
            line.type("Clean up.")
            expect(line.button("Allow once")).to_be_enabled()
        still = [0] * 5
        at_end = scrolled(line)
        assert at_end["document"] == still
        assert at_end["log"] > 0

        for place in ("log", "header", "footer", "main"):
            line.page.locator(f"#{place}" if place == "log" else place).first.hover(force=True)
            for distance in (5000, -700, 5000, -700):
                line.page.mouse.wheel(0, distance)
        line.live.wait_for(lambda: scrolled(line)["log"] < at_end["log"])
        assert scrolled(line)["document"] == still
        line.page.evaluate("document.activeElement.blur()")
        for key in ("End", "PageDown", "Space", "ArrowDown", "PageUp", "Home", "Tab", "End", "Space"):
            line.page.keyboard.press(key)
            assert scrolled(line)["document"] == still, key
        line.page.evaluate("window.scrollTo(0, 10000)")
        assert scrolled(line)["document"] == still


LONG = "\n\n".join(f"Paragraph {number} of a long answer. " * 3 for number in range(60))


def top_of(line, item):
    """How far below the log's top something begins."""
    return item.bounding_box()["y"] - line.log.bounding_box()["y"]


def from_end(line):
    """How far the log is from its end."""
    return line.log.evaluate("log => log.scrollHeight - log.scrollTop - log.clientHeight")


@screens
def test_a_long_answer_is_shown_from_its_beginning_and_stays_there(browser, width, height):
    gate = threading.Event()
    with Line(browser, hermes_that(gate, event("run.completed", output=LONG))) as line:
        line.page.set_viewport_size({"width": width, "height": height})
        fill_log(line)
        line.type("Tell me all.")
        expect(line.card).to_contain_text("Working")
        assert from_end(line) < 1
        gate.set()

        expect(line.card).to_contain_text("Paragraph 59")
        assert 0 <= top_of(line, line.card) < 20
        line.type("And again.")
        expect(line.card).to_have_count(2)
        expect(line.card.last).to_contain_text("Paragraph 59")
        assert 0 <= top_of(line, line.card.first) < 20
        line.log.hover()
        line.page.mouse.wheel(0, 300)
        line.live.wait_for(lambda: top_of(line, line.card.first) < -200)
        read_at = top_of(line, line.card.first)
        line.type("And more.")
        expect(line.card).to_have_count(3)
        expect(line.card.last).to_contain_text("Paragraph 59")
        assert abs(top_of(line, line.card.first) - read_at) < 1
        line.log.evaluate("log => log.scrollTo(0, log.scrollHeight)")
        line.type("And now?")
        expect(line.card).to_have_count(4)
        expect(line.card.last).to_contain_text("Paragraph 59")
        assert 0 <= top_of(line, line.card.last) < 20


QUESTIONS = [
    asked
    for number in range(8)
    for asked in (
        event("approval.request", command=f"rm -rf /srv/{number}", description="", choices=["once", "deny"]),
        event("approval.responded", choice="once", resolved=1),
    )
]


@screens
def test_a_long_answer_after_many_questions_is_shown_from_its_own_beginning(browser, width, height):
    hermes = hermes_that(*QUESTIONS, event("run.completed", output=LONG))
    with Line(browser, hermes) as line:
        line.page.set_viewport_size({"width": width, "height": height})
        line.type("Clean up.")

        expect(line.card).to_contain_text("Paragraph 59")
        assert 0 <= top_of(line, line.card.locator(".answer")) < 20


@screens
def test_a_small_answer_after_many_questions_leaves_the_log_at_its_end(browser, width, height):
    with Line(browser, hermes_that(*QUESTIONS, event("run.completed", output="Done with all."))) as line:
        line.page.set_viewport_size({"width": width, "height": height})
        line.type("Clean up.")

        expect(line.card).to_contain_text("Done with all.")
        assert from_end(line) < 1


@screens
def test_a_small_answer_leaves_the_log_at_its_end(browser, width, height):
    with Line(browser, answering("It rains.")) as line:
        line.page.set_viewport_size({"width": width, "height": height})
        fill_log(line)

        for number in (1, 2):
            line.type("What is the weather?")
            expect(line.card).to_have_count(number)
            expect(line.card.last).to_contain_text("It rains.")
            assert from_end(line) < 1


@screens
@pytest.mark.parametrize("answer", [LONG, "It rains."])
def test_a_reader_who_scrolled_up_is_not_moved(browser, width, height, answer):
    """Nor by the card above, which goes to where its answer came."""
    gate = threading.Event()
    with Line(browser, hermes_that(gate, event("run.completed", output=answer))) as line:
        line.page.set_viewport_size({"width": width, "height": height})
        refuse = "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('', name));"
        line.page.evaluate(f"name => {{ {refuse} }}", "NotFoundError")
        line.type("Tell me all.")
        expect(line.card).to_contain_text("Working")
        notices = line.log.get_by_text("No microphone was found")
        for number in range(1, 31):
            line.button("Start call").click()
            expect(notices).to_have_count(number)
        line.log.evaluate("log => { log.scrollTop = log.querySelector('.notice').offsetTop + 10; }")
        assert top_of(line, line.card) < 0
        read_at = top_of(line, notices.nth(2))

        gate.set()

        expect(line.card).to_contain_text(answer[-20:].strip())
        assert top_of(line, line.card) > top_of(line, notices.last)
        assert abs(top_of(line, notices.nth(2)) - read_at) < 1


def test_an_answer_that_nobody_has_seen_is_shown_from_its_beginning_by_the_next_page(browser):
    with Line(browser, answering(LONG)) as line:
        fill_log(line)
        line.type("Tell me all.")
        expect(line.card).to_contain_text("Paragraph 59")

        line.page.reload()

        expect(line.card).to_contain_text("Paragraph 59")
        assert 0 <= top_of(line, line.card) < 20
