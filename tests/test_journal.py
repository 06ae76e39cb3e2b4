"""The journal: a real file, and what a new process makes of what an earlier one left in it."""

import contextlib
import json
import os
import sqlite3
import stat
import threading
import time

import pytest
from bench import RESTART, SOON, TIMEOUT
from scripted_hermes import CLOSED, REFUSED, Seen, event, reply, sse
from working_hermes import Run, WorkingHermes

import hermes_voice
from hermes_voice import (
    CONVERSATIONS_LISTED,
    JOURNAL_FILE,
    LINES_LISTED,
    RUNS_LISTED,
    SCHEMA_VERSION,
    ConfigError,
    Conflict,
    Journal,
    NotFound,
    Question,
    Request,
    RunBook,
    open_journal,
    resume_runs,
)

RUNS = ("POST", "/v1/runs")
STOPS = ("POST", "/v1/runs/*/stop")
BODY = {"input": "Buy milk.", "session_id": "c1", "instructions": "Briefly."}


def user(text):
    return {"speaker": "user", "text": text}


def line(key, text, speaker="user"):
    return {"key": key, "speaker": speaker, "text": text}


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


def reopened(tmp_path):
    """The journal as the next process finds it; the one before was killed."""
    return Journal(tmp_path)


class Maker:
    """Runs of one conversation, brought into a state."""

    def __init__(self, conversation="c1"):
        self.book, self.conversation, self.count = RunBook(), conversation, 0

    def queued(self, text="Buy milk.", policy="restart"):
        self.count += 1
        name = f"{self.conversation}-r{self.count}"
        return self.book.claim(
            self.conversation, f"d{self.count}", [user(text)], name, float(self.count), policy
        )

    def starting(self, **fields):
        run = self.queued()
        self.book.begin(run)
        for name, value in fields.items():
            setattr(run, name, value)
        return run

    def running(self, hermes_id="run_1", **fields):
        run = self.starting(**fields)
        self.book.accepted(run, hermes_id)
        return run

    def stopping(self, **fields):
        run = self.running(**fields)
        self.book.ask_stop(run)
        return run

    def ended(self, state="completed", output="Done."):
        run = self.running()
        run.publish(run.stream.settle({"status": state, "output": output}, 0, False))
        return run


# ---- the file ----------------------------------------------------------------


def test_nobody_else_can_read_the_journal(tmp_path):
    folder = tmp_path / "a" / "state"
    journal = Journal(folder)
    journal.save(Maker().queued())

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes.pop(JOURNAL_FILE) == 0o600
    assert set(modes.values()) <= {0o600}
    journal.close()


def test_the_schema_has_a_version(tmp_path, journal):
    assert journal._read("pragma user_version") == [(SCHEMA_VERSION,)]
    assert reopened(tmp_path)._read("pragma user_version") == [(SCHEMA_VERSION,)]


# The schema as version 1 had it.
VERSION_1 = """
create table runs (
    id text primary key, conversation text not null, created real not null,
    ended integer not null, delivered text not null, data text not null
);
create index runs_by_conversation on runs (conversation, created);
create index runs_open on runs (created) where not ended;
create table delegations (
    conversation text not null, id text not null, run text not null, primary key (conversation, id)
);
create table lines (
    conversation text not null, key text not null, speaker text not null, text text not null,
    at real not null, primary key (conversation, key)
);
create index lines_by_time on lines (conversation, at);
create table conversations (id text primary key, updated real not null);
create index conversations_by_time on conversations (updated);
create table approvals (
    run text not null, request text not null, command text not null, answer text not null,
    by text not null, at real not null
);
pragma user_version = 1;
"""


def schema(journal):
    return sorted(journal._read("select name, sql from sqlite_master where sql is not null"))


def test_a_journal_of_version_1_is_carried_over_whole(tmp_path):
    path = tmp_path / JOURNAL_FILE
    old = Journal(None)
    fill(old, "c1", Maker().ended())
    before = {table: old._read(f"select * from {table}") for table in rows(old)}
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(VERSION_1)
        for table, found in before.items():
            marks = ", ".join("?" * len(found[0]))
            database.executemany(f"insert into {table} values ({marks})", found)
        database.commit()

    journal = Journal(tmp_path)

    assert journal._read("pragma user_version") == [(2,)]
    assert {table: journal._read(f"select * from {table}") for table in before} == before
    assert all(before.values())
    assert schema(journal) == schema(old)
    journal.save_session(hermes_voice.Session("live_1", "call", "c1", 1.0, 2.0))
    journal.close()
    (session,) = reopened(tmp_path).sessions(0)
    assert (session.id, session.ended, session.billed) == ("live_1", False, None)


def test_a_journal_that_cannot_be_carried_over_stays_as_it_was(tmp_path):
    path = tmp_path / JOURNAL_FILE
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(VERSION_1 + "create index sessions_by_time on lines (at);")

    assert "already" in problem_of(tmp_path)

    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("pragma user_version").fetchone() == (1,)
        tables = database.execute("select name from sqlite_master where name = 'sessions'").fetchall()
    assert tables == []


