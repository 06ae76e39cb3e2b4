"""What a call costs: the seconds of a session, the caps of a call and of a day, and who hangs up."""

import datetime
import logging
import math
import threading
import time

import pytest
from bench import SOON, TIMEOUT
from scripted_hermes import CLOSED, reply

import hermes_voice
from hermes_voice import (
    BILLED_LEAST,
    SHORTEST_CALL,
    UNHEARD_SECONDS,
    BadRequest,
    Config,
    Conflict,
    Journal,
    Session,
    TooMany,
    call_left,
    day_around,
    day_left,
    next_hang_up,
    resume_session,
    watch,
)

SESSIONS = ("POST", "/v1/live/sessions")
HANGUPS = ("POST", "/v1/live/sessions/*/hangup")
NOON = time.mktime((2026, 6, 16, 12, 0, 0, 0, 0, -1))  # a Tuesday
HOUR, DAY = 3600, 86400
CAPS = Config(call_minutes=30, day_minutes=60)


class Clock:
    """Time that passes when a test says so: both the wall clock and the one that is never set."""

    def __init__(self, now=NOON):
        self.now = now

    def __call__(self):
        return self.now


def session(opened, heard, ended=True, call="c"):
    return Session(f"live_{opened}", call, "talk", opened, heard, ended)


# ---- the seconds of a session ------------------------------------------------


@pytest.mark.parametrize(
    ("opened", "heard", "ended", "after", "before", "seconds"),
    [
        (100, 400, True, -math.inf, math.inf, 300),
        (100, 400, False, -math.inf, math.inf, 300),
        (100, 103, True, -math.inf, math.inf, BILLED_LEAST),
        (100, 103, False, -math.inf, math.inf, 3),
        (100, 400, True, 200, 300, 100),
        (100, 400, True, 0, 150, 50),
        (100, 400, True, 150, 1000, 250),
        (100, 400, True, 400, 500, 0),
        (100, 400, True, 0, 100, 0),
        # The least that is billed reaches over midnight too.
        (100, 103, True, 105, 1000, 10),
    ],
)
def test_the_seconds_of_a_session_between_two_times(opened, heard, ended, after, before, seconds):
    assert session(opened, heard, ended).seconds(after, before) == seconds


@pytest.mark.parametrize(
    ("now", "used"),
    [
        (430, 330),  # heard of half a minute later
        (400, 300),
        (400 + UNHEARD_SECONDS, 300 + UNHEARD_SECONDS),
        (400 + DAY, 300 + UNHEARD_SECONDS),  # the clock was set ahead, or nobody listened
        (399, 300),  # the clock was set back
        (400 - DAY, 300),
    ],
)
def test_what_a_session_has_used_stays_used_when_the_clock_is_set(now, used):
    known = session(100, 400, ended=False).at(now)

    assert (known.heard, known.seconds()) == (now, used)


@pytest.mark.parametrize(
    ("cap", "left"), [(0, math.inf), (1000, 1000 - 300 - 50), (350, 0), (60, -290)], ids=str
)
def test_a_call_has_what_its_sessions_have_left(cap, left):
    sessions = [session(100, 400), session(500, 550, ended=False), session(600, 900, call="another")]

    assert call_left(sessions, "c", cap) == left


@pytest.mark.parametrize(
    ("now", "cap", "left"),
    [
        (500, 0, math.inf),
        (500, 300, 100),  # of the 200 that fell on this day
        (500, 200, 0),
        (500, 100, -100),
        (500, 1000, 500 + 1000),  # it lasts beyond midnight, where the next day's begins
        (950, 250, 50 + 250),
        (950, 249, 49),
    ],
    ids=str,
)
def test_a_call_over_midnight_counts_on_both_days(now, cap, left):
    sessions = [session(-100, 150), session(200, 250), session(-500, -200)]

    assert day_left(sessions, (0, 1000), now, cap) == left


@pytest.mark.parametrize(
    ("left", "seconds", "reason"),
    [
        (math.inf, UNHEARD_SECONDS, "session.unheard"),
        (UNHEARD_SECONDS + 1, UNHEARD_SECONDS, "session.unheard"),
        (UNHEARD_SECONDS, UNHEARD_SECONDS, "session.capped"),
        (7, 7, "session.capped"),
        (0, 0, "session.capped"),
    ],
)
def test_a_session_is_hung_up_at_its_cap_or_when_nobody_listens(left, seconds, reason):
    assert next_hang_up(1000, left) == (1000 + seconds, reason)


