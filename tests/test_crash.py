"""Nothing is lost, whatever dies when: the sidecar, Hermes, the page's connections.

The sidecar is a real process that is killed at chosen points and at random ones; Hermes is
one that counts what it really did; the page is a few lines that hold on as the real one does.
What is asked, what dies and for how long is fixed by a seed; what is hit by it is not quite.
"""

import contextlib
import http.client
import json
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from crashing_hermes import CrashingHermes, Plan
from scripted_hermes import CUT
from sidecar import STOP_SECONDS, Sidecar

SEED = 3
REQUESTS = 100  # of each kind of Hermes
PAGES = 8
PATIENCE = 90  # seconds for one request, on a busy machine
WHOLE = 400  # seconds for all of them
OPENAI = SimpleNamespace(key="sk-crash-test-0123456789", url="http://127.0.0.1:9/v1")
GONE = (OSError, http.client.HTTPException, ValueError)

# Where the sidecar, and Hermes, are killed on a request's way. Points at Hermes first.
AT_HERMES = ["arrived", "taken", "following", "final"]
AT_PAGE = ["asking", "told", "claiming", "claimed"]
STRIKES = [("sidecar", point) for point in [*AT_HERMES, "taken", "following", "final", *AT_PAGE]]
STRIKES += [("hermes", point) for point in [*AT_HERMES, "following"]]


@dataclass
class Asked:
    """One request, what is to happen on its way, and what the page saw of it."""

    token: str
    conversation: str
    plan: Plan
    strikes: dict  # what dies, by point; each once
    cuts: list  # after how many lines the page's connections vanish
    seen: int = 0  # the newest update's number
    accepted: set = field(default_factory=set)
    finals: list = field(default_factory=list)
    claims: list = field(default_factory=list)
    others: list = field(default_factory=list)  # another page's claims, after ours


def requests(seed):
    """Everything that is asked, and what dies on its way."""
    chance = random.Random(seed)
    asked = []
    for number in range(REQUESTS):
        who, where = STRIKES[number % len(STRIKES)]
        strikes = {where: who} if chance.random() < 0.65 else {}
        if chance.random() < 0.1:
            strikes[chance.choice(AT_HERMES)] = chance.choice(["sidecar", "hermes"])
        plan = Plan(chance.randint(1, 8), "completed" if chance.random() < 0.9 else "failed")
        cuts = [chance.randint(0, 3) for _ in range(chance.choice([0, 0, 1, 2]))]
        # Of a page's requests, every third goes into a conversation of its own.
        conversation = f"c{number % PAGES}" if number // PAGES % 3 else f"c{number % PAGES}-{number}"
        asked.append(Asked(f"r{number}", conversation, plan, strikes, cuts))
    return asked