def problem_of(folder):
    with pytest.raises(ConfigError) as caught:
        open_journal(str(folder), 90, {})
    (problem,) = caught.value.problems
    assert problem.startswith(f"--state {folder}: the journal cannot be used: ")
    assert problem.endswith("run without memory: --state none")
    return problem


def test_a_newer_journal_is_refused(tmp_path, journal):
    journal._write((f"pragma user_version = {SCHEMA_VERSION + 1}",))

    assert "written by a newer hermes-voice" in problem_of(tmp_path)


@pytest.mark.parametrize("spoil", ["replace", "overwrite"])
def test_a_damaged_journal_is_one_clear_message(tmp_path, spoil):
    journal = Journal(tmp_path)
    maker = Maker()
    for _ in range(200):
        journal.save(maker.ended())
    journal.close()
    path = tmp_path / JOURNAL_FILE
    data = bytearray(path.read_bytes())
    if spoil == "overwrite":
        data[4096:40_960] = os.urandom(36_864)
    path.write_bytes(data if spoil == "overwrite" else b"This is no database, but a letter." * 100)

    problem_of(tmp_path)


def test_a_file_that_cannot_be_opened_is_one_clear_message(tmp_path):
    (tmp_path / JOURNAL_FILE).mkdir()

    problem_of(tmp_path)


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_folder_that_is_a_file_is_one_clear_message(tmp_path, below):
    (tmp_path / "file").write_text("")

    problem_of(f"{tmp_path}/file{below}")


@pytest.mark.parametrize(
    ("given", "environ", "where"),
    [
        ("/own", {}, "own"),
        (None, {"STATE_DIRECTORY": "/systemd", "HOME": "/home"}, "systemd"),
        (None, {"XDG_STATE_HOME": "/xdg", "HOME": "/home"}, "xdg/hermes-voice"),
        (None, {"HOME": "/home"}, "home/.local/state/hermes-voice"),
    ],
)
def test_the_journal_lies_where_state_belongs(tmp_path, given, environ, where):
    environ = {key: f"{tmp_path}{path}" for key, path in environ.items()}

    open_journal(given and f"{tmp_path}{given}", 90, environ).close()

    assert (tmp_path / where / JOURNAL_FILE).is_file()


def test_without_memory_nothing_is_written(tmp_path):
    open_journal("none", 90, {"HOME": str(tmp_path)}).save(Maker().queued())

    assert list(tmp_path.iterdir()) == []


def test_opening_forgets_what_is_too_old(tmp_path, journal):
    journal.add_lines("old", [line("1", "Hi")], time.time() - 91 * 86400)
    journal.add_lines("new", [line("1", "Hi")], time.time() - 89 * 86400)

    again = open_journal(str(tmp_path), 90, {})

    assert [talk["id"] for talk in again.conversations()] == ["new"]


# ---- a disk that fails -------------------------------------------------------


def use_all_of(journal):
    run = Maker().ended()
    journal.save(run)
    journal.add_lines("c1", [line("1", "x" * 100_000)], 1.0)
    journal.note_approval(run, Question("q1", None, "rm", "", (), 0.0), "once", "voice", 1.0)
    journal.deliver(run.id, "page")
    for read in (journal.open_runs, journal.conversations):
        assert isinstance(read(), list)
    for read in (journal.lines_of, journal.runs_of):
        assert isinstance(read("c1"), list)
    journal.run(run.id)
    journal.run_for("c1", "d1")
    journal.forget_before(0)
    journal.forget("c1")


def test_a_disk_that_is_gone_is_logged_and_raises_nothing(tmp_path, caplog):
    journal = Journal(tmp_path)
    journal.close()

    use_all_of(journal)

    assert "journal.failed" in caplog.text


def test_a_disk_that_is_full_is_logged_and_raises_nothing(journal, caplog):
    pages = journal._read("pragma page_count")[0][0]
    journal._read(f"pragma max_page_count = {pages}")

    use_all_of(journal)

    assert "full" in caplog.text


def test_what_a_full_disk_does_not_take_is_left_out_whole(journal):
    run = Maker().queued()
    pages = journal._read("pragma page_count")[0][0]
    journal._read(f"pragma max_page_count = {pages}")
    run.delegations = [f"delegation-{number}" for number in range(2000)]

    journal.save(run)

    assert (journal.run(run.id), journal.run_for("c1", "delegation-0")) == (None, None)


def test_a_failing_disk_takes_no_run_down(bench, tmp_path, caplog):
    journal = Journal(tmp_path)
    b = bench(journal=journal)
    page = b.delegate("Buy milk.", "d1")
    run = b.hermes.run()
    page.wait("run", state="running")

    journal.close()
    run.end("completed", output="Bought milk.")
    second = b.delegate("And bread.", "d2")
    b.hermes.run(2).end("completed", output="Bought bread.")

    assert page.done()["say"] == ["Bought milk."]
    assert second.done()["say"] == ["Bought bread."]
    assert [run["state"] for run in b.runs()] == ["ended", "ended"]
    assert b.delegate("And bread.", "d2").run_id == second.run_id
    assert b.deliver(page.run_id, "p1") == ""
    assert b.deliver(page.run_id, "p1", told=True) == ""
    assert b.deliver(page.run_id, "p2") == "delivered"
    assert "journal.failed" in caplog.text


