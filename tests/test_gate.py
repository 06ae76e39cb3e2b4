"""What the gate decides, without a socket: who asks, who has guessed too often, what is worth a line."""

import json
import logging
import math
import subprocess
import sys
from ipaddress import ip_network
from pathlib import Path

import pytest

import hermes_voice
from hermes_voice import (
    CLIENTS_KEPT,
    CONNECTIONS_LEAST,
    CONNECTIONS_MOST,
    FILES_WANTED,
    LOG_FORMATS,
    LOGGED_CHARS,
    QUOTE_CHARS,
    WARNING_SECONDS,
    WARNINGS_MOST,
    WRONG_TOKEN_DELAY,
    WRONG_TOKEN_SECONDS,
    WRONG_TOKENS,
    WRONG_TOKENS_AT_ONCE,
    Warnings,
    WrongTokens,
    client_of,
    connections_for,
    log_event,
    neighbourhood,
    unquoted,
)

PROXIES = ("127.0.0.1", "10.0.0.0/8", "::1", "fd00::/8")


# ---- who asks ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        # Nobody else's word counts.
        ("203.0.113.5", ["198.51.100.7"], "203.0.113.5"),
        ("203.0.113.5", ["127.0.0.1"], "203.0.113.5"),
        ("11.0.0.1", ["198.51.100.7"], "11.0.0.1"),
        # A proxy without a word is the client.
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", [""], "127.0.0.1"),
        # The rightmost that is no proxy; what stands left of it, the client wrote itself.
        ("127.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("127.0.0.1", ["192.0.2.1, 198.51.100.7"], "198.51.100.7"),
        ("127.0.0.1", ["192.0.2.1, 198.51.100.7, 10.1.2.3"], "198.51.100.7"),
        ("127.0.0.1", ["192.0.2.1", "198.51.100.7 ,10.1.2.3"], "198.51.100.7"),
        ("127.0.0.1", ["198.51.100.7", "192.0.2.1"], "192.0.2.1"),
        ("10.9.9.9", ["10.1.1.1, 10.2.2.2"], "10.1.1.1"),
        # What is no address ends the chain at the proxy that said so.
        ("127.0.0.1", ["198.51.100.7, unknown"], "127.0.0.1"),
        ("127.0.0.1", ["198.51.100.7, 10.1.2.3x, 10.1.2.3"], "10.1.2.3"),
        ("127.0.0.1", ["198.51.100.7, "], "127.0.0.1"),
        ("127.0.0.1", ["198.51.100.07"], "127.0.0.1"),
        ("127.0.0.1", ["\x00"], "127.0.0.1"),
        # Some proxies add the port.
        ("127.0.0.1", ["198.51.100.7:4711"], "198.51.100.7"),
        ("127.0.0.1", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("127.0.0.1", ["2001:db8::7"], "2001:db8::7"),
        # An address is the same in each of its forms.
        ("::ffff:127.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("127.0.0.1", ["::ffff:198.51.100.7"], "198.51.100.7"),
        ("::1", ["2001:DB8:0::7"], "2001:db8::7"),
        ("fd12::1%eth0", ["198.51.100.7"], "198.51.100.7"),
    ],
)
def test_only_trusted_proxies_are_believed_about_who_asks(peer, forwarded, client):
    assert client_of(peer, forwarded, [ip_network(text) for text in PROXIES]) == client


def test_without_trusted_proxies_the_peer_asks():
    assert client_of("127.0.0.1", ["198.51.100.7"], ()) == "127.0.0.1"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("198.51.100.7", "198.51.100.7", True),
        ("198.51.100.7", "198.51.100.8", False),
        ("2001:db8::7", "2001:db8::1:2:3:4", True),
        ("2001:db8::7", "2001:db8:0:1::7", False),
        ("::ffff:198.51.100.7", "198.51.100.7", True),
        ("::ffff:198.51.100.7", "::ffff:198.51.100.8", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "198.51.100.7", False),
    ],
)
def test_an_ipv6_network_counts_as_one_client(one, other, same):
    assert (neighbourhood(one) == neighbourhood(other)) == same


# ---- wrong tokens ------------------------------------------------------------


def test_wrong_tokens_are_slowed_then_refused():
    wrong = WrongTokens()

    counted = [wrong.count("a", 0) for _ in range(WRONG_TOKENS + 2)]

    slowed = WRONG_TOKENS - WRONG_TOKENS_AT_ONCE
    expected = [(0, 0)] * WRONG_TOKENS_AT_ONCE + [(WRONG_TOKEN_DELAY, 0)] * slowed
    assert counted == [*expected, (0, WRONG_TOKEN_SECONDS), (0, WRONG_TOKEN_SECONDS)]


def test_who_waits_as_told_is_heard_once_more():
    wrong = WrongTokens()
    for _ in range(WRONG_TOKENS + 50):
        _, wait = wrong.count("a", 0)

    assert wrong.count("a", wait - 0.1)[1] == math.ceil(0.1)
    assert wrong.count("a", wait)[1] == 0
    assert wrong.count("a", wait)[1] == WRONG_TOKEN_SECONDS


def test_who_was_quiet_for_long_starts_anew():
    wrong = WrongTokens()
    for _ in range(WRONG_TOKENS):
        wrong.count("a", 0)

    assert wrong.count("a", WRONG_TOKENS * WRONG_TOKEN_SECONDS) == (0, 0)


