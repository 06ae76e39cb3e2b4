"""A sidecar that is killed and started again, between a real page and real Hermes builds."""

from playwright.sync_api import expect
from sidecar import conversation_of


def test_a_sidecar_killed_in_the_middle_of_a_run_tells_its_answer_after_its_restart(line, hermes, gate):
    session = line.start("Listening")

    session.user_says(f'Take your time. [[tool cmd="{gate.command}"]]', delegate=True)
    expect(line.card).to_contain_text("step")
    line.sidecar.crash_and_start_again()
    gate.open()

    line.live.wait_spoken("The command ran")
    expect(line.card).to_contain_text("Done")
    assert [run["result"]["finish_reason"] for run in line.runs()] == ["stop"]
    asked = [r for r in hermes.model.requests if r.users and "Take your time" in r.users[-1] and not r.rounds]
    assert len([r for r in asked if r.scenario != "auxiliary"]) == 1
    line.page.faults.clear()  # What was cut off is no fault of the page's.


def test_a_hermes_killed_in_the_middle_of_a_run_is_told_as_unknown_or_interrupted(line, hermes):
    session = line.start("Listening")

    session.user_says("Take your time. [[steps n=20 delay=1]]", delegate=True)
    expect(line.card).to_contain_text("step")
    hermes.kill()
    expect(line.status).to_contain_text("cannot be reached")
    hermes.launch()

    outcome = "Interrupted" if hermes.version > "0.21" else "Outcome unknown"
    expect(line.card).to_contain_text(outcome)
    assert [run["result"]["finish_reason"] for run in line.runs()] != ["stop"]
    hermes.warm_up()  # The next test finds it as this one did.


def test_a_second_page_sees_the_same_and_a_result_is_told_once(line, browser, gate):
    session = line.start("Listening")
    session.user_says(f'Take your time. [[tool cmd="{gate.command}"]]', delegate=True)
    expect(line.card).to_contain_text("step")
    conversation = conversation_of(line.page)

    other = line.sidecar.open(browser)
    expect(other.get_by_role("article")).to_contain_text("Working")
    assert conversation_of(other) == conversation
    gate.open()

    line.live.wait_spoken("The command ran")
    expect(other.get_by_role("article")).to_contain_text("Done")
    expect(other.get_by_role("log")).to_contain_text("Take your time.")
    line.button("Hang up").click()
    expect(line.status).to_have_text("Off")
    other.get_by_role("button", name="Start call").click()
    second = line.live.wait_live(count=2)
    assert [item["role"] for item in second.config["input"]][:1] == ["user"]
    second.user_says("Hello again.")
    assert not any("The command ran" in spoken.text for spoken in second.spoken)
    other.context.close()


def test_a_forgotten_conversation_is_gone_here_and_at_hermes(line, hermes):
    session = line.start("Listening")
    session.user_says("Remember this. [[plain]]", delegate=True)
    line.live.wait_spoken("Remember this")
    conversation = conversation_of(line.page)
    line.button("Hang up").click()
    expect(line.status).to_have_text("Off")
    assert hermes.call("GET", f"/api/sessions/{conversation}/messages")[0] == 200

    line.button("Conversations").click()
    forget = line.page.get_by_role("button", name="Forget")
    forget.click()
    with line.page.expect_navigation():
        forget.click()

    expect(line.card).to_have_count(0)
    assert conversation_of(line.page) != conversation
    assert hermes.call("GET", f"/api/sessions/{conversation}/messages")[0] == 404
    assert line.sidecar.get(f"runs?conversation={conversation}")["runs"] == []


def test_a_question_open_while_the_sidecar_restarts_is_answered_or_said_to_be_lost(line, hermes, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    session = line.start("Listening")
    session.user_says(f'Clean up. [[danger path="{victim}"]]', delegate=True)
    line.live.wait_spoken("yes or no")

    line.sidecar.crash_and_start_again()

    if hermes.version > "0.21":  # Its status holds the question, and an answer is bound to it.
        expect(line.button("Allow once")).to_be_enabled()
        line.live.wait_for(lambda: "run.resumed" in line.sidecar.log)
        line.button("Allow once").click()
        expect(line.log).to_contain_text("You allowed it.")
        line.live.wait_spoken("Done with the dangerous part")
    else:
        line.live.wait_spoken("cannot be answered any more")
        expect(line.button("Allow once")).to_have_count(0)
        expect(line.log).to_contain_text("it could not be answered any more")
        assert victim.exists()
    line.page.faults.clear()  # What was cut off is no fault of the page's.
