"""What is said while Hermes works: handed to the run, started after its stop, or after its end."""

import threading

import pytest
from bench import QUEUE, RESTART, SOON, TIMEOUT, Bench
from scripted_hermes import CLOSED, CUT, reply

from hermes_voice import ACTIVE_LIMIT, TooMany

RUNS = ("POST", "/v1/runs")
STOPS = ("POST", "/v1/runs/*/stop")
STEERS = ("POST", "/v1/runs/*/steer")


def working(b, text="Buy milk.", delegation="d1"):
    """A page that follows a run, and that run at Hermes."""
    page = b.delegate(text, delegation)
    run = b.hermes.run()
    page.wait("run", state="running")
    return page, run


def tool(run):
    run.emit("tool.started", tool="terminal", preview="ls")
    run.emit("tool.completed", tool="terminal", error=False)


def delegations_of(b):
    return [run["delegations"] for run in b.runs()]


# ---- handed over -------------------------------------------------------------


def test_words_are_handed_to_the_running_run(bench):
    b = bench()
    first, run = working(b)

    second = b.delegate("And bread.", "d2")
    first.wait("steered")
    tool(run)
    run.end("completed", output="Bought both.")

    assert run.words == ["And bread."]
    assert second.run_id == first.run_id
    assert second.done() == first.done()
    assert "continued_by" not in first.done()
    assert delegations_of(b) == [["d1", "d2"]]
    assert (len(b.hermes.asked(*RUNS)), b.hermes.asked(*STOPS)) == (1, [])


def test_the_same_words_are_handed_over_once(bench):
    b = bench()
    first, run = working(b)

    pages = [b.delegate("And bread.", "d2") for _ in range(3)]

    assert {page.run_id for page in pages} == {first.run_id}
    assert run.words == ["And bread."]


