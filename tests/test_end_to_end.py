"""The main job on real parts: Chromium, WebRTC, the sidecar's process, both Hermes builds.

Only OpenAI's Live API is a stand-in, and a strict one: it must have had nothing to object.
"""

import json
import threading
import urllib.request

from playwright.sync_api import expect
from sidecar import conversation_of


def test_a_spoken_request_is_worked_on_and_its_answer_spoken_and_shown(line):
    session = line.start("Listening")

    delegation = session.user_says('What is in it? [[tool cmd="echo found it"]]', delegate=True)
    answer = line.live.wait_spoken("The command ran")

    assert answer.delegation_id == delegation
    assert not answer.cut
    expect(line.log).to_contain_text("What is in it?")
    card = line.card
    expect(card).to_contain_text("Done")
    expect(card).to_contain_text("The command ran")
    expect(card.get_by_text("1 step")).to_be_visible()
    line.button("Hang up").click()
    line.live.wait_for(lambda: session.closed_reason == "close_requested")
    expect(line.status).to_have_text("Off")


def test_what_is_better_read_is_shown_and_not_spoken(line):
    session = line.start("Listening")

    session.user_says("List them. [[table]]", delegate=True)
    card = line.card
    expect(card.get_by_role("table")).to_be_visible()

    line.live.wait_for(lambda: any(s.delegation_id for s in session.spoken if s.ended_at))
    said = " ".join(spoken.said for spoken in session.spoken)
    assert "|" not in said
    assert "---" not in said