# ---- runs --------------------------------------------------------------------


def show_all(run):
    """Let a run do all that a page shows of it, at 5000."""
    for each in (
        event("tool.started", tool="terminal", preview="ls secret-folder"),
        event("message.interim", text="Looking at the secret folder."),
        event("approval.request", request_id="a", command="rm -r secret-folder", description="it deletes"),
        event("approval.responded"),
        event("approval.request", request_id="b", command="rm -r secret-cache"),
    ):
        run.publish(run.stream.feed(sse(each), 10))
    run.date(5000, 10)


def test_the_question_that_is_open_is_found_with_its_time_by_the_next_process(tmp_path, journal):
    run = Maker().running()
    show_all(run)
    journal.save(run)

    found = reopened(tmp_path).run(run.id).open_question

    assert found == run.open_question
    assert (found["request_id"], found["bound"], found["until"]) == ("b", "b", 5060)


def test_a_run_of_an_earlier_version_is_read(tmp_path, journal):
    """Version 2 kept nothing of what a page shows."""
    new = {"steered", "tools", "questions", "progress", "ended_at"}
    run = Maker().ended()
    journal.save(run)
    data = json.loads(journal._read("select data from runs")[0][0])
    assert new <= data.keys()
    without = json.dumps({name: value for name, value in data.items() if name not in new})
    journal._write(("update runs set data = ?", without))

    found = reopened(tmp_path).run(run.id)

    assert (found.asked, found.final) == (run.asked, run.final)
    assert (found.tools, found.questions, found.progress, found.ended_at) == ([], [], "", 0)


@pytest.mark.parametrize("state", ["queued", "starting", "running", "stopping", "ended"])
def test_a_run_survives_in_every_state(tmp_path, journal, state):
    maker = Maker()
    run = getattr(maker, state)()
    if state == "running":
        maker.book.steer(run, "s1", [user("And bread.")])
        maker.book.steer(run, "s2", [user("And eggs.")])
    run.earlier, run.steps_before = ["Before."], ["running a command"]
    if state == "running":
        show_all(run)
    journal.save(run)

    found = reopened(tmp_path).run(run.id)

    for name in (
        "id conversation created lines delegations state hermes_id request seq final earlier"
        " steps_before body idempotent stored_before delivered superseded_by steered tools questions progress"
        " ended_at"
    ).split():
        assert getattr(found, name) == getattr(run, name), name
    assert found.stream.stop_asked == run.stream.stop_asked
    handed = [(steer.delegation, steer.lines) for steer in found.steers]
    assert handed == [(steer.delegation, steer.lines) for steer in run.steers]
    assert len(handed) == 2 * (state == "running")
    assert [open_run.id for open_run in reopened(tmp_path).open_runs()] == [run.id] * (state != "ended")
    assert list(found.updates) == ([run.final] if state == "ended" else [])
    for delegation in run.delegations:
        assert reopened(tmp_path).run_for("c1", delegation).id == run.id


def test_runs_that_wait_know_what_they_wait_for(tmp_path, journal):
    maker = Maker()
    runs = [maker.running(), maker.queued(policy="queue"), maker.queued(policy="queue")]
    journal.save(*reversed(runs))

    found = reopened(tmp_path).open_runs()

    assert [run.id for run in found] == [run.id for run in runs]
    assert [run.replaces for run in found] == [None, found[0], found[1]]


def test_a_run_knows_what_was_asked_of_the_ended_one_it_replaces(tmp_path, journal):
    maker = Maker()
    first, second = maker.running(), maker.queued("No, bread.")
    journal.save(first, second)
    first.publish(first.stream.settle({"status": "cancelled"}, 0, False))
    journal.save(first)

    (found,) = reopened(tmp_path).open_runs()
    book = RunBook()
    book.adopt(found)

    assert "Asked before:\nBuy milk." in book.begin(found)


def test_a_delegation_is_found_in_its_own_conversation(journal):
    ours, theirs = Maker("c1").queued(), Maker("c2").queued()
    journal.save(ours, theirs)

    assert journal.run_for("c1", "d1").id == ours.id
    assert journal.run_for("c2", "d1").id == theirs.id
    assert (journal.run_for("c3", "d1"), journal.run_for("c1", "d2")) == (None, None)


def test_a_delegation_that_was_taken_back_is_free(journal):
    maker = Maker()
    run = maker.running()
    steer = maker.book.steer(run, "d2", [user("And bread.")])
    journal.save(run)
    maker.book.unsteer(run, steer)
    journal.save(run)

    assert journal.run_for("c1", "d2") is None
    assert journal.run_for("c1", "d1").id == run.id


@pytest.mark.parametrize("order", [1, -1])
def test_a_delegation_that_went_on_is_found_on_the_later_run(journal, order):
    maker = Maker()
    run = maker.running()
    maker.book.steer(run, "s1", [user("And bread.")]).taken = True
    journal.save(run)
    run.publish(run.stream.give_up("failed", "Oops."))
    after = maker.book.go_on(run, "after", 9.0)
    journal.save(*[run, after][::order])

    assert journal.run_for("c1", "s1").id == "after"
    assert journal.run(run.id).final["continued_by"] == "after"