def test_the_same_words_at_once_while_the_run_is_being_started_are_handed_over_once(bench):
    b = bench()
    gate = threading.Event()
    b.hermes.once("GET", "/v1/capabilities", reply(200, {"features": {}}, after=gate))
    b.hermes.transcripts["c1"] = []
    b.delegate("Buy milk.", "d1")
    pages = []
    threads = [
        threading.Thread(target=lambda: pages.append(b.delegate("And bread.", "d2"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()

    gate.set()
    for thread in threads:
        thread.join(TIMEOUT)

    assert b.hermes.run().words == ["And bread."]
    assert delegations_of(b) == [["d1", "d2"]]


def test_a_run_that_hermes_does_not_name_in_time_is_replaced(bench):
    b = bench(steer=SOON)
    gate = threading.Event()
    b.hermes.once("GET", "/v1/capabilities", reply(200, {"features": {}}, after=gate))
    first = b.delegate("Buy milk.", "d1")
    second = b.delegate("And bread.", "d2")

    gate.set()
    b.hermes.run(2).end("completed", output="Done.")

    assert first.done()["superseded_by"] == second.run_id
    assert second.done()["finish_reason"] == "stop"
    assert ["And bread." in run.body["input"] for run in b.hermes.runs] == [False, True]


@pytest.mark.parametrize("status", [409, 404])
def test_a_run_that_takes_no_words_is_stopped_and_asked_again(bench, status):
    b = bench()
    first, _ = working(b)
    b.hermes.once(*STEERS, reply(status, {"error": {"code": "run_not_accepting_steer"}}))

    second = b.delegate("And bread.", "d2")
    asked = b.hermes.run(2).body["input"]
    b.hermes.run(2).end("completed", output="Bought both.")

    assert "Buy milk." in asked
    assert "Said now:\nAnd bread." in asked
    assert first.done()["superseded_by"] == second.run_id
    assert second.done()["say"] == ["Bought both."]
    assert delegations_of(b) == [["d1"], ["d2"]]


def test_a_hermes_that_cannot_be_steered_is_asked_again(bench):
    b = bench(idempotent=False)
    b.hermes.steers = False
    first, _ = working(b)

    second = b.delegate("And bread.", "d2")
    b.hermes.run(2).end("completed", output="Bought both.")

    assert first.done()["superseded_by"] == second.run_id
    assert second.done()["finish_reason"] == "stop"


def test_words_for_a_run_that_has_just_ended_are_a_run_of_their_own(bench):
    """Hermes's no comes after the end has been read, whatever the run did meanwhile."""
    b = bench()
    first, run = working(b)
    gate = threading.Event()
    b.hermes.once(*STEERS, reply(409, {"error": {"code": "run_not_accepting_steer"}}, after=gate))
    pages = []
    thread = threading.Thread(target=lambda: pages.append(b.delegate("And bread.", "d2")))
    thread.start()
    b.hermes.wait_for(*STEERS)
    tool(run)
    run.end("completed", output="Bought milk.")
    assert first.done()["say"] == ["Bought milk."]

    gate.set()
    b.hermes.run(2).end("completed", output="Bought bread.")
    thread.join(TIMEOUT)

    assert b.hermes.run(2).body["input"] == "And bread."
    assert pages[0].done()["say"] == ["Bought bread."]
    assert delegations_of(b) == [["d1"], ["d2"]]


def test_a_yes_that_comes_after_the_end_is_judged_by_the_end(bench):
    b = bench()
    first, run = working(b)
    gate = threading.Event()
    b.hermes.once(*STEERS, reply(200, {"accepted": True}, after=gate))
    pages = []
    thread = threading.Thread(target=lambda: pages.append(b.delegate("And bread.", "d2")))
    thread.start()
    b.hermes.wait_for(*STEERS)
    run.end("completed", output="Bought milk.", pending_steer="And bread.")
    first.done()

    gate.set()
    b.hermes.run(2).end("completed", output="Bought bread.")
    thread.join(TIMEOUT)

    assert pages[0].done()["say"] == ["Bought bread."]
    assert len(b.hermes.runs) == 2
    assert delegations_of(b) == [["d1"], ["d2"]]


def test_refused_words_that_cannot_become_a_run_can_be_sent_again(bench):
    b = bench()
    working(b)
    for number in range(ACTIVE_LIMIT - 1):
        b.delegate("Work.", conversation=f"other{number}")
    b.hermes.once(*STEERS, reply(409))

    with pytest.raises(TooMany):
        b.delegate("And bread.", "d2")
    b.delegate("And bread.", "d2")

    assert b.hermes.run().words == ["And bread."] * 2
    assert ["d1", "d2"] in delegations_of(b)


# ---- not read ----------------------------------------------------------------


def not_read(b, first):
    """The words have become the next run, which answers by itself."""
    asked = b.hermes.run(2)
    assert asked.body["input"] == "And bread."
    asked.end("completed", output="Bought bread.")
    done = first.done()
    second = b.delegate("And bread.", "d2")
    assert (done["continued_by"], done["continued"]) == (second.run_id, ["d2"])
    assert second.done()["say"] == ["Bought bread."]
    assert delegations_of(b) == [["d1"], ["d2"]]
    assert len(b.hermes.asked(*RUNS)) == 2
    return done


def test_words_that_come_back_are_the_next_run(bench):
    b = bench()
    first, run = working(b)
    b.delegate("And bread.", "d2")
    tool(run)

    run.end("completed", output="Bought milk.", pending_steer="And bread.")

    assert not_read(b, first)["say"] == ["Bought milk."]


def test_words_after_which_the_run_did_not_look_are_the_next_run(bench):
    b = bench()
    first, run = working(b)
    tool(run)
    first.wait("tool", count=2)
    b.delegate("And bread.", "d2")

    run.end("completed", output="Bought milk.")

    assert not_read(b, first)["say"] == ["Bought milk."]


@pytest.mark.parametrize(("state", "reason"), [("failed", "failed"), ("interrupted", "interrupted")])
def test_words_for_a_run_that_broke_off_are_the_next_run(bench, state, reason):
    b = bench()
    first, run = working(b)
    b.delegate("And bread.", "d2")
    tool(run)

    run.end(state, error="HTTP 500: oops")

    assert not_read(b, first)["finish_reason"] == reason


def test_words_for_a_run_that_hermes_forgot_are_the_next_run(bench):
    b = bench()
    first, run = working(b)
    b.delegate("And bread.", "d2")

    b.hermes.runs[0] = run_away = type(run)(b.hermes, "gone", b.hermes.asked(*RUNS)[0])
    run.cut(CUT)

    assert run_away.words == []
    assert not_read(b, first)["finish_reason"] == "unknown"


@pytest.mark.parametrize("answer", [CLOSED, reply(200, "nonsense")])
def test_words_whose_answer_was_lost_are_kept_until_the_end_tells(bench, answer):
    b = bench()
    first, run = working(b)
    b.hermes.once(*STEERS, answer)
    second = b.delegate("And bread.", "d2")

    assert second.run_id == first.run_id
    assert b.hermes.asked(*STOPS) == []
    run.end("completed", output="Bought milk.")

    not_read(b, first)


def test_words_whose_answer_was_lost_can_have_been_read(bench):
    b = bench()
    first, run = working(b)
    b.hermes.once(*STEERS, CLOSED)
    b.delegate("And bread.", "d2")
    tool(run)

    run.end("completed", output="Bought both.")

    assert "continued_by" not in first.done()
    assert len(b.hermes.runs) == 1


def test_several_words_that_were_not_read_are_one_run_in_their_order(bench):
    b = bench()
    first, run = working(b)
    for number, text in enumerate(("And bread.", "And eggs."), 2):
        b.delegate(text, f"d{number}")

    run.end("completed", output="Bought milk.", pending_steer="And bread.\nAnd eggs.")
    b.hermes.run(2).end("completed", output="Bought all.")

    assert b.hermes.run(2).body["input"].endswith("User: And bread.\nUser: And eggs.")
    assert first.done()["continued"] == ["d2", "d3"]
    assert delegations_of(b) == [["d1"], ["d2", "d3"]]


def test_unread_words_go_into_the_run_that_waits(bench):
    b = bench()
    b.hermes.stops_hold = False
    first, run = working(b)
    b.delegate("And bread.", "d2")
    b.hermes.once(*STEERS, reply(409))
    third = b.delegate("No, eggs.", "d3")
    b.hermes.wait_for(*STOPS)

    run.end("cancelled")
    asked = b.hermes.run(2).body["input"]
    b.hermes.run(2).end("completed", output="Eggs and bread.")

    assert [asked.count(words) for words in ("Buy milk.", "And bread.", "No, eggs.")] == [1, 1, 1]
    assert first.done()["continued_by"] == first.done()["superseded_by"] == third.run_id
    assert third.done()["finish_reason"] == "stop"
    assert len(b.hermes.runs) == 2


def test_the_users_stop_drops_the_words_too(bench):
    b = bench()
    first, _ = working(b)
    second = b.delegate("And bread.", "d2")

    b.stop(first.run_id)

    assert first.done()["finish_reason"] == "cancelled"
    assert "continued_by" not in second.done()
    assert b.delegate("And bread.", "d2").run_id == first.run_id
    assert len(b.hermes.asked(*RUNS)) == 1


def test_words_after_the_stop_are_a_run_of_their_own(bench):
    b = bench()
    b.hermes.stops_hold = False
    first, run = working(b)
    b.stop(first.run_id)

    second = b.delegate("Buy bread.", "d2")
    run.end("cancelled")
    b.hermes.run(2).end("completed", output="Bought bread.")

    assert run.words == []
    assert b.hermes.run(2).body["input"] == "Buy bread."
    assert second.done()["finish_reason"] == "stop"


# ---- restart and queue -------------------------------------------------------


def test_under_restart_nothing_is_handed_over(bench):
    b = bench(config=RESTART)
    first, run = working(b)

    second = b.delegate("And bread.", "d2")
    b.hermes.run(2).end("completed", output="Bought both.")

    assert run.words == []
    assert first.done()["superseded_by"] == second.run_id
    assert second.done()["finish_reason"] == "stop"


def test_under_queue_requests_run_one_after_the_other(bench):
    b = bench(config=QUEUE)
    first, run = working(b)
    second, third = b.delegate("And bread.", "d2"), b.delegate("And eggs.", "d3")

    assert len({first.run_id, second.run_id, third.run_id}) == 3
    assert [run["state"] for run in b.runs()] == ["running", "queued", "queued"]
    for number, page in enumerate((first, second, third), 1):
        assert len(b.hermes.runs) == number
        b.hermes.run(number).end("completed", output=f"Bought {number}.")
        assert page.done()["say"] == [f"Bought {number}."]
        if number < 3:
            b.hermes.run(number + 1)

    assert [run.body["input"] for run in b.hermes.runs] == ["Buy milk.", "And bread.", "And eggs."]
    assert (b.hermes.asked(*STOPS), b.hermes.asked(*STEERS)) == ([], [])
    assert run.followers == 1


def test_under_queue_a_stop_of_the_one_between_starts_nothing_early(bench):
    b = bench(config=QUEUE)
    first, run = working(b)
    second, third = b.delegate("And bread.", "d2"), b.delegate("And eggs.", "d3")

    b.stop(second.run_id)
    assert second.done()["finish_reason"] == "cancelled"
    b.follow(third.run_id)
    assert [r["state"] for r in b.runs()] == ["running", "ended", "queued"]
    assert len(b.hermes.asked(*RUNS)) == 1
    run.end("completed", output="Bought milk.")
    b.hermes.run(2).end("completed", output="Bought eggs.")

    assert first.done()["say"] == ["Bought milk."]
    assert third.done()["say"] == ["Bought eggs."]
    assert len(b.hermes.asked(*RUNS)) == 2


def test_under_queue_a_run_that_failed_lets_the_next_one_begin(bench):
    b = bench(config=QUEUE)
    first, run = working(b)
    second = b.delegate("And bread.", "d2")

    run.end("failed", error="HTTP 500: oops")
    b.hermes.run(2).end("completed", output="Bought bread.")

    assert first.done()["finish_reason"] == "failed"
    assert second.done()["finish_reason"] == "stop"
    assert b.hermes.run(2).body["input"] == "And bread."


def test_words_are_never_lost_or_read_twice_whenever_the_run_ends(bench: type[Bench]):
    """Fifty times: words and the run's end at the same moment."""
    b = bench()

    for number in range(50):
        conversation, before = f"c{number}", len(b.hermes.runs)
        first = b.delegate("Buy milk.", "d1", conversation)
        run = b.hermes.run(before + 1)
        first.wait("run", state="running")
        barrier = threading.Barrier(2)

        def end(run=run, barrier=barrier):
            barrier.wait(TIMEOUT)
            unread = "\n".join(run.words)
            run.end("completed", output="Bought milk.", **({"pending_steer": unread} if unread else {}))

        thread = threading.Thread(target=end)
        thread.start()
        barrier.wait(TIMEOUT)
        second = b.delegate("And bread.", "d2", conversation)
        thread.join(TIMEOUT)
        first.done()
        b.hermes.run(before + 2).end("completed", output="Bought bread.")

        answered = b.delegate("And bread.", "d2", conversation)
        assert answered.done()["say"] == ["Bought bread."]
        assert second.done()["finish_reason"] == "stop"
        asked = [run.body["input"] for run in b.hermes.runs[before:]]
        assert asked.count("And bread.") == 1
        assert len(asked) == 2
