"""The session's life in a real browser: asleep, renewed, lost, capped, ended by a word.

What counts is measured at the far end: how many sessions were opened, what each was sent and
in which order, and what the voice said of it.
"""

import contextlib
import json
import re
import threading

import pytest
from playwright.sync_api import Error, expect
from scripted_hermes import event
from test_browser import Line, answering, hermes_that


def working(answer):
    """A Hermes that gives this answer once the gate is open, and the gate."""
    gate = threading.Event()
    return hermes_that(gate, event("run.completed", output=answer)), gate


AMEND = """
    const real = window.fetch;
    window.fetch = async (address, init) => {
      const response = await real(address, init);
      if (!response.ok || !new URL(address).pathname.endsWith(PATH)) return response;
      return Response.json({ ...(await response.json()), ...FIELDS });
    };
"""


def amend(line, path, **fields):
    """Let the sidecar's answers at a path have these fields too."""
    line.page.add_init_script(AMEND.replace("PATH", json.dumps(path)).replace("FIELDS", json.dumps(fields)))
    line.page.reload()
    expect(line.button("Start call")).to_be_visible()


def said(line):
    """What the voice has said for us, in all sessions."""
    return [
        each.text for session in line.live.sessions for each in session.spoken if each.source == "commentary"
    ]


def runs_of(line):
    return [seen for seen in line.hermes.seen if (seen.method, seen.path) == ("POST", "/v1/runs")]


def test_an_answer_that_comes_while_the_session_sleeps_is_shown_at_once_and_said_when_it_wakes(browser):
    hermes, gate = working("The build is green.")
    with Line(browser, hermes) as line:
        session = line.start()
        session.user_says("Check the build.", delegate=True)
        expect(line.card).to_contain_text("Working")

        session.pause()
        expect(line.status).to_have_text("Paused to save money: say something to go on")
        gate.set()

        expect(line.card).to_contain_text("The build is green.")
        expect(line.status).to_have_text("Paused, and there is an answer: say something to hear it")
        line.button("Mute").click()
        session.wait_event("session.input_audio.mute")
        expect(line.status).to_have_text(
            "Paused, and there is an answer: unmute and say something to hear it"
        )
        line.button("Unmute").click()
        session.wait_event("session.input_audio.unmute")
        assert "The build is green." not in said(line)
        session.user_says("Hello?")
        assert line.live.wait_spoken("The build is green.").delegation_id == session.delegations[0]
        assert said(line).count("The build is green.") == 1


def test_the_meter_shows_time_and_price_and_what_openai_counts_and_in_the_end_what_it_was(browser):
    with Line(browser, answering("Yes."), usage_interval=0.5) as line:
        expect(line.page.locator("#meter")).to_be_hidden()
        session = line.start()

        meter = line.page.locator("#meter")
        expect(meter).to_contain_text(re.compile(r"This call: 0:\d\d · \$0\.0\d"))
        expect(meter).to_contain_text(re.compile(r"OpenAI: 0:\d\d"))
        session.pause()
        expect(meter).to_contain_text(" paused)")

        line.page.set_viewport_size({"width": 320, "height": 640})
        line.button("Hang up").click()
        expect(meter).to_contain_text("Call ended: ")
        expect(meter).to_contain_text(" s, about $0.0")
        assert line.page.evaluate("document.documentElement.scrollWidth") <= 320
        line.start()
        expect(meter).not_to_contain_text("ended")


def test_a_session_is_renewed_before_its_end_and_the_call_goes_on(browser):
    hermes, gate = working("The build is green.")
    with Line(browser, hermes, session_lifetime=14) as line:
        first = line.start()
        line.live.session_lifetime = 7200
        first.user_says("Check the build.", delegate=True)
        expect(line.card).to_contain_text("Working")
        line.button("Mute").click()

        second = line.live.wait_live(count=2)
        second.wait_event("session.input_audio.mute")
        line.live.wait_for(lambda: line.live.open_sessions == [second], about="the end of the first session")
        expect(line.button("Unmute")).to_be_visible()
        line.live.wait_for(lambda: second.microphone_silent, about="audio of the second session")

        gate.set()
        assert line.live.wait_spoken("The build is green.").delegation_id is None
        assert said(line).count("The build is green.") == 1
        assert line.live.creates == 2
        assert line.page.locator(".notice").count() == 0
        # The page plays the new session, and it alone.
        expect(line.page.locator("#voice")).to_have_js_property("srcObject.active", True)


def test_a_renewal_that_fails_leaves_the_call_and_says_so(browser):
    with Line(browser, answering("It is green."), session_lifetime=10, session_overtime=60) as line:
        session = line.start()
        line.live.fail_next("server_error")

        expect(line.log).to_contain_text("The call could not be renewed")
        session.user_says("Check the build.", delegate=True)

        line.live.wait_spoken("It is green.")
        assert line.live.open_sessions == [session]