def test_the_newest_runs_are_listed_oldest_first(journal):
    maker = Maker()
    runs = [maker.ended() for _ in range(RUNS_LISTED + 5)]
    journal.save(*runs)

    assert [run.id for run in journal.runs_of("c1")] == [run.id for run in runs[5:]]


def test_an_end_that_was_told_stays_told_by_the_first_page(tmp_path, journal):
    run = Maker().ended()
    journal.save(run)

    for page in ("p1", "p1", "p2"):
        journal.deliver(run.id, page)

    assert reopened(tmp_path).run(run.id).delivered == "p1"


def test_what_has_not_ended_cannot_be_told(journal):
    run = Maker().running()
    journal.save(run)

    journal.deliver(run.id, "p1")
    journal.deliver("unknown", "p1")

    assert journal.run(run.id).delivered == ""


def test_after_a_restart_what_was_told_stays_told_and_what_was_only_claimed_is_free(bench, tmp_path):
    journal = Journal(tmp_path)
    maker = Maker()
    told, claimed = maker.ended(), maker.ended()
    journal.save(told, claimed)
    b = bench(journal=journal)
    b.deliver(told.id, "p1", told=True)
    b.deliver(claimed.id, "p1")

    again = bench(journal=reopened(tmp_path))

    assert [run["delivered"] for run in again.runs()] == [True, False]
    assert again.deliver(told.id, "p2") == "delivered"
    assert again.deliver(claimed.id, "p2") == ""
    assert again.deliver(claimed.id, "p1") == "claimed"


