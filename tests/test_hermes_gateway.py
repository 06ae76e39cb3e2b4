"""The launcher starts each real Hermes, which then does what its scripted model says."""

import pytest
from hermes_gateway import VERSIONS, HermesGateway


@pytest.fixture(scope="module", params=VERSIONS)
def gateway(request, hermes_python):
    with HermesGateway(hermes_python(request.param), approvals={"timeout": 30}) as gateway:
        assert gateway.version.startswith(request.param)
        yield gateway


def start(gateway, text):
    status, answer = gateway.call("POST", "/v1/runs", {"input": text})
    assert (status, answer["status"]) == (202, "started")
    return answer["run_id"]


def test_a_run_with_a_tool_ends_completed(gateway):
    run = start(gateway, "Say it. [[tool cmd='echo hello there']]")

    events = list(gateway.events(run))

    names = [event["event"] for event in events]
    assert names.index("tool.started") < names.index("tool.completed")
    assert names[-1] == "run.completed"
    assert events[-1]["output"] == "The command ran. 1 tool results, 0 blocked."
    assert "hello there" in [r for r in gateway.model.requests if r.results][-1].results[0]


def test_a_dangerous_command_waits_for_the_approval(gateway, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    run = start(gateway, f"Tidy up. [[danger path='{victim}']]")

    events = gateway.events(run)
    asked = next(event for event in events if event["event"] == "approval.request")
    assert str(victim) in asked["command"]
    assert victim.exists()

    answer = {"choice": "once", "request_id": asked.get("request_id", "none in 0.19")}
    assert gateway.call("POST", f"/v1/runs/{run}/approval", answer)[0] == 200
    assert list(events)[-1]["event"] == "run.completed"
    assert not victim.exists()


def test_a_killed_gateway_comes_back_with_its_home(gateway):
    before = gateway.url, gateway.home

    gateway.kill()
    with pytest.raises(OSError, match="refused"):
        gateway.call("GET", "/health")
    gateway.launch()

    assert gateway.call("GET", "/health")[0] == 200
    assert (gateway.url, gateway.home) == before
