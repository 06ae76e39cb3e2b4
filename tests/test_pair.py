"""Pairing: the code, its exchange for the token, and the link with its QR code."""

import io
import json
import logging
import re
import time

import pytest
import zxingcpp

import hermes_voice
from hermes_voice import (
    PAIR_AHEAD,
    PAIR_SECONDS,
    QR_BYTES,
    Conflict,
    Request,
    Unauthorized,
    drawn,
    pair_code,
    pair_time,
    post_pair,
    qr_code,
)

ACCESS = "canary-access-token"
NOW = 1_800_000_000.123
CODE = pair_code(ACCESS, NOW)


# ---- the code ----------------------------------------------------------------


def test_a_code_is_short_plain_and_holds_no_token():
    assert re.fullmatch(r"[A-Za-z0-9_-]{32}", CODE)
    assert ACCESS not in CODE
    assert pair_code(ACCESS, NOW + 0.001) != CODE


@pytest.mark.parametrize("age", [-PAIR_AHEAD + 0.01, 0, 1, PAIR_SECONDS - 0.01])
def test_a_code_says_when_it_was_made_while_it_holds(age):
    assert pair_time(ACCESS, CODE, NOW + age, NOW - 1) == NOW


WRONG = {
    "of another token": pair_code("another-access-token", NOW),
    "cut at the end": CODE[:-1],
    "cut at the front": CODE[1:],
    "cut by four": CODE[:-4],
    "one character of the time changed": ("B" if CODE[5] == "A" else "A").join([CODE[:5], CODE[6:]]),
    "one character of the proof changed": CODE[:-1] + ("B" if CODE[-1] == "A" else "A"),
    "with something behind it": CODE + "AAAA",
    "with a line end": CODE + "\n",
    "in standard base64, or with noise in it": CODE[:8] + "!" + CODE[8:],
    "the token itself": ACCESS,
    "garbage": "garbage",
    "not even ASCII": "schlüssel",
    "empty": "",
}


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
def test_a_wrong_code_is_refused_like_a_wrong_token(code):
    with pytest.raises(Unauthorized):
        pair_time(ACCESS, code, NOW, 0)


OVER = {
    "expired": (NOW + PAIR_SECONDS, 0),
    "long expired": (NOW + 86400, 0),
    "from the future": (NOW - PAIR_AHEAD - 0.01, 0),
    "used before": (NOW, NOW),
    "older than one that was used": (NOW, NOW + 0.001),
}


@pytest.mark.parametrize(("now", "after"), OVER.values(), ids=OVER)
def test_a_code_whose_time_is_over_is_called_that(now, after):
    with pytest.raises(Conflict, match="expired or was used") as caught:
        pair_time(ACCESS, CODE, now, after)

    assert caught.value.code == "pair_expired"


# ---- its exchange ------------------------------------------------------------


@pytest.fixture
def app(bench, caplog):
    caplog.set_level(logging.DEBUG, "hermes_voice")
    app = bench().app
    app.access = ACCESS
    return app


def pair(app, code):
    return post_pair(app, Request(body={"code": code})).body


def test_a_code_is_worth_the_token_once_and_neither_is_logged(app, caplog):
    code = pair_code(ACCESS, time.time() + 1)

    assert pair(app, code) == {"token": ACCESS}
    with pytest.raises(Conflict):
        pair(app, code)

    assert "device.paired" in caplog.text
    assert code not in caplog.text
    assert ACCESS not in caplog.text


def test_the_next_device_is_paired_with_a_code_of_its_own(app):
    first, second = (pair_code(ACCESS, time.time() + ahead) for ahead in (1, 2))

    assert pair(app, first) == pair(app, second) == {"token": ACCESS}


def test_a_wrong_code_uses_nothing_up(app):
    with pytest.raises(Unauthorized):
        pair(app, pair_code("another-access-token", time.time() + 2))

    assert pair(app, pair_code(ACCESS, time.time() + 1)) == {"token": ACCESS}


def test_a_server_that_was_started_again_takes_no_older_code(app):
    code = pair_code(ACCESS, time.time() - 1)

    with pytest.raises(Conflict):
        pair(app, code)


def test_a_server_without_a_token_says_that_it_needs_none(bench):
    with pytest.raises(Conflict, match="no access token") as caught:
        pair(bench().app, CODE)

    assert caught.value.code == "no_token"


