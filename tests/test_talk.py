"""What the user hears, in a real browser: answers that are cut off, refused or asked for again,
questions that nobody answers, and a loudspeaker that the microphone hears."""

import re

import live_service
import pytest
from playwright.sync_api import expect
from test_browser import Line, answering
from working_hermes import WorkingHermes

FIRST = f"The first part is about the server on the third host, {'which is well, ' * 18}so it seems."
SECOND = f"The second part is about the printers in the hall, {'which are well, ' * 16}so they say."


def said(session, fragment):
    """What the voice said of the answer with these words, as often as it began it."""
    return [spoken for spoken in session.spoken if fragment in spoken.text]


def wait_said(line, fragment, times):
    """Wait until the voice has begun this so often, and has ended."""
    session = line.live.session
    line.live.wait_for(
        lambda: len(said(session, fragment)) == times and said(session, fragment)[-1].ended_at,
        about=f"{times} times {fragment!r}",
    )


def starts(line):
    """The runs that Hermes was asked to start."""
    return [
        request for request in line.hermes.seen if request.method == "POST" and request.path == "/v1/runs"
    ]


def test_an_answer_that_was_talked_over_goes_on_when_the_user_says_so(browser):
    with Line(browser, answering(f"{FIRST} {SECOND}")) as line:
        session = line.start()
        session.user_says("How are they?", delegate=True)
        line.live.wait_for(lambda: said(session, FIRST) and len(said(session, FIRST)[0].said) > 60)

        session.user_says("Wait a moment please.", interrupt=True)
        expect(line.button("Go on")).to_be_visible()
        assert not said(session, SECOND)
        assert said(session, FIRST)[0].cut
        # Words without a pause between them are one utterance.
        line.live.wait_for(lambda began=session.clock_ms: session.clock_ms > began + 1500)
        session.user_says("Go on.", delegate=True)

        line.live.wait_spoken(FIRST)
        line.live.wait_spoken(SECOND)
        expect(line.button("Go on")).to_be_hidden()
        assert len(said(session, SECOND)) == 1
        assert len(starts(line)) == 1


def test_stop_speaking_keeps_the_answer_and_a_click_says_it_again(browser):
    with Line(browser, answering("It rains in Hamburg, and the sun shines in Rome."), speech_rate=5) as line:
        session = line.start()
        session.user_says("How is the weather?", delegate=True)
        line.live.wait_for(lambda: said(session, "Hamburg") and said(session, "Hamburg")[0].said)

        line.button("Stop speaking").click()
        line.button("Go on").click()
        line.live.speech_rate = 60
        wait_said(line, "Hamburg", times=2)
        line.button("Say that again").click()

        wait_said(line, "Hamburg", times=3)
        assert len(starts(line)) == 1


@pytest.mark.parametrize("width", [320, 900])
def test_what_can_be_pressed_stays_in_its_place_as_the_voice_comes_and_goes(browser, width):
    with Line(browser, WorkingHermes(), speech_rate=30) as line:
        line.page.set_viewport_size({"width": width, "height": 640})
        session = line.start("Listening")
        names = ("Hang up", "Mute", "Stop speaking", "Stop task")
        places = lambda: [line.button(name).bounding_box() for name in names]  # noqa: E731
        at_first = places()

        session.user_says("How is the weather?", delegate=True)
        line.hermes.run().end("completed", output="It rains.")
        line.live.wait_spoken("It rains.")
        expect(line.button("Say that again")).to_be_visible()
        assert places() == at_first

        session.user_says("Clean up.", delegate=True)
        line.hermes.run(2).ask()
        line.live.wait_for(lambda: said(session, "yes or no") and said(session, "yes or no")[0].said)
        expect(line.button("Stop speaking")).to_be_enabled()
        deny = line.button("Deny").bounding_box()
        line.live.wait_spoken("yes or no")
        expect(line.button("Stop speaking")).to_be_disabled()
        assert (line.button("Deny").bounding_box(), places()) == (deny, at_first)
        line.hermes.run(2).end("completed", output="It is clean.")
        line.live.wait_spoken("It is clean.")


def test_what_the_model_refuses_for_its_length_is_said_in_two(browser, monkeypatch):
    monkeypatch.setattr(live_service, "APPEND_TOKENS", 30)
    answer = "The server is well, and so are all of the hosts that are behind it today. "
    answer += "The printer in the hall is out of paper again, and nobody seems to know why that is so."
    with Line(browser, answering(answer)) as line:
        line.live.tolerate("must not exceed 30 tokens")
        session = line.start()
        session.user_says("How are they?", delegate=True)

        line.live.wait_spoken("behind it today.")
        line.live.wait_spoken("The printer in the hall")
        assert len(line.live.tolerated) == 1
        assert " ".join(spoken.text for spoken in session.spoken if spoken.delegation_id) == answer


def test_a_question_that_nobody_answers_is_asked_for_again(browser):
    with Line(browser, WorkingHermes(), config={"approval_seconds": 26}) as line:
        session = line.start()
        session.user_says("Clean up.", delegate=True)
        line.hermes.run().ask()
        line.live.wait_spoken("yes or no")
        asked = line.page.get_by_role("region", name="Hermes asks")
        left = lambda: int(re.search(r"(\d+) s left", asked.inner_text())[1])  # noqa: E731
        at_first = left()
        line.live.wait_for(lambda: left() < at_first, about="a second less")

        reminder = line.live.wait_spoken("Hermes gives up on its question")

        assert not reminder.cut
        assert len(said(session, "gives up")) == 1
        line.hermes.run().end("completed", output="It is clean.")
        line.live.wait_spoken("It is clean.")


def test_the_voice_that_the_microphone_hears_is_no_request(browser):
    with Line(browser, answering("Yes."), speech_rate=15) as line:
        session = line.start()
        session.assistant_says(
            "You can ask me about the weather in Rome and in Hamburg at any time", wait=False
        )
        line.live.wait_for(lambda: "weather in" in session.spoken[0].said)

        session.user_says("ask me about the weather in", word_delay=0.2, delegate=True)

        line.live.wait_spoken("did not catch")
        expect(line.log).not_to_contain_text("You: ask me")
        assert starts(line) == []
        session.user_says("How is the weather in Rome?", delegate=True)
        line.live.wait_spoken("Yes.")
        assert len(starts(line)) == 1


def test_a_yes_after_the_click_is_told_as_answered_already(browser):
    with Line(browser, WorkingHermes()) as line:
        session = line.start()
        session.user_says("Clean up.", delegate=True)
        line.hermes.run().ask()
        line.live.wait_spoken("yes or no")

        line.button("Allow once").click()
        expect(line.log).to_contain_text("You allowed it.")
        session.user_says("Yes.", delegate=True)

        expect(line.log).to_contain_text("Hermes's question was already answered.")
        assert len(starts(line)) == 1
        line.hermes.run().end("completed", output="It is clean.")
        line.live.wait_spoken("It is clean.")