def test_of_two_claims_at_once_one_counts(bench, tmp_path):
    """Fifty times, of runs in the book and of runs that only the journal knows."""
    journal = Journal(tmp_path)
    maker = Maker()
    runs = [maker.ended() for _ in range(50)]
    journal.save(*runs)
    b = bench(journal=journal)
    for run in runs[::2]:
        b.app.book.adopt(run)

    for run in runs:
        barrier, won = threading.Barrier(2), []

        def claim(page, run=run, barrier=barrier, won=won):
            barrier.wait(TIMEOUT)
            won.append(b.deliver(run.id, page))

        threads = [threading.Thread(target=claim, args=(page,)) for page in ("p1", "p2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)

        assert sorted(won) == ["", "claimed"]


# ---- lines and conversations -------------------------------------------------


def test_a_line_that_comes_again_is_replaced_in_its_place(tmp_path, journal):
    journal.add_lines("c1", [line("1", "Buy"), line("2", "Sure.", "assistant")], 1.0)
    journal.add_lines("c1", [line("3", "Thanks.")], 2.0)
    journal.add_lines("c1", [line("1", "Buy milk.")], 3.0)

    lines = reopened(tmp_path).lines_of("c1")

    said = [(entry["key"], entry["speaker"], entry["text"]) for entry in lines]
    assert said == [
        ("1", "user", "Buy milk."),
        ("2", "assistant", "Sure."),
        ("3", "user", "Thanks."),
    ]
    assert [entry["at"] for entry in lines] == [1.0, 1.0, 2.0]
    assert journal.lines_of("c2") == []


def test_a_line_keeps_the_time_it_was_first_said(tmp_path, journal):
    journal.add_lines("c1", [{**line("1", "Buy"), "at": 5.0}], 7.0)
    journal.add_lines("c1", [{**line("1", "Buy milk."), "at": 6.0}, {**line("2", "Sure."), "at": 6.5}], 9.0)
    journal.add_lines("c1", [{**line("2", "Sure!"), "at": 6.25}], 11.0)

    lines = reopened(tmp_path).lines_of("c1")

    assert [(entry["text"], entry["at"]) for entry in lines] == [("Buy milk.", 5.0), ("Sure!", 6.25)]
    assert journal.newest() == 11.0


def post_lines(b, *lines):
    hermes_voice.post_lines(b.app, Request(("c1",), body={"lines": list(lines)}))
    return [entry["text"] for entry in hermes_voice.get_conversation(b.app, Request(("c1",))).body["lines"]]


class Wall:
    """A clock on the wall."""

    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now


def said(key, text, age, speaker="user", **more):
    return {**line(key, text, speaker), "age_seconds": age, **more}


def test_lines_have_the_time_they_were_said_and_not_the_time_they_came(bench):
    b = bench(wall=Wall())

    post_lines(b, said("2", "Second.", 1.5))
    texts = post_lines(b, said("1", "First.", 4), said("3", "Third.", 0.5, "assistant"), line("4", "Now."))

    assert texts == ["First.", "Second.", "Third.", "Now."]
    body = hermes_voice.get_conversation(b.app, Request(("c1",))).body
    assert [round(body["now"] - entry["at"], 1) for entry in body["lines"]] == [4, 1.5, 0.5, 0]


def test_words_stand_before_the_task_they_became_however_late_they_come(bench):
    wall = Wall()
    b = bench(wall=wall)
    page = b.delegate("Buy milk.", "d1")
    wall.now += 5

    post_lines(
        b,
        said("1", "Hello.", 4),
        said("2", "Buy milk.", 1, delegation="d1"),
        said("3", "Sure.", 0.5, "assistant"),
        said("4", "Buy eggs.", 0.2, delegation="unknown"),
    )

    (run,) = b.runs()
    assert run["run_id"] == page.run_id
    lines = b.app.journal.lines_of("c1")
    # The page's own order counts for what came before them.
    assert [entry["text"] for entry in lines] == ["Hello.", "Buy milk.", "Sure.", "Buy eggs."]
    assert [entry["at"] <= run["created"] for entry in lines] == [True, True, False, False]


def test_a_clock_that_is_set_back_brings_nothing_out_of_order(bench, tmp_path):
    wall = Wall()
    b = bench(wall=wall, journal=Journal(tmp_path))
    post_lines(b, said("1", "First.", 0))
    wall.now -= 3600
    page = b.delegate("Buy milk.", "d1")
    b.hermes.run().end("completed", output="Done.")
    page.done()
    post_lines(b, said("2", "Second.", 0))
    b.app.journal.close()

    again = bench(wall=wall, journal=Journal(tmp_path))
    wall.now -= 60
    assert post_lines(again, said("3", "Third.", 0)) == ["First.", "Second.", "Third."]
    (run,) = again.runs()
    first, second, third = [entry["at"] for entry in again.app.journal.lines_of("c1")]
    assert first <= run["created"] <= run["ended_at"] <= second <= third
    assert again.app.now() >= third


def test_the_newest_lines_are_given_oldest_first(journal):
    for number in range(LINES_LISTED + 10):
        journal.add_lines("c1", [line(f"k{number}", f"{number}")], 1.0)

    texts = [entry["text"] for entry in journal.lines_of("c1")]
    assert texts == [str(number) for number in range(10, LINES_LISTED + 10)]


def test_the_list_of_conversations_does_not_hold_a_dictation(journal):
    journal.add_lines("c1", [line("1", "word " * 12_000)], 1.0)

    (talk,) = journal.conversations()
    assert talk["title"] == ("word " * 12_000)[: hermes_voice.TITLE_CHARS]


def test_conversations_are_listed_newest_first_with_their_first_words(journal):
    journal.add_lines("c1", [line("0", "Hello!", "assistant"), line("1", "One."), line("2", "More.")], 1.0)
    journal.add_lines("c2", [line("0", "Hello!", "assistant")], 2.0)
    journal.add_lines("c3", [line("1", "Three.")], 3.0)
    journal.add_lines("c1", [line("3", "Again.")], 4.0)

    found = [(talk["id"], talk["title"], talk["updated"]) for talk in journal.conversations()]
    assert found == [("c1", "One.", 4.0), ("c3", "Three.", 3.0), ("c2", "", 2.0)]


def test_so_many_conversations_are_listed(journal):
    for number in range(CONVERSATIONS_LISTED + 5):
        journal.add_lines(f"c{number}", [], float(number))

    assert len(journal.conversations()) == CONVERSATIONS_LISTED


def rows(journal):
    tables = ("runs", "delegations", "lines", "conversations", "approvals")
    return {table: journal._read(f"select count(*) from {table}")[0][0] for table in tables}


def fill(journal, conversation, run):
    journal.save(run)
    journal.add_lines(conversation, [line("1", "Hi")], run.created)
    journal.note_approval(run, Question("q1", None, "rm", "", (), 0.0), "once", "voice", 1.0)


def test_a_forgotten_conversation_leaves_nothing(journal):
    run = Maker("c1").running()
    show_all(run)
    fill(journal, "c1", run)
    fill(journal, "c2", Maker("c2").ended())
    assert "secret" in "".join(journal._database.iterdump())

    journal.forget("c1")

    assert set(rows(journal).values()) == {1}
    assert "secret" not in "".join(journal._database.iterdump())
    assert [talk["id"] for talk in journal.conversations()] == ["c2"]
    journal.forget("c2")
    assert set(rows(journal).values()) == {0}


def test_the_time_of_a_forgotten_conversation_stays_on_the_meter(journal):
    used = hermes_voice.Session("live_1", "call", "c1", 1.0, 61.0, True, 60)
    journal.save_session(used)

    journal.forget("c1")

    assert journal.sessions(0) == [hermes_voice.replace(used, conversation="")]


def test_sessions_are_found_by_time_by_call_and_while_they_are_open(journal):
    for number, (call, ended) in enumerate([("a", True), ("b", False), ("a", True), ("c", True)]):
        journal.save_session(hermes_voice.Session(f"s{number}", call, "", number, number + 0.5, ended))

    assert [session.id for session in journal.sessions(2.5)] == ["s1", "s3"]
    assert [session.id for session in journal.sessions(9)] == ["s1"]
    assert [session.id for session in journal.sessions(9, "a")] == ["s0", "s1", "s2"]
    assert [session.id for session in journal.sessions(9, "s3")] == ["s1", "s3"]


def test_old_conversations_are_forgotten_but_not_what_still_runs(journal):
    fill(journal, "old", Maker("old").ended())
    fill(journal, "works", Maker("works").running())
    fill(journal, "new", Maker("new").ended())
    journal.add_lines("new", [], 100.0)

    journal.forget_before(50.0)

    assert {talk["id"] for talk in journal.conversations()} == {"works", "new"}


def test_a_conversation_is_forgotten_here_and_at_hermes(bench):
    b = bench()
    b.hermes.transcripts["c1"] = []
    page = b.delegate("Buy milk.", "d1")
    with pytest.raises(Conflict, match="Stop the task first"):
        hermes_voice.delete_conversation(b.app, Request(("c1",)))
    b.hermes.run().end("completed", output="Done.")
    page.done()

    reply = hermes_voice.delete_conversation(b.app, Request(("c1",)))

    assert reply.body == {"forgotten": True, "hermes": True}
    assert (b.hermes.transcripts, b.runs()) == ({}, [])
    with pytest.raises(NotFound):
        b.follow(page.run_id)


def test_a_conversation_that_hermes_cannot_forget_is_forgotten_here(bench):
    b = bench()
    b.hermes.once("DELETE", "/api/sessions/c1", reply(500))
    b.app.journal.add_lines("c1", [line("1", "Hi")], 1.0)

    reply_ = hermes_voice.delete_conversation(b.app, Request(("c1",)))

    assert reply_.body == {"forgotten": True, "hermes": False}
    assert hermes_voice.get_conversation(b.app, Request(("c1",))).body["lines"] == []


# ---- taking up what an earlier process left ----------------------------------


@pytest.fixture
def resumed(bench, tmp_path):
    """A function: a Bench whose App has taken up the journal with these runs."""

    def resume(*runs, **settings):
        journal = Journal(tmp_path)
        journal.save(*runs)
        journal.close()
        b = bench(journal=Journal(tmp_path), **settings)
        b.conversations |= {run.conversation for run in runs}
        if settings.get("hermes") is None:
            b.hermes.transcripts["c1"] = []
        resume_runs(b.app)
        return b

    return resume


def asked(b):
    return [f"{seen.method} {seen.path}" for seen in b.hermes.seen]


@pytest.mark.parametrize("state", ["queued", "starting"])
def test_a_run_that_hermes_has_not_heard_of_is_started(resumed, state):
    run = getattr(Maker(), state)()

    b = resumed(run)
    b.hermes.run().end("completed", output="Bought milk.")

    assert b.follow(run.id).done()["say"] == ["Bought milk."]
    assert b.hermes.run().body["input"] == "Buy milk."
    assert b.hermes.run().key == "c1.d1"
    assert len(b.hermes.asked(*RUNS)) == 1


def test_a_start_that_can_be_repeated_is_repeated_as_it_was(resumed):
    run = Maker().starting(body=BODY, idempotent=True)

    b = resumed(run)
    b.hermes.run().end("completed", output="Bought milk.")

    assert b.follow(run.id).done()["say"] == ["Bought milk."]
    assert (b.hermes.run().body, b.hermes.run().key) == (BODY, "c1.d1")
    assert [request for request in asked(b) if "capabilities" in request] == []


def test_a_start_that_cannot_be_repeated_is_unknown(resumed):
    run = Maker().starting(body=BODY, idempotent=False)

    b = resumed(run)

    done = b.follow(run.id).done()
    assert (done["finish_reason"], done["error"]["code"]) == ("unknown", "hermes_uncertain")
    assert asked(b) == []


def test_a_start_that_may_have_arrived_is_stopped_at_hermes_and_not_called_unstarted(resumed):
    maker = Maker()
    run = maker.starting(body=BODY, idempotent=True)
    maker.book.ask_stop(run)

    b = resumed(run)

    assert b.follow(run.id).done()["show"] == "Hermes has stopped the task."
    assert (b.hermes.run().body, b.hermes.run().stops) == (BODY, 1)


def test_a_stop_before_anything_was_sent_needs_no_hermes(resumed):
    maker = Maker()
    run = maker.starting()
    maker.book.ask_stop(run)

    b = resumed(run)

    assert b.follow(run.id).done()["finish_reason"] == "cancelled"
    assert asked(b) == []


@pytest.mark.parametrize("answer", [REFUSED, reply(503)])
def test_a_start_that_may_have_arrived_is_unknown_while_hermes_is_away(resumed, answer):
    run = Maker().starting(body=BODY, idempotent=True)
    hermes = WorkingHermes()
    hermes.add(*RUNS, answer)

    with hermes:
        b = resumed(run, hermes=hermes)
        done = b.follow(run.id).done()

    assert (done["finish_reason"], done["error"]["code"]) == ("unknown", "hermes_uncertain")
    assert {str(request.body) for request in hermes.asked(*RUNS)} == {str(BODY)}


def at_hermes(idempotent=True):
    """A Hermes that works on run_1."""
    hermes = WorkingHermes(idempotent)
    hermes.transcripts["c1"] = []
    request = Seen("POST", "/v1/runs", {"Idempotency-Key": "c1.d1"}, BODY)
    hermes.runs.append(Run(hermes, "run_1", request))
    return hermes


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_running_run_is_followed_by_its_status(resumed, idempotent):
    run = Maker().running(idempotent=idempotent)
    with at_hermes(idempotent) as hermes:
        b = resumed(run, hermes=hermes)
        page = b.follow(run.id)
        hermes.wait_for("GET", "/v1/runs/run_1", count=2)
        hermes.run().settle("completed", output="Bought milk.")

        assert page.done()["say"] == ["Bought milk."]
        assert (hermes.asked(*RUNS), hermes.run().followers, hermes.run().stops) == ([], 0, 0)


def test_a_stopping_run_is_stopped(resumed):
    run = Maker().stopping()
    with at_hermes() as hermes:
        b = resumed(run, hermes=hermes)

        assert b.follow(run.id).done()["finish_reason"] == "cancelled"
        assert (hermes.asked(*RUNS), hermes.run().stops) == ([], 1)


def test_a_run_that_hermes_lost_meanwhile_is_answered_from_the_transcript_or_unknown(resumed):
    first = Maker().running(hermes_id="lost_1", stored_before=1)
    second = Maker("c2").running(hermes_id="lost_2")
    old = [{"role": "user", "content": "Buy milk."}]
    with WorkingHermes() as hermes:
        hermes.transcripts["c1"] = [*old, *old, {"role": "assistant", "content": "Bought milk."}]
        b = resumed(first, second, hermes=hermes)

        assert b.follow(first.id).done()["say"] == ["Bought milk."]
        done = b.follow(second.id).done()
        assert (done["finish_reason"], done["error"]["code"]) == ("unknown", "run_lost")
        assert hermes.asked(*RUNS) == []


def test_an_ended_run_is_left_alone_and_its_answer_is_there(resumed):
    run = Maker().ended(output="Bought milk.")

    b = resumed(run)
    page = b.delegate("Buy milk.", "d1")

    assert page.run_id == run.id
    assert page.done()["say"] == ["Bought milk."]
    assert asked(b) == []
    assert [listed["state"] for listed in b.runs()] == ["ended"]


def test_the_same_delegation_finds_a_run_that_was_taken_up(resumed):
    run = Maker().running()
    with at_hermes() as hermes:
        b = resumed(run, hermes=hermes)
        page = b.delegate("Buy milk.", "d1")
        hermes.run().settle("completed", output="Bought milk.")

        assert (page.run_id, page.done()["say"]) == (run.id, ["Bought milk."])
        assert (hermes.asked(*RUNS), hermes.run().words) == ([], [])


def test_what_waited_is_started_after_the_run_before_it(resumed):
    maker = Maker()
    first, second = maker.running(), maker.queued("And bread.", "queue")
    with at_hermes() as hermes:
        b = resumed(first, second, hermes=hermes)
        hermes.wait_for("GET", "/v1/runs/run_1", count=2)
        assert hermes.asked(*RUNS) == []
        hermes.runs[0].settle("completed", output="Bought milk.")
        hermes.run(2).end("completed", output="Bought bread.")

        assert b.follow(second.id).done()["say"] == ["Bought bread."]
        assert hermes.run(2).body["input"] == "And bread."


def test_a_correction_that_waited_stops_the_run_and_carries_it_over(resumed):
    maker = Maker()
    first, second = maker.running(), maker.queued("No, bread.")
    with at_hermes() as hermes:
        b = resumed(first, second, hermes=hermes, config=RESTART)
        hermes.run(2).end("completed", output="Bought bread.")

        assert b.follow(first.id).done()["superseded_by"] == second.id
        assert b.follow(second.id).done()["say"] == ["Bought bread."]
        words = hermes.run(2).body["input"]
        assert "Asked before:\nBuy milk." in words
        assert "is not known" in words


def test_words_handed_over_before_the_restart_come_back(resumed):
    maker = Maker()
    run = maker.running()
    maker.book.steer(run, "d2", [user("And bread.")])
    with at_hermes() as hermes:
        b = resumed(run, hermes=hermes)
        hermes.runs[0].settle("completed", output="Bought milk.", pending_steer="And bread.")
        hermes.run(2).end("completed", output="Bought bread.")

        page = b.delegate("And bread.", "d2")
        assert page.done()["say"] == ["Bought bread."]
        assert b.follow(run.id).done()["continued_by"] == page.run_id
        assert len(hermes.asked(*RUNS)) == 1


def test_a_question_that_was_open_is_asked_again(resumed):
    run = Maker().running(idempotent=True)
    question = {**event("approval.request", command="rm x", request_id="q7"), "choices": ["once", "deny"]}
    with at_hermes() as hermes:
        hermes.runs[0].settle("waiting_for_approval", approval=question)
        b = resumed(run, hermes=hermes)
        page = b.follow(run.id)
        page.wait("approval")
        b.approve(run_id=run.id, request_id="q7", choice="once")
        hermes.runs[0].settle("completed", output="Gone.")

        assert page.done()["say"] == ["Gone."]
        assert [answer["request_id"] for answer in hermes.runs[0].answers] == ["q7"]


def test_a_question_that_was_open_has_the_time_it_had(resumed):
    run = Maker().running(idempotent=True)
    asked_again = event("approval.request", command="rm x", request_id="q7")
    run.publish(run.stream.feed(sse(asked_again), 0))
    run.date(time.time() - 50, 0)
    with at_hermes() as hermes:
        hermes.runs[0].settle("waiting_for_approval", approval=asked_again)
        b = resumed(run, hermes=hermes)
        page = b.follow(run.id)
        assert 5 < page.wait("approval")["seconds_left"] <= 10
        (listed,) = b.runs()
        assert [(each["request_id"], each["reason"]) for each in listed["questions"]] == [("q7", "")]
        assert 0 < listed["questions"][0]["seconds_left"] <= 10
        hermes.runs[0].settle("completed", output="Gone.")
        page.done()


def test_a_question_that_nothing_can_answer_is_not_listed_as_open(resumed):
    """Hermes before 0.20 does not tell again what it asked."""
    run = Maker().running()
    run.publish(run.stream.feed(sse(event("approval.request", command="rm x")), 0))
    run.date(time.time() - 50, 0)
    with at_hermes() as hermes:
        hermes.runs[0].settle("waiting_for_approval")
        b = resumed(run, hermes=hermes)
        hermes.wait_for("GET", "/v1/runs/run_1", count=2)

        (question,) = b.runs()[0]["questions"]
        assert (question["command"], question["reason"], question["seconds_left"]) == ("rm x", "lost", 0)


def test_a_server_that_closes_writes_down_the_newest_steps(bench, tmp_path):
    b = bench(journal=Journal(tmp_path))
    page = b.delegate("Buy milk.", "d1")
    b.hermes.run().emit("tool.started", tool="terminal", preview="ls")
    page.wait("tool")

    b.app.close()

    (found,) = reopened(tmp_path).open_runs()
    assert [tool["preview"] for tool in found.tools] == ["ls"]


def test_a_start_is_left_open_by_a_server_that_closes(bench, tmp_path):
    """Hermes is away, and so it is for the next process to start the run."""
    b = bench(journal=Journal(tmp_path), start=(60,))
    b.hermes.once("GET", "/v1/capabilities", CLOSED)
    page = b.delegate("Buy milk.", "d1")
    b.hermes.wait_for("GET", "/v1/capabilities")

    b.app.close()

    assert page.done()["code"] == "closing"
    time.sleep(5 * SOON)
    (found,) = reopened(tmp_path).open_runs()
    assert (found.id, found.state, found.final) == (page.run_id, "starting", None)


# ---- size --------------------------------------------------------------------


def test_a_large_journal_is_quick(bench, tmp_path):
    """10,000 runs and 100,000 lines: as much as years of talk."""
    journal = Journal(tmp_path)
    for number in range(100):
        maker = Maker(f"c{number}")
        journal.save(*(maker.ended() for _ in range(100)))
        lines = [line(f"k{key}", f"What was said, number {key}, is a sentence.") for key in range(1000)]
        journal.add_lines(f"c{number}", lines, time.time())
    journal.close()
    seconds = {}

    def timed(name, act, times=20):
        started = time.perf_counter()
        for _ in range(times):
            result = act()
        seconds[name] = (time.perf_counter() - started) / times
        return result

    again = timed("open", lambda: open_journal(str(tmp_path), 90, {}), 1)
    b = bench(journal=again)
    timed("resume", lambda: resume_runs(b.app), 1)
    assert len(timed("GET /runs", lambda: b.runs("c7"))) == RUNS_LISTED
    timed("conversations", again.conversations)
    timed("lines", lambda: again.lines_of("c7"))
    timed("add lines", lambda: again.add_lines("c7", [line("new", "Hi")], time.time()))
    timed("known delegation", lambda: hermes_voice.route(b.app, "c7", "d9", [user("Hi")]))
    b.conversations |= {f"new{number}" for number in range(10)}
    numbers = iter(range(10))
    timed("POST /delegate", lambda: hermes_voice.route(b.app, f"new{next(numbers)}", "d1", [user("Hi")]), 10)
    megabytes = (tmp_path / JOURNAL_FILE).stat().st_size >> 20
    print(megabytes, "MB", {name: f"{value * 1000:.1f} ms" for name, value in seconds.items()})

    assert seconds.pop("open") < 10
    assert max(seconds.values()) < 1


def test_the_oldest_rows_over_the_limits_are_forgotten_but_no_open_run(journal):
    maker = Maker()
    first = Maker("open").running()
    journal.save(first)
    ended = [maker.ended() for _ in range(5)]
    journal.save(*ended)
    question = Question("q1", None, "rm", "", (), 0.0)
    for number, run in enumerate(ended):
        journal.note_approval(run, question, "once", "voice", float(-number))
    for number in range(5):
        journal.add_lines("c1", [{"key": f"k{number}", "speaker": "user", "text": str(number)}], number)
        journal.save_session(hermes_voice.Session(f"s{number}", "call", "", number, number, ended=number > 0))

    journal.forget_before(-1, {"runs": 2, "lines": 3, "approvals": 4, "sessions": 1})

    assert [line["text"] for line in journal.lines_of("c1")] == ["2", "3", "4"]
    assert [session.id for session in journal.sessions(-1)] == ["s0", "s4"]
    assert [run.id for run in journal.open_runs()] == [first.id]
    assert [journal.run(run.id) is not None for run in ended] == [False, False, False, True, True]
    # Of a run that is gone no command is left, since nothing could forget it any more.
    assert journal._read("select run from approvals") == [(ended[3].id,)]