def test_a_line_that_breaks_is_taken_up_with_a_button_and_keeps_mute_draft_and_answer(browser):
    hermes, gate = working("The build is green.")
    with Line(browser, hermes, {"progress": "off"}) as line:
        session = line.start()
        session.user_says("Check the build.", delegate=True)
        expect(line.card).to_contain_text("Working")
        line.button("Mute").click()
        session.wait_event("session.input_audio.mute")
        draft = line.page.get_by_role("textbox", name="Message Hermes")
        draft.fill("And then")

        session.drop()
        expect(line.log).to_contain_text("The connection was lost")
        gate.set()
        expect(line.card).to_contain_text("The build is green.")
        assert line.live.creates == 1
        line.button("Reconnect").click()

        second = line.live.wait_live(count=2)
        second.wait_event("session.input_audio.mute")
        assert line.live.wait_spoken("The build is green.").delegation_id is None
        expect(draft).to_have_value("And then")
        expect(line.button("Reconnect")).to_have_count(0)
        assert len(said(line)) == 1
        assert len(runs_of(line)) == 1


def test_a_page_that_the_browser_keeps_says_nothing_more_and_offers_the_call_when_it_is_back(browser):
    hermes, gate = working("The build is green.")
    with Line(browser, hermes) as line:
        first = line.start()
        first.user_says("Check the build.", delegate=True)
        expect(line.card).to_contain_text("Working")

        line.page.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
        line.live.wait_for(lambda: first.closed_reason)
        gate.set()
        expect(line.card).to_contain_text("The build is green.")
        assert said(line) == []
        line.page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")

        expect(line.log).to_contain_text("ended when you left the page")
        expect(line.status).to_have_text("Off")
        line.button("Reconnect").click()
        line.live.wait_live(count=2)
        line.live.wait_spoken("The build is green.")
        assert len(said(line)) == 1


def crash(page):
    with contextlib.suppress(Error):
        page.goto("chrome://crash")


# How a page goes away while it has the claim to an answer. The last one stays, without its call.
WAYS_TO_GO = {
    "reloaded": lambda page: page.reload(),
    "closed": lambda page: page.close(),
    "crashed": crash,
    "left behind": lambda page: None,
}


@pytest.mark.parametrize("way", WAYS_TO_GO)
def test_an_answer_whose_page_goes_between_claim_and_speech_is_told_by_the_next_one(browser, way):
    hermes, gate = working("The build is green.")
    with Line(browser, hermes, {"progress": "off"}) as line:
        line.live.tolerate("no audio from the client")  # of a page that is gone
        first, session = line.page, line.start()
        session.user_says("Check the build.", delegate=True)
        expect(line.card).to_contain_text("Working")
        session.assistant_says("This is a long story. " * 100, wait=False)
        line.live.wait_for(lambda: "long story" in session.spoken[-1].said, about="the story")
        with first.expect_response("**/delivered") as claimed:
            gate.set()
        assert claimed.value.ok
        assert said(line) == []

        WAYS_TO_GO[way](first)
        if way != "reloaded":
            line.open()
        expect(line.card).to_contain_text("New: Done")
        assert [run["delivered"] for run in line.runs()] == [False]
        line.start()

        line.live.wait_spoken("The build is green.")
        line.live.wait_for(lambda: line.runs()[0]["delivered"], about="the page's word that it was heard")
        assert [text.rpartition(": ")[2] for text in said(line)] == ["The build is green."]


def test_an_answer_that_was_heard_is_not_told_by_the_next_page(browser):
    with Line(browser, answering("The build is green.")) as line:
        session = line.start()
        session.user_says("Check the build.", delegate=True)
        line.live.wait_spoken("The build is green.")
        line.live.wait_for(lambda: line.runs()[0]["delivered"])

        line.page.reload()
        expect(line.card).to_contain_text("Done")
        expect(line.card).not_to_contain_text("New")
        with line.page.expect_request("**/session"):
            line.button("Start call").click()
        line.live.wait_live(count=2).user_says("Hello?")

        assert len(said(line)) == 1


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("content", "Put it in other words"),
        ("expired", "the longest time OpenAI allows. Start the call again"),
        ("remote_hangup", "OpenAI hung up"),
        ("connection_lost", "The connection was lost"),
    ],
)
def test_an_end_by_the_service_is_told_with_what_to_do(browser, reason, words):
    with Line(browser, answering("Yes.")) as line:
        line.start().close(reason)

        expect(line.log).to_contain_text(words)
        expect(line.button("Reconnect")).to_be_visible()
        expect(line.button("Start call")).to_be_visible()
        assert line.live.creates == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("credit_balance_exhausted", "Add some in OpenAI's billing settings."),
        ("invalid_api_key", "Run hermes-voice with --check to see why."),
        ("server_error", "because of a fault of its own."),
        ("session_expired", "The call reached the longest time OpenAI allows."),
    ],
)
def test_an_error_that_ends_the_session_ends_the_call_with_what_to_do_and_a_line_in_the_log(
    browser, code, words
):
    hermes, gate = working("The build is green.")
    with Line(browser, hermes, {"progress": "off"}) as line:
        session = line.start()
        session.user_says("Check the build.", delegate=True)
        expect(line.card).to_contain_text("Working")

        session.report(code)

        expect(line.log).to_contain_text(f"{words} Your tasks go on; start the call again to hear of them.")
        expect(line.button("Reconnect")).to_be_visible()
        line.live.wait_for(lambda: session.closed_reason, about="the end of the session")
        line.live.wait_for(lambda: "session.troubled" in line.sidecar.log, about="a line in the log")
        assert f"session.troubled session={session.id} reason={code}\n" in line.sidecar.log
        gate.set()
        expect(line.card).to_contain_text("The build is green.")
        line.button("Reconnect").click()
        line.live.wait_live(count=2)
        line.live.wait_spoken("The build is green.")


