"""Figures that a person would feel, measured from outside the page: at the stand-in for the
voice model, and at Hermes. They are printed, and the best of them are held against the numbers
of the design: a busy machine adds to what the program takes, and takes nothing away."""

import itertools
import statistics
import time
from collections import defaultdict

import pytest
from live_service import LiveService
from playwright.sync_api import expect
from sidecar import Sidecar
from working_hermes import WorkingHermes

ROUNDS = 12
REQUESTS = (
    "What is the weather in Cologne tomorrow?",
    "look up when the next train to Bonn leaves",
    "Please compare the two offers in my mail, and tell me which is cheaper.",
    "ich möchte wissen wie viel Platz auf der Platte ist",
)

SETTLE = 0.6  # seconds of quiet at most, and what the way to Hermes takes besides
TO_HERMES = 0.4
TO_VOICE = 0.05  # from Hermes's terminal event to the commentary


class TimedHermes(WorkingHermes):
    """It notes when each run was started."""

    def start(self, request):
        answer = super().start(request)
        self.runs[-1].started_at = time.monotonic()
        return answer


@pytest.mark.alone
def test_the_way_of_a_request_and_of_its_answer_is_short_and_no_word_is_missing(browser, capsys):
    accepted, spoken, missing = defaultdict(list), [], 0
    with (
        LiveService(auto_acknowledge=False, ack_delay=0.1, reply_delay=0.1) as live,
        TimedHermes() as hermes,
        Sidecar(live, hermes.url, hermes.key) as sidecar,
    ):
        page = sidecar.open(browser)
        page.get_by_role("button", name="Start call").click()
        session = live.wait_live()
        expect(page.get_by_role("status")).to_contain_text("Listening")
        for number in range(1, ROUNDS + 1):
            words = REQUESTS[number % len(REQUESTS)]
            session.user_says(words, delegate=True)
            said_at = newest(session.sent, "session.input_transcript.delta").at
            run = hermes.run(number)
            accepted[words].append(run.started_at - said_at)
            missing += len(set(words.split()) - set(run.body["input"].split()))
            run.emit("tool.started", tool="terminal", preview="look")
            # The user has long been quiet when most answers come.
            live.wait_for(lambda at=said_at: time.monotonic() - at > 2)
            ended_at = time.monotonic()
            run.end("completed", output=f"This is answer {number}.")
            live.wait_spoken(f"answer {number}.")
            spoken.append(newest(session.received, "session.commentary.append").at - ended_at)
        page.context.close()
        assert page.faults == []
    assert live.violations == []

    with capsys.disabled():
        print()
        print(figures("last user word to run accepted", list(itertools.chain(*accepted.values()))))
        print(figures("Hermes's terminal event to commentary", spoken))
        print(f"words missing: {missing} of {ROUNDS} requests")
    assert missing == 0
    assert max(map(min, accepted.values())) < SETTLE + TO_HERMES
    assert min(spoken) < TO_VOICE


def newest(messages, kind):
    return [message for message in messages if message.type == kind][-1]


def figures(name, seconds):
    middle, most = statistics.median(seconds), statistics.quantiles(seconds, n=20, method="inclusive")[-1]
    return f"{name}: median {middle * 1000:.0f} ms, p95 {most * 1000:.0f} ms, {len(seconds)} times"