@pytest.fixture
def berlin(monkeypatch):
    """The rules of Berlin, spelled out, so that no zone file is needed."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("now", "begin", "hours"),
    [
        ("2026-06-16T12:00+02:00", "2026-06-16T00:00+02:00", 24),
        ("2026-06-16T00:00+02:00", "2026-06-16T00:00+02:00", 24),
        ("2026-06-15T23:59+02:00", "2026-06-15T00:00+02:00", 24),
        ("2026-03-29T01:30+01:00", "2026-03-29T00:00+01:00", 23),
        ("2026-03-29T03:30+02:00", "2026-03-29T00:00+01:00", 23),
        ("2026-10-25T02:30+02:00", "2026-10-25T00:00+02:00", 25),
        ("2026-10-25T23:30+01:00", "2026-10-25T00:00+02:00", 25),
        ("2026-12-31T23:59+01:00", "2026-12-31T00:00+01:00", 24),
    ],
)
def test_a_day_is_the_servers_own(berlin, now, begin, hours):
    at, since = (datetime.datetime.fromisoformat(text).timestamp() for text in (now, begin))

    assert day_around(at) == (since, since + hours * HOUR)


# ---- the meter ---------------------------------------------------------------


@pytest.fixture
def call(bench):
    """A function: a Bench at noon where sessions live_1, live_2, ... can be opened."""

    def call(config=CAPS, **settings):
        clock = settings.pop("clock", None) or Clock()
        b = bench(config=config, clock=clock, wall=clock, **settings)
        for number in range(1, 9):
            body = {"session": {"id": f"live_{number}"}, "transport": {"type": "webrtc", "sdp": "v=0"}}
            b.openai.add(*SESSIONS, reply(201, body))
        return b

    return call


def hung_up(b):
    return [seen.path.split("/")[-2] for seen in b.openai.seen if seen.path.endswith("/hangup")]


def hang_ups(b, *answers):
    b.openai.add(*HANGUPS, *answers)


def wait_hung_up(b, session_id):
    """Wake who waits for this moment, and wait until the session is settled."""
    with b.app.changed:
        b.app.changed.notify_all()
        assert b.app.changed.wait_for(lambda: b.session(session_id).ended, TIMEOUT)


def talk(b, session_id, seconds, every=60):
    """Let time pass while a page says that it is there; return what it is told last."""
    left = None
    while seconds > 0:
        b.app.clock.now += min(every, seconds)
        seconds -= every
        left = b.meter(session_id)
    return left


@pytest.mark.parametrize(
    ("caps", "at_first", "later"),
    [
        ((30, 60), 1800, 1800 - 600),
        ((60, 30), 1800, 1800 - 600),
        ((0, 30), 1800, 1800 - 600),
        ((30, 0), 1800, 1800 - 600),
        ((0, 0), None, None),
    ],
    ids=str,
)
def test_a_page_is_told_how_long_the_call_may_go_on(call, caps, at_first, later):
    b = call(Config(call_minutes=caps[0], day_minutes=caps[1]))

    assert b.start_call().body["seconds_left"] == at_first
    assert talk(b, "live_1", 600) == later


def test_what_was_used_is_written_down(call):
    b = call()
    hang_ups(b, reply(200))
    b.start_call(conversation="talk-1", call="call-1")
    talk(b, "live_1", 90)
    assert b.session("live_1") == Session("live_1", "call-1", "talk-1", NOON, NOON + 90)

    b.meter("live_1", seconds=88.5)
    b.app.clock.now += 10
    b.close_call("live_1", seconds=99)

    assert b.session("live_1") == Session("live_1", "call-1", "talk-1", NOON, NOON + 100, True, 99)


@pytest.mark.parametrize("answer", [reply(404), reply(500), CLOSED], ids=["over", "refused", "no answer"])
def test_a_close_settles_the_meter_whatever_openai_says(call, answer):
    b = call()
    hang_ups(b, answer)
    b.start_call()
    b.app.clock.now += 100

    b.close_call("live_1")

    assert (b.session("live_1").ended, b.session("live_1").seconds()) == (True, 100)


def test_a_session_that_cannot_be_ended_is_tried_again(call, caplog):
    b = call(hang_up=(SOON,) * 2)
    hang_ups(b, reply(500), CLOSED, reply(200))
    b.start_call()

    b.close_call("live_1")

    b.openai.wait_for(*HANGUPS, 3)
    assert hung_up(b) == ["live_1"] * 3
    assert caplog.text.count("session.unclosed session=live_1") == 2


def test_a_session_that_was_ended_from_here_takes_the_vendors_figure_and_no_more_time(call):
    b = call()
    hang_ups(b, reply(200), reply(404))
    b.start_call()
    b.app.clock.now += 100
    hermes_voice.hang_up(b.app, "live_1")

    b.app.clock.now += 50
    b.close_call("live_1", seconds=101)

    settled = b.session("live_1")
    assert (settled.ended, settled.seconds(), settled.billed) == (True, 100, 101)


def test_a_start_whose_page_is_gone_costs_the_least_that_is_billed(call):
    b = call()
    hang_ups(b, reply(200))

    b.start_call().lost()

    assert (b.session("live_1").ended, b.session("live_1").seconds()) == (True, BILLED_LEAST)


@pytest.mark.parametrize("session_id", ["live_1", "live_0"])
def test_a_page_whose_session_is_not_the_live_one_learns_it(call, session_id):
    b = call()
    hang_ups(b, reply(200))
    b.start_call()
    b.start_call()

    with pytest.raises(Conflict) as caught:
        b.meter(session_id)

    assert caught.value.code == "not_live"
    assert b.meter("live_2") == 1800


@pytest.mark.parametrize("seconds", [-1, 86401, "60", True, [], float("nan")], ids=str)
@pytest.mark.parametrize("act", ["meter", "close_call"])
def test_seconds_that_make_no_sense_are_refused(call, act, seconds):
    b = call()
    b.start_call()

    with pytest.raises(BadRequest, match="'seconds' must be a number from 0 to 86400"):
        getattr(b, act)("live_1", seconds=seconds)

    assert b.session("live_1").billed is None


# ---- the caps ----------------------------------------------------------------


def test_the_minutes_of_a_day_are_shared_by_all_pages(call):
    b = call(Config(call_minutes=0, day_minutes=60))
    hang_ups(b, reply(200))
    b.start_call(conversation="talk-1")
    talk(b, "live_1", 1000)
    b.close_call("live_1")

    assert b.start_call(conversation="talk-2").body["seconds_left"] == 3600 - 1000
    assert talk(b, "live_2", 2600 - SHORTEST_CALL) == SHORTEST_CALL
    b.close_call("live_2")
    assert b.start_call().body["seconds_left"] == SHORTEST_CALL


def test_a_call_that_goes_on_counts_up_to_this_moment(call):
    b = call(Config(call_minutes=0, day_minutes=60))
    hang_ups(b, reply(200))
    b.start_call()
    talk(b, "live_1", 3000)

    b.app.clock.now += 50

    assert b.start_call().body["seconds_left"] == 550


def test_a_day_that_is_used_up_says_so_and_ends_at_midnight(call):
    b = call()
    hang_ups(b, reply(200))
    for number in (1, 2):
        b.start_call()
        talk(b, f"live_{number}", 1780)
        b.close_call(f"live_{number}")

    with pytest.raises(TooMany) as caught:
        b.start_call()

    assert caught.value.code == "day_cap"
    for words in ("have taken 59 of the 60 minutes", "again on Wednesday at 00:00", "'day_minutes'"):
        assert words in caught.value.message
    assert [seen.path for seen in b.openai.seen].count(SESSIONS[1]) == 2
    b.app.clock.now = NOON + 12 * HOUR
    assert b.start_call().body["seconds_left"] == 1800


def test_a_call_that_is_renewed_is_one_call(call):
    b = call()
    hang_ups(b, reply(200))
    b.start_call(call="call-1")
    talk(b, "live_1", 1000)

    assert b.start_call(call="call-1").body["seconds_left"] == 800
    wait_hung_up(b, "live_1")
    talk(b, "live_2", 750)

    with pytest.raises(TooMany, match="30 minutes") as caught:
        b.start_call(call="call-1")
    assert caught.value.code == "call_cap"
    assert b.start_call(call="call-2").body["seconds_left"] == 1800


def test_without_caps_calls_go_on(call):
    b = call(Config(call_minutes=0, day_minutes=0))
    b.start_call()

    assert talk(b, "live_1", 20 * HOUR) is None
    assert b.start_call().body["seconds_left"] is None


# ---- who hangs up ------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "used"), [(reply(200), 60 + UNHEARD_SECONDS), (reply(404), 60)], ids=["open", "over"]
)
def test_a_page_that_is_not_heard_of_is_hung_up(call, caplog, answer, used):
    """A session that was over by then is counted up to when it was last heard of."""
    b = call()
    hang_ups(b, answer)
    b.start_call()
    talk(b, "live_1", 60)

    b.app.clock.now += UNHEARD_SECONDS
    wait_hung_up(b, "live_1")

    assert hung_up(b) == ["live_1"]
    assert "session.unheard session=live_1" in caplog.text
    assert (b.session("live_1").ended, b.session("live_1").seconds()) == (True, used)
    with pytest.raises(Conflict):
        b.meter("live_1")


@pytest.mark.parametrize("caps", [Config(call_minutes=10), Config(day_minutes=10)], ids=["call", "day"])
def test_a_call_whose_time_is_over_is_hung_up(call, caplog, caps):
    b = call(caps)
    hang_ups(b, reply(200))
    b.start_call()
    assert talk(b, "live_1", 590) == 10

    b.app.clock.now += 10
    wait_hung_up(b, "live_1")

    assert hung_up(b) == ["live_1"]
    assert "session.capped session=live_1" in caplog.text
    assert b.session("live_1").seconds() == 600


def test_a_cap_holds_when_the_clock_is_set_back(bench):
    clock, wall = Clock(), Clock()
    b = bench(config=CAPS, clock=clock, wall=wall)
    body = {"session": {"id": "live_1"}, "transport": {"type": "webrtc", "sdp": "v=0"}}
    b.openai.add(*SESSIONS, reply(201, body))
    b.start_call()
    clock.now += 60
    wall.now += 60
    assert b.meter("live_1") == 1740

    clock.now += 60
    wall.now -= 5 * HOUR
    assert b.meter("live_1") == 1740
    clock.now += 60
    wall.now += 60

    assert b.meter("live_1") == 1680


def watchers():
    return [thread for thread in threading.enumerate() if thread.name.endswith("(watch)")]


def test_each_live_session_is_watched_for_as_long_as_it_lives(call):
    """The thread that the server starts does it: time passes, and whoever waits is woken."""
    before = watchers()
    b = call()
    hang_ups(b, reply(200))
    b.start_call()
    b.start_call()
    b.openai.wait_for("POST", "/v1/live/sessions/live_1/hangup")

    with b.app.changed:
        b.app.clock.now += UNHEARD_SECONDS
        b.app.changed.notify_all()

    b.openai.wait_for("POST", "/v1/live/sessions/live_2/hangup")
    for thread in set(watchers()) - set(before):
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert hung_up(b) == ["live_1", "live_2"]


def test_a_server_that_ends_hangs_nobody_up(call):
    b = call()
    b.start_call()

    b.app.close()
    b.app.clock.now += DAY
    watch(b.app, "live_1")

    assert hung_up(b) == []
    assert not b.session("live_1").ended


# ---- a restart ---------------------------------------------------------------


@pytest.fixture
def restarted(call, tmp_path):
    """A function: the Bench of the next process, after so many seconds in which none ran."""

    def restart(before, seconds):
        clock = Clock(before.app.clock.now + seconds)
        before.app.close()
        b = call(before.app.config, journal=Journal(tmp_path), clock=clock)
        hang_ups(b, reply(404))
        resume_session(b.app)
        return b

    return restart


def test_a_call_that_outlives_the_server_is_metered_and_capped(call, restarted, tmp_path):
    before = call(journal=Journal(tmp_path))
    before.start_call(call="call-1")
    talk(before, "live_1", 600)

    b = restarted(before, 30)

    assert b.meter("live_1") == 1800 - 630
    assert talk(b, "live_1", 1160) == 10
    b.app.clock.now += 10
    wait_hung_up(b, "live_1")
    assert hung_up(b) == ["live_1"]


def test_a_call_that_ended_with_the_server_is_counted_up_to_its_last_word(call, restarted, tmp_path):
    before = call(journal=Journal(tmp_path))
    before.start_call()
    talk(before, "live_1", 600)

    b = restarted(before, 10 * DAY)
    assert not b.session("live_1").ended
    b.app.clock.now += UNHEARD_SECONDS
    wait_hung_up(b, "live_1")

    assert hung_up(b) == ["live_1"]
    settled = b.session("live_1")
    assert (settled.ended, settled.opened, settled.heard) == (True, NOON, NOON + 600)


def test_a_session_that_was_about_to_be_hung_up_is_hung_up(call, restarted, tmp_path):
    before = call(journal=Journal(tmp_path))
    for number in (1, 2):
        before.app.journal.save_session(
            Session(f"live_{number}", "c", "", NOON + number, NOON + number),
        )

    b = restarted(before, 10)

    b.openai.wait_for("POST", "/v1/live/sessions/live_1/hangup")
    assert b.app.live_session == "live_2"
    assert b.meter("live_2") is not None


def test_the_minutes_of_a_day_outlive_the_server(call, restarted, tmp_path):
    before = call(Config(call_minutes=0, day_minutes=60), journal=Journal(tmp_path))
    hang_ups(before, reply(200))
    before.start_call()
    talk(before, "live_1", 3590)
    before.close_call("live_1")

    b = restarted(before, 60)

    with pytest.raises(TooMany, match="60 of the 60 minutes"):
        b.start_call()


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO, "hermes_voice")