class World:
    """The sidecar, Hermes and pages, and who kills them."""

    def __init__(self, idempotent, seed):
        self.asked = requests(seed)
        self.by_token = {asked.token: asked for asked in self.asked}
        self.chance = random.Random(seed + 1)
        plans = {asked.token: asked.plan for asked in self.asked}
        self.hermes = CrashingHermes(idempotent, plans, self.at, seed)
        self.count = Counter()
        self.faults = []
        self.over = threading.Event()
        self.striking = threading.Lock()
        self.until = time.monotonic() + WHOLE

    def run(self):
        """Ask for everything while things die. Return the journal's rows once it is over."""
        config = {"on_new_request": "queue"}
        with self.hermes, Sidecar(OPENAI, self.hermes.url, self.hermes.key, config) as sidecar:
            self.sidecar = sidecar
            self.address = sidecar.url.removeprefix("http://").rstrip("/")
            sidecar.command[3] = self.address
            pages = [
                threading.Thread(target=self.page, args=(number,), daemon=True) for number in range(PAGES)
            ]
            chaos = threading.Thread(target=self.chaos, daemon=True)
            for thread in [*pages, chaos]:
                thread.start()
            for thread in pages:
                thread.join(max(0, self.until + PATIENCE - time.monotonic()))
            self.over.set()
            chaos.join(PATIENCE)
            self.faults += ["a page never ended" for thread in pages if thread.is_alive()]
            self.log = sidecar.log
            return self.journal()

    def journal(self):
        """Each run's row: id, whether it ended and was told, its delegations, its end."""
        path = f"{self.sidecar.folder.name}/state/journal.sqlite3"
        with contextlib.closing(sqlite3.connect(path)) as database:
            rows = database.execute("select id, ended, delivered, data from runs").fetchall()
        return [
            SimpleNamespace(id=id, ended=ended, delivered=delivered, **json.loads(data))
            for id, ended, delivered, data in rows
        ]

    # ---- who dies

    def at(self, point, token):
        """A request has come to a point. CUT if somebody was killed there."""
        who = self.by_token[token].strikes.pop(point, None)
        if who is None or self.over.is_set():
            return None
        self.count[f"{who} {point}"] += 1
        soon = point in ("final", "asking", "claiming")  # Something is under way that it may hit.
        self.strike(who, delay=self.chance.uniform(0, 0.004) if soon else 0)
        return CUT

    def strike(self, who, delay=0.0, politely=False):
        """Kill one of them, and start it again a moment later."""
        pause = self.chance.uniform(0, 0.25)
        time.sleep(delay)
        with self.striking:
            try:
                if who == "hermes":
                    self.count["hermes killed"] += 1
                    self.hermes.crash()
                    time.sleep(pause)
                    self.hermes.come_back()
                else:
                    self.count["sidecar stopped" if politely else "sidecar killed"] += 1
                    self.restart(politely)
            except BaseException as error:
                self.faults.append(f"{who} did not come back: {error!r}")
                self.over.set()

    def restart(self, politely):
        if politely:
            self.sidecar.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            if self.sidecar.process.wait(STOP_SECONDS + 5) != 0 or time.monotonic() > began + STOP_SECONDS:
                self.faults.append(f"a polite end took {time.monotonic() - began:.1f} s")
        self.sidecar.kill()
        self.sidecar.__enter__()

    def chaos(self):
        """Kill at random, though not again before another end was told: a slow machine gets on too."""
        before = 0
        while not self.over.wait(self.chance.uniform(0.5, 1.5)):
            ends = sum(len(asked.finals) for asked in self.asked)
            if ends > before:
                before = ends
                who = self.chance.choice(["sidecar", "sidecar", "hermes"])
                self.strike(who, politely=self.chance.random() < 0.2)

    # ---- the page

    def page(self, number):
        """Ask for this page's requests, at times two at once."""
        mine = self.asked[number::PAGES]
        while mine and not self.over.is_set() and time.monotonic() < self.until:
            pair = [mine.pop(0) for _ in range(2 if len(mine) % 4 == 1 and len(mine) > 1 else 1)]
            threads = [threading.Thread(target=self.whole, args=(asked,), daemon=True) for asked in pair]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * PATIENCE)

    def whole(self, asked):
        """One request until its end was told to the user."""
        until = time.monotonic() + PATIENCE
        try:
            while not asked.finals and time.monotonic() < until:
                self.follow(asked)
            while asked.finals and time.monotonic() < until and not self.claim(asked):
                time.sleep(0.02)
        except Exception as error:
            self.faults.append(f"{asked.token}: {error!r}")

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.address, timeout=20)
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def follow(self, asked):
        """One connection: ask, or follow what was accepted, until the end or until it breaks."""
        lines = [{"speaker": "user", "text": f"Please do [{asked.token}]"}]
        body = {"hermes_session": asked.conversation, "lines": lines, "delegation_id": f"d-{asked.token}"}
        run_id = next(iter(asked.accepted), "")
        lines_left = asked.cuts.pop() if asked.cuts else 1000
        if "asking" in asked.strikes and not asked.accepted:
            threading.Thread(target=self.at, args=("asking", asked.token), daemon=True).start()
        try:
            if run_id:
                connection, response = self.call("GET", f"/runs/{run_id}/updates?after={asked.seen}")
            else:
                connection, response = self.call("POST", "/delegate", body)
        except GONE:
            time.sleep(0.03)
            return
        with contextlib.closing(connection), response:
            if response.status != 200:
                raise AssertionError(f"{response.status} {response.read()!r}")
            with contextlib.suppress(*GONE):
                while lines_left > 0 and (line := response.readline()) and line.endswith(b"\n"):
                    lines_left -= 1
                    self.take(asked, json.loads(line))
            self.count["page gone"] += lines_left == 0

    def take(self, asked, update):
        """An update, as the page takes it: what has a number it knows is no news."""
        if update["type"] == "run":
            asked.accepted.add(update["run_id"])
        elif update["type"] == "done" and update["seq"] > asked.seen:
            asked.finals.append(update)
        if update["type"] != "error":
            asked.seen = max(asked.seen, update["seq"])

    def claim(self, asked):
        """Claim to tell the user of the end. True once it is known who does."""
        if not asked.claims:
            self.at("told", asked.token)
            if "claiming" in asked.strikes:
                threading.Thread(target=self.at, args=("claiming", asked.token), daemon=True).start()
        for more in ({}, {"told": True}):
            asked.claims.append(self.deliver(asked, "here", **more))
            if asked.claims[-1] != 200:
                break
        else:
            asked.others.append(self.deliver(asked, "elsewhere"))
            return self.at("claimed", asked.token) is None  # If it died after that, ask once more.
        return asked.claims[-1] != 0

    def deliver(self, asked, page, **more):
        """One page's claim, or that it has told. Return its status, 0 if it had no answer."""
        with contextlib.suppress(*GONE):
            path = f"/runs/{next(iter(asked.accepted))}/delivered"
            connection, response = self.call("POST", path, {"page": page, **more})
            with contextlib.closing(connection), response:
                response.read()
                return response.status
        return 0