def test_each_client_is_counted_alone_and_the_oldest_is_forgotten():
    wrong = WrongTokens()
    for _ in range(WRONG_TOKENS):
        wrong.count("a", 0)
    for number in range(CLIENTS_KEPT - 1):
        assert wrong.count(f"other {number}", 0) == (0, 0)
    assert wrong.count("a", 0)[1] > 0

    for number in range(CLIENTS_KEPT * 3):
        wrong.count(f"another {number}", 0)

    assert len(wrong._shown) == CLIENTS_KEPT
    assert wrong.count("a", 0) == (0, 0)


# ---- what is worth a line ----------------------------------------------------


def test_a_client_is_warned_about_once_in_a_while():
    warnings = Warnings()

    assert [warnings.admit("a", at) for at in (0, 1, WARNING_SECONDS - 0.1)] == [0, None, None]
    assert warnings.admit("b", WARNING_SECONDS - 0.1) == 2
    assert warnings.admit("a", WARNING_SECONDS) == 0


def test_many_clients_do_not_fill_the_log():
    warnings = Warnings()

    admitted = [warnings.admit(f"client {number}", number / 1000) for number in range(9_000)]

    assert sum(told is not None for told in admitted) == WARNINGS_MOST
    assert len(warnings._told) == WARNINGS_MOST
    assert warnings.admit("one more", WARNING_SECONDS) == 9_000 - WARNINGS_MOST


# ---- the log -----------------------------------------------------------------

NASTY = "\x1b[31m\r\n2026-01-01T00:00:00Z INFO  approval.answered\x00\x7f\u2028\u202e\ud83d caf\u00e9"


@pytest.fixture
def lines(capsys):
    """A function: what the log holds after an act, in one of its formats."""
    logger = logging.getLogger("hermes_voice")
    before = logger.handlers, logger.propagate, logger.level

    def lines(kind, act):
        handler = logging.StreamHandler()
        handler.setFormatter(LOG_FORMATS[kind]())
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
        act()
        return capsys.readouterr().err.split("\n")[:-1]

    yield lines
    logger.handlers, logger.propagate, logger.level = before


def crash():
    try:
        raise ValueError(NASTY)
    except ValueError:
        log_event("run.crashed", logging.ERROR, crash=True, run="r1")


def test_a_json_line_holds_the_pairs_as_values(lines):
    (line,) = lines("json", lambda: log_event("run.ended", run="r1", seconds=1.5, again=True, more=None))

    written = json.loads(line)
    assert written.pop("time").endswith("Z")
    assert written == {
        "level": "INFO", "event": "run.ended", "run": "r1", "seconds": 1.5, "again": True, "more": None
    }  # fmt: skip


@pytest.mark.parametrize("kind", LOG_FORMATS)
def test_a_line_is_one_line_whatever_it_holds(lines, kind):
    (line,) = lines(kind, lambda: log_event("request.refused", path=NASTY))

    assert line.isascii()
    assert line.isprintable()
    assert "approval.answered" in line


@pytest.mark.parametrize("kind", LOG_FORMATS)
def test_a_value_is_cut(lines, kind):
    (line,) = lines(kind, lambda: log_event("request.refused", path="x" * 70_000))

    assert "x" * LOGGED_CHARS in line
    assert len(line) < LOGGED_CHARS + 200


def test_a_traceback_cannot_be_taken_for_lines(lines):
    first, *traceback = lines("text", crash)

    assert "run.crashed run=r1" in first
    assert traceback[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)
    assert "ValueError: \\x1b[31m" in "".join(traceback)


def test_a_traceback_is_in_the_json_line(lines):
    (line,) = lines("json", crash)

    written = json.loads(line)
    assert (written["level"], written["event"], written["run"]) == ("ERROR", "run.crashed", "r1")
    assert written["exception"].startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("text", "sent", "logged"),
    [
        ("nothing of ours", {"input": "Delete the photos"}, "nothing of ours"),
        ("bad: Delete the photos!", {"input": "Delete the photos"}, "bad: •••!"),
        ("bad: lete the pho", {"input": "Delete the photos"}, "bad: •••"),
        ("bad: the photos", {"input": "Delete the photos"}, "bad: the photos"),
        (r'{"m": "no v=0\r\na=ice-pwd:x"}', {"t": {"sdp": "v=0\r\na=ice-pwd:x\r\n"}}, '{"m": "no •••"}'),
        ("first line, second line", {"lines": [{"text": "second line,"}]}, "first line, second line"),
        ("first line, second line,", {"lines": [{"text": "second line,"}]}, "first line, •••"),
        ("short", {"input": "short"}, "short"),
        ("", {"input": "x" * QUOTE_CHARS}, ""),
        ("something", None, "something"),
    ],
)
def test_what_an_error_quotes_of_the_request_is_not_logged(text, sent, logged):
    assert unquoted(text, sent) == logged


# ---- descriptors -------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "connections"),
    [(0, CONNECTIONS_LEAST), (64, CONNECTIONS_LEAST), (256, 96), (1024, 480), (4096, CONNECTIONS_MOST)],
)
def test_half_of_the_descriptors_are_for_connections(files, connections):
    assert connections_for(files) == connections


def test_the_readme_tells_the_most():
    readme = (Path(hermes_voice.__file__).parent / "README.md").read_text()

    assert f"at most {CONNECTIONS_MOST:,} connections" in readme
    assert WRONG_TOKENS == 10
    assert "after ten of them `429`" in readme


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(256, 1024, 1024), (256, 5000, FILES_WANTED), (5000, 5000, 5000), (64, 64, 64)],
)
def test_the_limit_of_descriptors_is_raised_as_far_as_is_useful(soft, hard, raised):
    code = (
        "import resource, hermes_voice as h\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "print(h.raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    folder = Path(hermes_voice.__file__).parent

    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=True
    )

    assert said.stdout.split() == [str(raised), str(raised), str(hard)]