def test_a_dangerous_command_is_allowed_once_by_a_button(line, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    session = line.start("Listening")

    session.user_says(f'Clean up. [[danger path="{victim}"]]', delegate=True)
    line.live.wait_spoken("yes or no")
    expect(line.page.get_by_role("region", name="Hermes asks")).to_contain_text(f"rm -rf {victim}")
    assert victim.exists()
    line.button("Allow once").click()

    line.live.wait_spoken("Done with the dangerous part")
    assert not victim.exists()
    expect(line.log).to_contain_text("You allowed it.")
    assert "choice=once by=choice" in line.sidecar.log


def test_a_dangerous_command_is_denied_by_voice(line, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    session = line.start("Listening")

    session.user_says(f'Clean up. [[danger path="{victim}"]]', delegate=True)
    line.live.wait_spoken("yes or no")
    remark = session.user_says("Maybe, what would it delete?", delegate=True)
    line.live.wait_spoken("not a clear yes or no")
    session.user_says("No, don't do it.")

    line.live.wait_spoken("1 blocked")
    assert victim.exists()
    expect(line.log).to_contain_text("You denied it.")
    assert "choice=deny by=voice" in line.sidecar.log
    # What was no answer is the user's, and Hermes gets it once the question is closed.
    line.live.wait_for(lambda: any(remark in run["delegations"] for run in line.runs()))


def times_asked(session):
    """How often the voice has asked for permission, to the end."""
    ended = [spoken for spoken in session.spoken if spoken.ended_at is not None]
    return sum(spoken.text.endswith("yes or no?") for spoken in ended)


def test_a_yes_to_something_else_that_the_voice_asked_allows_nothing(line, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    session = line.start("Listening")
    session.user_says(f'Clean up. [[danger path="{victim}"]]', delegate=True)
    line.live.wait_for(lambda: times_asked(session) == 1)

    session.assistant_says("Shall I read you the forecast?")
    session.user_says("Yes.")
    line.live.wait_for(lambda: times_asked(session) == 2, about="the question is asked anew")
    assert victim.exists()
    assert "approval.answered" not in line.sidecar.log
    session.user_says("Yes, do it.")

    line.live.wait_spoken("Done with the dangerous part")
    assert not victim.exists()
    assert "choice=once by=voice" in line.sidecar.log


def test_a_question_nobody_answers_runs_out_and_is_told(line, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    session = line.start("Listening")

    session.user_says(f'Clean up. [[danger path="{victim}"]]', delegate=True)
    line.live.wait_spoken("yes or no")

    line.live.wait_spoken("Nobody answered")
    line.live.wait_spoken("1 blocked")
    assert victim.exists()
    expect(line.log).to_contain_text("Nobody answered in time")
    expect(line.button("Allow once")).to_have_count(0)


def test_a_run_is_stopped_and_stays_silent(line):
    session = line.start("Listening")

    session.user_says("Do a lot. [[steps n=30 delay=1]]", delegate=True)
    expect(line.card).to_contain_text("step")
    line.button("Stop task").click()

    line.live.wait_spoken("stopped the task")
    expect(line.card).to_contain_text("Stopped")
    assert [run["result"]["finish_reason"] for run in line.runs()] == ["cancelled"]
    assert not any("steps" in spoken.said for spoken in session.spoken if spoken.delegation_id)


def shown(page):
    """All that the log holds, folded or not, in its order."""
    return page.get_by_role("log").evaluate("log => [...log.children].map((child) => child.textContent)")


def test_a_reload_shows_what_was_shown_in_the_order_it_happened(line, browser, tmp_path):
    victim = tmp_path / "victim"
    for number in (1, 2):
        (tmp_path / f"victim{number}").mkdir()
    session = line.start("Listening")

    session.user_says(f'Clean up. [[danger path="{victim}" n=2]]', delegate=True)
    for choice, number in (("Allow once", 1), ("Deny", 2)):
        expect(line.page.get_by_role("region", name="Hermes asks")).to_contain_text(
            f"rm -rf {victim}{number}"
        )
        line.button(choice).click()
    line.live.wait_spoken("Done with the dangerous part")
    session.user_says('What is in it? [[tool cmd="echo found it"]]', delegate=True)
    line.live.wait_spoken("The command ran")
    line.type("And typed. [[plain]]")
    expect(line.card.last).to_contain_text("Done")
    line.live.wait_spoken("And typed")
    line.button("Hang up").click()
    expect(line.status).to_have_text("Off")
    before = shown(line.page)

    line.page.reload()
    expect(line.card).to_have_count(3)
    assert shown(line.page) == before
    line.sidecar.crash_and_start_again()
    line.page.reload()
    expect(line.card).to_have_count(3)
    assert shown(line.page) == before
    other = line.sidecar.open(browser)
    expect(other.get_by_role("article")).to_have_count(3)
    assert shown(other) == before
    other.context.close()

    (first,) = [text for text in before if "You allowed it." in text]
    assert first.index(f"{victim}1") < first.index("You allowed it.") < first.index("You denied it.")
    assert "2 steps" in first
    assert [(tmp_path / f"victim{number}").exists() for number in (1, 2)] == [False, True]


def test_a_reload_in_the_middle_of_a_task_shows_its_steps_and_asks_its_question_for_the_time_it_has(
    line, tmp_path
):
    victim = tmp_path / "victim"
    line.type(f'Clean up. [[danger path="{victim}" n=2]]')
    line.button("Allow once").click()
    question = line.page.get_by_role("region", name="Hermes asks")
    expect(question).to_contain_text(f"rm -rf {victim}2")
    before = shown(line.page)
    (run,) = line.runs()

    line.page.reload()
    expect(question).to_contain_text(f"rm -rf {victim}2")
    assert shown(line.page) == before
    assert before[0].startswith("You: Clean up.")
    assert "You allowed it." in before[1]
    left = int(question.locator(".left").text_content().split()[0])
    assert 0 < left <= run["questions"][-1]["seconds_left"]
    line.button("Deny").click()
    expect(line.card).to_contain_text("Done with the dangerous part")
    expect(line.card).to_contain_text("You denied it.")


def test_a_page_reloaded_in_the_middle_of_a_run_still_gets_the_answer(line, gate):
    session = line.start("Listening")

    session.user_says(f'Take your time. [[tool cmd="{gate.command}"]]', delegate=True)
    expect(line.card).to_contain_text("step")
    line.page.reload()

    line.live.wait_for(lambda: line.live.hangups == [session.id], about="the old session is hung up")
    expect(line.card).to_contain_text("Working")
    line.start("Hermes is working")
    gate.open()
    line.live.wait_spoken("The command ran")
    expect(line.card).to_contain_text("Done")
    assert len(line.runs()) == 1


def test_a_correction_reaches_the_agent_together_with_the_first_request(line, hermes):
    """Steered where Hermes can, else stopped and started again with both."""
    session = line.start("Listening")

    session.user_says("Look at the first folder. [[steps n=30 delay=1]]", delegate=True)
    expect(line.card).to_contain_text("step")
    steered = hermes.version > "0.20.4"
    second = session.user_says(f"No, the second one. {'' if steered else '[[report]]'}", delegate=True)

    # A report is data, which is shown and not read out.
    answer = line.live.wait_spoken("second one" if steered else "on your screen")
    assert answer.delegation_id == second
    ends = [run["result"]["finish_reason"] for run in line.runs()]
    assert ends == (["stop"] if steered else ["cancelled", "stop"])
    asked = "\n".join(text for request in hermes.model.requests[-3:] for text in request.users)
    assert "first folder" in asked
    assert "second one" in asked + "\n".join(hermes.model.requests[-1].steers)
    expect(line.card.last).to_contain_text("Done")


def test_a_word_that_comes_late_reaches_the_agent_at_once_with_its_whole_sentence(line, hermes):
    before = len(hermes.model.requests)
    session = line.start("Listening")
    text = "Do not delete the logs today. [[steps n=30 delay=1]]"

    session.user_says(text, delegate=True, late_fragment=True, late_by=2)

    def told():
        return [text for asked in hermes.model.requests[before:] for text in [*asked.users, *asked.steers]]

    whole = "What I said is: Do not delete the logs today."
    line.live.wait_for(lambda: any(whole in each for each in told()), about="the correction")
    assert "Do not delete the today." in told()[0]
    line.button("Stop task").click()
    line.live.wait_for(lambda: all(run["result"] for run in line.runs()), about="the end of all runs")


def test_an_unrelated_request_while_hermes_answers_without_tools_is_answered_too(line):
    session = line.start("Listening")

    session.user_says("Tell me a story. [[slow deltas=40 delay=0.1]]", delegate=True)
    line.live.wait_for(lambda: any(run["state"] == "running" for run in line.runs()))
    second = session.user_says("And what is the time? [[plain]]", delegate=True)

    answer = line.live.wait_spoken("what is the time")
    assert answer.delegation_id == second
    assert all(run["result"] for run in line.runs())


def test_a_spoken_stop_stops_and_is_confirmed_only_when_hermes_has(line):
    session = line.start("Listening")

    session.user_says("[[steps n=30 delay=1]] Do a lot.", delegate=True)
    expect(line.card).to_contain_text("step")
    session.user_says("Stop.", delegate=True)

    line.live.wait_spoken("stopped the task")
    # The receipt is left out where Hermes is quicker than the voice; it never comes after.
    told = [spoken.text for spoken in session.spoken if "stop" in spoken.text]
    assert told[-1] == "Hermes has stopped the task."
    assert told[:-1] in ([], ["I am asking Hermes to stop."])
    assert [run["result"]["finish_reason"] for run in line.runs()] == ["cancelled"]


def test_two_delegations_at_once_leave_no_orphan(line, hermes):
    """Two pages of one conversation ask in the same moment, past the page's own care."""
    conversation = conversation_of(line.page)
    before = len(hermes.model.requests)
    results = []
    gate = threading.Barrier(2)

    def ask(number):
        gate.wait()
        results.append(delegate(line, conversation, f"d{number}", f"Request {number}. [[steps n=3 delay=1]]"))

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    runs = line.runs()
    finished = [run["result"]["finish_reason"] for run in runs]
    assert finished in (["cancelled", "stop"], ["stop", "stop"], ["stop"])
    assert all(updates[-1]["type"] == "done" for updates in results)
    asked = "\n".join(text for each in hermes.model.requests[before:] for text in [*each.users, *each.steers])
    assert "Request 1." in asked
    assert "Request 2." in asked
    assert len(hermes.model.requests) > before


def delegate(line, conversation, delegation, text):
    """POST a request as a page does, and return its updates."""
    body = {
        "hermes_session": conversation,
        "delegation_id": delegation,
        "lines": [{"speaker": "user", "text": text}],
    }
    request = urllib.request.Request(
        line.sidecar.url + "delegate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return [json.loads(text) for text in response]
