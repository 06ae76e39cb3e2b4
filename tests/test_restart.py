"""A sidecar that is killed and started again, between a real page and real Hermes builds."""

import pytest
from hermes_gateway import VERSIONS, HermesGateway
from live_service import LiveService
from playwright.sync_api import expect
from sidecar import Sidecar, conversation_of
from test_end_to_end import Call


@pytest.fixture(scope="module", params=VERSIONS)
def hermes(request, hermes_python):
    with HermesGateway(hermes_python(request.param)) as gateway:
        gateway.warm_up()
        yield gateway


@pytest.fixture
def line(hermes, browser):
    with LiveService() as live, Sidecar(live, hermes.url, hermes.key) as sidecar:
        call = Call(live, sidecar, sidecar.open(browser))
        yield call
        call.page.context.close()
    assert live.violations == []


def test_a_sidecar_killed_in_the_middle_of_a_run_tells_its_answer_after_its_restart(line, hermes):
    session = line.start()

    session.user_says("Take your time. [[steps n=5 delay=1]]", delegate=True)
    expect(line.page.get_by_role("article")).to_contain_text("step")
    line.sidecar.crash_and_start_again()

    line.live.wait_spoken("Did 5 of 5 steps", timeout=40)
    expect(line.page.get_by_role("article")).to_contain_text("Done")
    assert [run["result"]["finish_reason"] for run in line.runs()] == ["stop"]
    asked = [r for r in hermes.model.requests if r.users and "Take your time" in r.users[-1] and not r.rounds]
    assert len([r for r in asked if r.scenario != "auxiliary"]) == 1


def test_a_hermes_killed_in_the_middle_of_a_run_is_told_as_unknown_or_interrupted(line, hermes):
    session = line.start()

    session.user_says("Take your time. [[steps n=20 delay=1]]", delegate=True)
    expect(line.page.get_by_role("article")).to_contain_text("step")
    hermes.kill()
    expect(line.status).to_contain_text("cannot be reached", timeout=20_000)
    hermes.launch()

    outcome = "Interrupted" if hermes.version > "0.21" else "Outcome unknown"
    expect(line.page.get_by_role("article")).to_contain_text(outcome, timeout=30_000)
    assert [run["result"]["finish_reason"] for run in line.runs()] != ["stop"]


def test_a_second_page_sees_the_same_and_a_result_is_told_once(line, browser):
    session = line.start()
    session.user_says("Take your time. [[steps n=3 delay=1]]", delegate=True)
    expect(line.page.get_by_role("article")).to_contain_text("step")
    conversation = conversation_of(line.page)

    other = line.sidecar.open(browser)
    expect(other.get_by_role("button", name="Conversations")).to_be_visible()
    assert conversation_of(other) == conversation
    expect(other.get_by_role("article")).to_contain_text("Working")

    line.live.wait_spoken("Did 3 of 3 steps", timeout=20)
    expect(other.get_by_role("article")).to_contain_text("Done")
    expect(other.get_by_role("log")).to_contain_text("Take your time.")
    line.button("Hang up").click()
    expect(line.status).to_have_text("Off")
    other.get_by_role("button", name="Start call").click()
    second = line.live.wait_live(count=2)
    assert [item["role"] for item in second.config["input"]][:1] == ["user"]
    second.user_says("Hello again.")
    assert not any("steps" in spoken.text for spoken in second.spoken)
    other.context.close()


def test_a_forgotten_conversation_is_gone_here_and_at_hermes(line, hermes):
    session = line.start()
    session.user_says("Remember this. [[plain]]", delegate=True)
    line.live.wait_spoken("Remember this")
    conversation = conversation_of(line.page)
    line.button("Hang up").click()
    expect(line.status).to_have_text("Off")
    assert hermes.call("GET", f"/api/sessions/{conversation}/messages")[0] == 200

    line.button("Conversations").click()
    forget = line.page.get_by_role("button", name="Forget")
    forget.click()
    forget.click()

    expect(line.page.get_by_role("article")).to_have_count(0)
    line.live.wait_for(lambda: conversation_of(line.page) != conversation)
    assert hermes.call("GET", f"/api/sessions/{conversation}/messages")[0] == 404
    assert line.sidecar.get(f"runs?conversation={conversation}")["runs"] == []