def check(world, asked, rows):
    """What is promised for one request. Return what became of it."""
    works = world.hermes.works.get(asked.token, [])
    real = [work.status for work in works]
    told = f"{asked} {real}"
    assert len(asked.accepted) == 1, told
    assert len(asked.finals) == 1, told
    (row,) = [row for row in rows if f"d-{asked.token}" in row.delegations]
    final = asked.finals[0]
    outcome, words = final["finish_reason"], " ".join([*final["say"], final["show"]])
    assert row.id in asked.accepted, told
    assert {key: row.final[key] for key in ("finish_reason", "say", "show")} == {
        key: final[key] for key in ("finish_reason", "say", "show")
    }, told
    assert row.ended, told
    assert row.delivered, told

    # Told by one page: it may repeat what died on its way, and then no other page gets the claim.
    assert asked.claims[-1] == 200, told
    assert set(asked.claims) <= {0, 200}, told
    assert set(asked.others) <= {0, 409}, told

    assert len(works) <= 1, told
    if outcome == "stop":
        assert real == ["completed"], told
        assert f"[{asked.token}]" in words, told
        assert words.count("[r") == words.count(f"[{asked.token}]"), told
    else:
        assert final["error"]["message"], told
    if outcome == "interrupted":
        assert real == ["interrupted"], told
    if outcome == "failed":
        assert real in ([], ["failed"]), told
    if outcome == "unknown" and row.hermes_id:
        assert real in (["interrupted"], ["failed"]), told  # An answer stands in the transcript.
    if world.hermes.idempotent and outcome != "unknown" and works:
        # What Hermes knows in the end is what the user is told.
        assert {"completed": "stop"}.get(real[0], real[0]) == outcome, told
    return outcome


@pytest.mark.parametrize("idempotent", [True, False], ids=["0.22", "0.19"])
def test_nothing_is_lost_or_done_twice_whatever_dies(idempotent):
    began = time.monotonic()
    world = World(idempotent, SEED)

    rows = world.run()

    problems, outcomes = [], Counter()
    for asked in world.asked:
        try:
            outcomes[check(world, asked, rows)] += 1
        except (AssertionError, ValueError) as error:
            problems.append(str(error)[:1500])
    figures = {"requests": len(world.asked), "outcomes": dict(outcomes), "died": dict(world.count)}
    figures |= {"hermes": dict(world.hermes.count), "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(figures, indent=1))
    assert world.faults + world.hermes.faults == []
    assert not problems, f"{len(problems)} problems, the first: {problems[0]}"
    assert [row.id for row in rows if not row.ended] == []
    assert len(rows) == REQUESTS
    assert "Traceback" not in world.log
    assert "run.crashed" not in world.log
    assert outcomes["stop"] > REQUESTS / 5
    assert world.count["sidecar killed"] > REQUESTS / 5  # Else this proves little.
    assert world.count["hermes killed"] > REQUESTS / 20