# ---- the link ----------------------------------------------------------------


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function: run `--pair` and return its exit code, output and errors."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    logger = logging.getLogger("hermes_voice")
    before = logger.handlers, logger.propagate, logger.level
    (tmp_path / "token").write_text(ACCESS + "\n")
    (tmp_path / "token").chmod(0o600)

    def run(*flags, hosts=(), token=True):
        (tmp_path / "config.json").write_text(json.dumps({"public_hosts": list(hosts)}))
        more = ["--access-token-file", str(tmp_path / "token")] if token else []
        code = hermes_voice.main(["--config", str(tmp_path / "config.json"), *more, *flags])
        out, err = capsys.readouterr()
        assert ACCESS not in out + err
        return code, out, err

    yield run
    logger.handlers, logger.propagate, logger.level = before


LINKS = [
    (["--pair"], ["voice.example.org", "other.example"], "https://voice.example.org/", ""),
    (["--pair", "https://voice.example.org"], ["voice.example.org"], "https://voice.example.org/", ""),
    (["--pair", "https://h.ts.net:8443/v/"], ["h.ts.net"], "https://h.ts.net:8443/v/", ""),
    (["--pair", "https://h.ts.net"], [], "https://h.ts.net/", "add it to 'public_hosts'"),
    (["--pair", "--listen", "192.0.2.7:8790"], [], "http://192.0.2.7:8790/", "tailscale serve"),
    (["--pair", "--listen", "[2001:db8::7]:80"], [], "http://[2001:db8::7]:80/", "ssh -L"),
    (["--pair", "http://192.0.2.7"], [], "http://192.0.2.7/", "no microphone"),
    (["--pair"], [], "http://127.0.0.1:8790/", "for a phone, give --pair the page's URL"),
]


@pytest.mark.parametrize(("flags", "hosts", "base", "warned"), LINKS)
def test_the_link_leads_to_the_page_and_its_code_holds(run, flags, hosts, base, warned):
    code, out, err = run(*flags, hosts=hosts)

    found, made = out.splitlines()[-1].split("#pair=")
    assert (code, found) == (0, base)
    assert time.time() - 60 < pair_time(ACCESS, made, time.time(), 0) <= time.time() + 0.001
    assert warned in err
    assert bool(err) == bool(warned)
    assert "\x1b" not in out


BAD = [
    (["--pair", "voice.example.org"], True, "--pair 'voice.example.org'"),
    (["--pair", "ftp://voice.example.org"], True, "give a URL such as https://"),
    (["--pair", "https://me:canary-secret@voice.example.org"], True, "no user name"),
    (["--pair", "--listen", "0.0.0.0:8790"], True, "names no address"),
    (["--pair", "--listen", "[::]:8790"], True, "names no address"),
    (["--pair", "--listen", "127.0.0.1:0"], True, "names no address"),
    (["--pair"], False, "no access token is configured"),
]


@pytest.mark.parametrize(("flags", "token", "named"), BAD)
def test_what_cannot_be_paired_with_is_said(run, flags, token, named):
    code, out, err = run(*flags, token=token)

    assert (code, out) == (2, "")
    assert err.startswith("hermes-voice: error: ")
    assert named in err
    assert "canary" not in err


def read(drawing):
    """What a QR reader, which knows nothing of ours, reads in a terminal's white on black."""
    rows = []
    for line in drawing.splitlines():
        inner = re.fullmatch(r"\x1b\[38;5;16;48;5;231m([ ▀▄█]+)\x1b\[0m", line)[1]
        rows += [["█▀".find(sign) >= 0 for sign in inner], ["█▄".find(sign) >= 0 for sign in inner]]
    dark = [[True, *row, True] for row in rows]  # the terminal around it
    dark = [[True] * len(dark[0]), *dark, [True] * len(dark[0])]
    pixels = b"".join(
        bytes(0 if cell else 255 for cell in row for _ in range(4)) for row in dark for _ in range(4)
    )
    image = memoryview(pixels).cast("B", shape=[4 * len(dark), 4 * len(dark[0])])
    return [found.text for found in zxingcpp.read_barcodes(image, formats=zxingcpp.BarcodeFormat.QRCode)]


@pytest.mark.parametrize("length", [1, 2, 25, 63, 64, 80, 105, QR_BYTES])
def test_another_program_reads_the_qr_code(length):
    text = ("https://voice.example.org/#pair=" + CODE * 3)[:length]

    assert read(drawn(qr_code(text))) == [text]


def test_a_qr_code_is_drawn_only_for_a_terminal_and_if_the_link_fits(run, monkeypatch):
    room = QR_BYTES - len("https:///#pair=") - len(CODE)
    for length in (room, room + 1):
        host = f"{'a' * (length - 8)}.example"
        screen = Terminal()
        monkeypatch.setattr("sys.stdout", screen)

        assert run("--pair", hosts=[host])[0] == 0

        _, link, *lines = screen.getvalue().splitlines()
        assert link.startswith(f"https://{host}/#pair=")
        assert ACCESS not in screen.getvalue()
        assert (read("\n".join(lines)) if lines else []) == ([link] if length == room else [])