def test_an_error_that_nobody_knows_is_told_once_by_its_code_and_the_call_goes_on(browser):
    with Line(browser, answering("It is green.")) as line:
        session = line.start()

        session.report("brand_new_trouble")
        session.report("brand_new_trouble")
        session.report("context_injection_incomplete")

        expect(line.log).to_contain_text("OpenAI reported an error (brand_new_trouble). The call goes on")
        session.user_says("Check the build.", delegate=True)
        line.live.wait_spoken("It is green.")
        assert line.page.locator(".notice").count() == 1
        assert "session.troubled" not in line.sidecar.log


def test_a_spoken_goodbye_hangs_up_and_runs_nothing(browser):
    with Line(browser, answering("Yes.")) as line:
        session = line.start()

        session.user_says("Please hang up.", delegate=True)

        line.live.wait_for(lambda: session.closed_reason == "close_requested")
        expect(line.status).to_have_text("Off")
        assert runs_of(line) == []
        line.type("Are you there?")
        expect(line.card).to_contain_text("Yes.")
        assert "hang up" not in runs_of(line)[0].body


def test_a_call_is_greeted_and_one_with_an_answer_waiting_is_not(browser):
    greeting = {"greeting": "Hello, what can I do?"}
    with Line(browser, answering("It is green."), config=greeting) as line:
        first = line.start()
        assert line.live.wait_spoken("Hello, what can I do?").delegation_id is None
        line.button("Hang up").click()
        line.live.wait_for(lambda: first.closed_reason)

        expect(line.status).to_have_text("Off")
        line.type("Check the build.")
        expect(line.card).to_contain_text("It is green.")
        line.start()
        line.live.wait_spoken("It is green.")

        assert [text.rpartition(": ")[2] for text in said(line)] == ["Hello, what can I do?", "It is green."]


def test_the_end_of_the_allowed_time_is_told_ahead_and_then_the_call_ends_with_the_reason(browser):
    with Line(browser, answering("Yes."), speech_rate=400) as line:
        amend(line, "/session", seconds_left=9)
        session = line.start()

        line.live.wait_spoken("The call ends in less than a minute")
        expect(line.log).to_contain_text("The call ends in less than a minute")
        line.live.wait_for(lambda: session.closed_reason == "close_requested")
        session.wait_event("session.close")
        expect(line.log).to_contain_text("is used up, so the call was ended")
        expect(line.status).to_have_text("Off")


def test_a_long_silent_run_ends_the_call_and_its_answer_opens_the_next(browser):
    hermes, gate = working("The build is green.")
    config = {"greeting": "Hello.", "on_long_run": "hang_up", "progress": "off"}
    with Line(browser, hermes, config) as line:
        amend(line, "/config", long_run_seconds=4)
        first = line.start()
        line.live.wait_spoken("Hello.")
        first.user_says("Check the build.", delegate=True)

        line.live.wait_for(lambda: first.closed_reason == "close_requested")
        expect(line.log).to_contain_text("starts again by itself")
        expect(line.button("Start call")).to_be_visible()
        assert line.live.creates == 1
        gate.set()

        line.live.wait_live(count=2)
        line.live.wait_spoken("The build is green.")
        assert [text.rpartition(": ")[2] for text in said(line)] == ["Hello.", "The build is green."]


KEEP_PEERS = """
    window.peers = [];
    const Real = window.RTCPeerConnection;
    window.RTCPeerConnection = function (...all) {
      window.peers.push(new Real(...all));
      return window.peers.at(-1);
    };
"""


def test_a_microphone_whose_sound_does_not_leave_is_told_of(browser):
    with Line(browser, answering("Yes.")) as line:
        line.live.tolerate("no audio from the client")
        line.page.add_init_script(KEEP_PEERS)
        line.page.reload()
        line.start()

        line.page.evaluate("window.peers.at(-1).getSenders()[0].replaceTrack(null)")

        expect(line.log).to_contain_text("No sound from your microphone reaches OpenAI")


def test_a_voice_whose_sound_does_not_arrive_is_told_of(browser):
    with Line(browser, answering("Yes."), speech_rate=15) as line:
        session = line.start()

        session.lose_voice()
        session.assistant_says("This is a story that goes on for a good while. " * 4, wait=False)

        expect(line.log).to_contain_text("its sound does not arrive here")


def test_a_voice_that_never_answers_a_greeting_is_told_of(browser):
    with Line(browser, answering("Yes."), config={"greeting": "Hello."}, reply_delay=None) as line:
        line.start()

        expect(line.log).to_contain_text("The voice has not answered")
