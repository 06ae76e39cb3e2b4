"""A long conversation, as a person has one: thirty requests with corrections, questions,
failures, a lost connection, a reload, standby and a renewal. Each is answered aloud once,
nothing is stale, nothing cuts the voice off but the user, and neither the page nor the sidecar
grows."""

import re
import time
from collections import Counter
from pathlib import Path

from live_service import LiveService
from playwright.sync_api import expect
from sidecar import Sidecar
from working_hermes import WorkingHermes

from hermes_voice import STARTS_PER_MINUTE

REQUESTS = 30
STANDBY = 5  # seconds
RENEWED_AFTER = 4  # seconds: a session that lives for so short is renewed after half its life
# Between the first ten requests and the last: what is kept of them, up to named limits.
PAGE_GROWTH = 1 << 20
SIDECAR_GROWTH = 4 << 20  # bytes


class Talk:
    """The conversation so far. `answers` are the numbers of the answers that are due."""

    def __init__(self, live, hermes, sidecar, page):
        self.live, self.hermes, self.sidecar, self.page = live, hermes, sidecar, page
        self.answers = []
        self.session = None

    def dial(self, sessions=1):
        """Start a call that will have so many sessions, once the sidecar takes their starts."""
        before = len(self.live.sessions)
        allowed = STARTS_PER_MINUTE - sessions  # others within the last minute
        if before > allowed:
            free = self.live.sessions[before - allowed - 1].started_at + 60
            self.live.wait_for(lambda: time.monotonic() > free, timeout=60, about="the next start")
        self.button("Start call").click()
        self.session = self.live.wait_live(count=before + 1)

    def button(self, name):
        return self.page.get_by_role("button", name=name, exact=True)

    def ask(self, words):
        """Ask for something, and return the run it becomes."""
        before = len(self.hermes.runs)
        self.session.user_says(words, delegate=True)
        return self.hermes.run(before + 1)

    def end(self, run, text="That is done."):
        """Let a run end with an answer that can be told from all others."""
        number = len(self.answers) + 1
        self.answers.append(number)
        run.end("completed", output=f"{text} Answer {number}.")

    def hear(self):
        """Wait for the newest answer."""
        self.live.wait_spoken(f"Answer {self.answers[-1]}.")

    # One way a request can go, each.

    def plain(self):
        self.end(self.ask("What is the time in Tokyo?"))
        self.hear()

    def with_tools(self):
        run = self.ask("please look how much space is left")
        for _ in range(5):
            run.emit("tool.started", tool="terminal", preview="df -h")
            run.emit("tool.completed", tool="terminal", duration=0.1, error=False)
        self.end(run, "There is enough. " * 40)
        self.hear()

    def corrected(self):
        run = self.ask("Delete the old folder.")
        run.emit("tool.started", tool="terminal", preview="ls")
        self.session.user_says("No, the newer one.", delegate=True)
        self.live.wait_for(lambda: run.words, about="the correction")
        run.emit("tool.completed", tool="terminal", duration=0.1, error=False)
        self.end(run)
        self.hear()

    def allowed_by_voice(self):
        run = self.ask("Clean the cache.")
        run.ask(request_id=f"q_{run.id}", description=f"cleaning for {run.id}.")
        self.live.wait_spoken(f"cleaning for {run.id}.")
        self.session.user_says("Yes, go ahead.")
        self.live.wait_for(lambda: run.answers, about="the answer")
        self.end(run)
        self.hear()

    def denied_by_click(self):
        run = self.ask("Remove the logs.")
        run.ask(request_id=f"q_{run.id}")
        self.button("Deny").click()
        self.live.wait_for(lambda: run.answers, about="the answer")
        self.end(run)
        self.hear()

    def failing(self):
        run = self.ask("Open the moon.")
        run.end("failed", error="HTTP 500: overloaded")
        self.live.wait_for(lambda: self.newest_spoken("did not answer"), about="the failure")

    def dropped(self):
        run = self.ask("Count the files, slowly.")
        self.session.drop()
        expect(self.page.get_by_role("log")).to_contain_text("connection was lost")
        self.end(run)
        self.dial()
        self.hear()

    def reloaded(self):
        run = self.ask("Make a backup.")
        self.page.reload()
        self.dial()
        self.end(run)
        self.hear()

    def asleep(self):
        run = self.ask("Write the long report.")
        self.live.wait_for(lambda: self.session.paused, about="standby")
        self.end(run)
        expect(self.page.get_by_role("log")).to_contain_text(f"Answer {self.answers[-1]}.")
        self.session.user_says("Are you there?")
        self.hear()

    def renewed(self):
        before = len(self.live.sessions)
        run = self.ask("Watch the build.")
        self.live.session_lifetime = 2 * RENEWED_AFTER
        self.button("Hang up").click()
        self.live.wait_for(lambda: not self.live.open_sessions)
        self.dial(sessions=2)
        self.live.session_lifetime = 7200
        self.session = self.live.wait_live(count=before + 2)
        self.end(run)
        self.hear()

    def typed(self):
        before = len(self.hermes.runs)
        self.page.get_by_label("Message Hermes").fill("what I type counts as well")
        self.button("Send").click()
        self.end(self.hermes.run(before + 1))
        self.hear()

    def newest_spoken(self, fragment):
        return any(fragment in spoken.text and spoken.ended_at for spoken in self.session.spoken[-3:])


KINDS = [
    *(Talk.plain, Talk.with_tools, Talk.corrected, Talk.allowed_by_voice, Talk.denied_by_click),
    *(Talk.failing, Talk.typed, Talk.dropped, Talk.reloaded, Talk.asleep),
]


QUICK = {"auto_acknowledge": False, "ack_delay": 0.1, "reply_delay": 0.1, "speech_rate": 400}
CONFIG = {"model": "gpt-live-1.1", "standby_seconds": STANDBY}


def page_bytes(page):
    """How much the page's scripts hold on to."""
    tools = page.context.new_cdp_session(page)
    tools.send("HeapProfiler.collectGarbage")
    used = tools.send("Runtime.getHeapUsage")["usedSize"]
    tools.detach()
    return used


def sidecar_bytes(sidecar):
    status = Path(f"/proc/{sidecar.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def test_thirty_requests_are_each_answered_once_and_nothing_grows(browser):
    with (
        LiveService(**QUICK, session_overtime=60) as live,
        WorkingHermes() as hermes,
        Sidecar(live, hermes.url, hermes.key, CONFIG) as sidecar,
    ):
        page = sidecar.open(browser)
        talk = Talk(live, hermes, sidecar, page)
        talk.dial()
        used = []
        for number in range(REQUESTS):
            kind = Talk.renewed if number == 2 else KINDS[number % len(KINDS)]
            kind(talk)
            if number % len(KINDS) == len(KINDS) - 2:
                used.append((page_bytes(page), sidecar_bytes(sidecar)))
        talk.button("Hang up").click()
        live.wait_for(lambda: not live.open_sessions)
        page.context.close()
        assert page.faults == []

    spoken = [each for session in live.sessions for each in session.spoken]
    told = Counter(re.findall(r"Answer (\d+)\.", " ".join(each.said for each in spoken)))
    assert told == {str(number): 1 for number in talk.answers}
    assert [each.text for each in spoken if each.cut] == []
    assert [run.body["input"] for run in hermes.runs if run.followers != 1] == []
    assert live.violations == []
    (page_first, sidecar_first), *_, (page_last, sidecar_last) = used
    assert page_last - page_first < PAGE_GROWTH
    assert sidecar_last - sidecar_first < SIDECAR_GROWTH
