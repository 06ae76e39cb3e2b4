"""The check: its text line by line, against real and scripted upstreams, and what it never shows."""

import contextlib
import datetime
import json
import os
import re
import socket
import sqlite3
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hermes_gateway import VERSIONS, HermesGateway, free_port
from live_service import LiveService
from scripted_hermes import HANG, ScriptedHermes, reply

import hermes_voice

VERSION = hermes_voice.__version__
TOKEN = "canary-access-token"
PAGE_FILES = sum(path.suffix in hermes_voice.MEDIA_TYPES for path in hermes_voice.page_folder(None).iterdir())
ALL_FEATURES = {"run_submission": True, "run_steer": True, "runs_idempotency": {"supported": True}}
HEALTH = {"status": "ok", "platform": "hermes-agent", "version": "0.22.2"}


def scripted_hermes(features=ALL_FEATURES, health=HEALTH, headers=None):
    return ScriptedHermes(
        {
            ("GET", "/health"): [reply(200, health, headers)],
            ("GET", "/v1/capabilities"): [reply(200, {"features": features})],
        }
    )


class Desk:
    """A machine with everything in place, and the check of it. Flags can be replaced (None: left out)."""

    def __init__(self, folder, capsys, hermes, openai):
        self.folder, self.capsys = folder, capsys
        self.port = free_port()
        self.keys = [hermes.key, openai.key, TOKEN]
        self.flags = {
            "--listen": f"127.0.0.1:{self.port}",
            "--hermes-url": hermes.url,
            "--openai-base-url": openai.url,
            "--hermes-key-file": self.write("hermes-key", hermes.key),
            "--openai-key-file": self.write("openai-key", openai.key),
            "--state": str(folder / "state"),
        }

    def write(self, name, text, mode=0o600):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    def argv(self, **others):
        given = self.flags | {f"--{name.replace('_', '-')}": value for name, value in others.items()}
        return [part for flag, value in given.items() if value is not None for part in (flag, value)]

    def check(self, **others):
        """The exit code. Whatever is found, nothing secret is shown, and what is wrong has advice."""
        code = hermes_voice.main(["--check", *self.argv(**others)])
        out, err = self.capsys.readouterr()
        assert err == ""
        assert not [key for key in self.keys if key in out]
        assert not [line for line in out.splitlines()[:-1] if line[:2] != "ok" and "; " not in line]
        *self.lines, self.verdict = out.splitlines()
        return code

    def said(self, subject):
        """What is said of a subject, with its level."""
        return [f"{line[:8].strip()}: {line[23:]}" for line in self.lines if line[9:22].strip() == subject]


@pytest.fixture(scope="module")
def openai():
    with LiveService() as live:
        live.tolerate("GET /v1/models/")
        yield live
        assert live.creates == 0
        assert live.sessions == []
        assert {request["method"] for request in live.requests} <= {"GET"}


@pytest.fixture
def hermes():
    with scripted_hermes() as hermes:
        yield hermes


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A user with nothing of this machine's."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("HERMES_HOME", "CREDENTIALS_DIRECTORY", "STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def desk(home, capsys, hermes, openai):
    return Desk(home, capsys, hermes, openai)


# ---- all of it ---------------------------------------------------------------


def test_everything_in_place_is_said_line_by_line(desk, capsys):
    assert hermes_voice.main(["--check", *desk.argv()]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "ok       config        none, so the defaults; model gpt-live-1",
        f"ok       page          {PAGE_FILES} files",
        "ok       OpenAI key    in ~/openai-key, for its owner only",
        "ok       Hermes key    in ~/hermes-key, for its owner only",
        "ok       access token  none, so whoever reaches the page drives Hermes",
        "ok       journal       in ~/state, made at the first start",
        f"ok       port          {desk.port} is free",
        "ok       reach         from this computer; from another, forward the port with ssh -L",
        "ok       Hermes        0.22.2, key accepted; has runs, steering, safe repeats, history and bound"
        " answers",
        "ok       approvals     cannot be seen from here; Hermes's default is smart",
        "ok       OpenAI        key accepted, gpt-live-1 is open to it",
        "ok       clock         agrees with OpenAI",
        f"hermes-voice {VERSION}: a call would work; 0 problems, 0 warnings",
    ]


def test_a_newcomer_is_led_to_the_first_steps(capsys):
    argv = ["--listen", "127.0.0.1:0", *("--hermes-url", f"http://127.0.0.1:{free_port()}")]
    argv += ["--openai-base-url", f"http://127.0.0.1:{free_port()}"]

    assert hermes_voice.main(["--check", *argv]) == 1

    assert capsys.readouterr().out.splitlines() == [
        "ok       config        none, so the defaults; model gpt-live-1",
        f"ok       page          {PAGE_FILES} files",
        "problem  OpenAI key    --openai-key-file: not given, and ~/.hermes/.env holds no OPENAI_API_KEY;"
        " make one at https://platform.openai.com/api-keys, put it into a file of mode 600 and name that:"
        " --openai-key-file FILE",
        "problem  Hermes key    --hermes-key-file: not given, and ~/.hermes/.env holds no API_SERVER_KEY; put"
        " API_SERVER_ENABLED=true and API_SERVER_KEY= with what `openssl rand -hex 32` prints into Hermes's"
        " .env, then run: hermes gateway run; for a Hermes elsewhere: --hermes-key-file FILE",
        "ok       access token  none, so whoever reaches the page drives Hermes",
        "ok       journal       in ~/.local/state/hermes-voice, made at the first start",
        "ok       port          any that is free",
        "ok       reach         from this computer; from another, forward the port with ssh -L",
        "problem  Hermes        cannot be reached (ConnectionRefusedError: [Errno 111] Connection refused);"
        " check that it is running and that its address is right",
        "ok       approvals     cannot be seen from here; Hermes's default is smart",
        "problem  OpenAI        cannot be reached (ConnectionRefusedError: [Errno 111] Connection refused);"
        " check this computer's way to the internet, then try again",
        "ok       clock         not compared: no answer had a date",
        f"hermes-voice {VERSION}: no call would work yet; 4 problems, 0 warnings",
    ]


def test_programs_are_told_the_same(desk, capsys):
    code = desk.check(hermes_url="nonsense")

    assert hermes_voice.main(["--check", "--json", *desk.argv(hermes_url="nonsense")]) == code == 1

    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["version"]) == (False, VERSION)
    keys = ["level", "subject", "text", "advice"]
    assert [list(finding) for finding in told["findings"]] == [keys] * len(desk.lines)
    for finding, line in zip(told["findings"], desk.lines, strict=True):
        level, subject, *texts = finding.values()
        assert line == f"{level:8} {subject:13} {'; '.join(filter(None, texts))}"


def test_json_goes_with_check_only(capsys):
    assert hermes_voice.main(["--json"]) == 2

    assert "--json goes with --check" in capsys.readouterr().err


def test_every_check_runs_whatever_the_others_found(desk):
    config = desk.write("config.json", '{"modle": "x", "idle_seconds": 1}')
    nonsense = {"listen": "127.0.0.1:http", "hermes_url": "nonsense", "openai_base_url": "ftp://x"}

    assert desk.check(config=config, static="/no/such/folder", state=f"{config}/below", **nonsense) == 1

    problems = [line[9:22].strip() for line in desk.lines if line.startswith("problem")]
    assert problems == "config config page journal port reach Hermes OpenAI".split()
    assert desk.verdict.endswith("no call would work yet; 8 problems, 0 warnings")


# ---- config, page, secrets ---------------------------------------------------


def test_the_configs_warnings_are_told(desk):
    assert desk.check(config=desk.write("config.json", '{"voice": "cedra"}')) == 0

    assert desk.said("config") == [
        "ok: read; model gpt-live-1",
        "warning: voice 'cedra' is not a known built-in voice; did you mean 'cedar'?",
    ]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, []),
        ({"language": "Deutsch"}, ["ok: a spoken yes or no counts in German"]),
        ({"language": "de, en"}, ["ok: a spoken yes or no counts in English and German"]),
        (
            {"language": "Danish"},
            [
                "warning: Danish: no spoken yes or no is built in; set yes_phrases and no_phrases;"
                " until then use the buttons"
            ],
        ),
        (
            {"language": "Danish", "yes_phrases": ["ja"]},
            ["warning: Danish: no spoken yes or no is built in; set no_phrases; until then use the buttons"],
        ),
        (
            {"language": "Danish", "yes_phrases": ["ja"], "no_phrases": ["nej"]},
            ["ok: a spoken yes or no counts in your own phrases only"],
        ),
        ({"language": "Danish", "voice_approvals": False}, []),
    ],
)
def test_in_which_language_permission_can_be_spoken_is_told(desk, settings, told):
    desk.check(config=desk.write("config.json", json.dumps(settings)))

    assert desk.said("config")[1:] == told


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("canary-openai-key", 0o640, "warning: others than its owner may use ~/k; run: chmod 600 ~/k"),
        (
            "canary-openai-key",
            0o644,
            "problem: --openai-key-file ~/k: every user can read it; run: chmod 600 ~/k",
        ),
        (
            "",
            0o600,
            "problem: --openai-key-file ~/k: is empty; put that right; the README says what belongs there",
        ),
        (
            "canary",
            0o600,
            "problem: --openai-key-file ~/k: is too short for a secret; it needs 16 characters",
        ),
    ],
)
def test_a_secret_and_its_permissions_are_judged(desk, text, mode, said):
    desk.check(openai_key_file=desk.write("k", text, mode))

    assert desk.said("OpenAI key") == [said]
    assert not [line for line in desk.lines if "canary" in line]


def test_keys_of_systemd_and_of_hermess_env_are_found(desk, monkeypatch, hermes, openai):
    desk.write("credentials/openai-key", openai.key, 0o440)
    dotenv = desk.write(".hermes/.env", f"API_SERVER_KEY={hermes.key}\n", 0o640)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(desk.folder / "credentials"))

    assert desk.check(openai_key_file=None, hermes_key_file=None) == 0

    assert desk.said("OpenAI key") == ["ok: from systemd"]
    assert desk.said("Hermes key") == [
        "warning: others than its owner may use ~/.hermes/.env; run: chmod 600 ~/.hermes/.env"
    ]

    Path(dotenv).chmod(0o644)
    assert desk.check(openai_key_file=None, hermes_key_file=None) == 1

    assert desk.said("Hermes key") == [
        "problem: API_SERVER_KEY of ~/.hermes/.env: every user can read it; run: chmod 600 ~/.hermes/.env"
    ]


def test_a_credentials_folder_that_cannot_be_looked_into_is_none(desk, monkeypatch):
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", f"/{'x' * 300}")  # longer than a name may be

    assert desk.check() == 0

    assert desk.said("access token") == ["ok: none, so whoever reaches the page drives Hermes"]
    assert desk.said("OpenAI key") == ["ok: in ~/openai-key, for its owner only"]


def test_a_file_that_is_named_is_looked_at_although_systemd_has_one_too(desk, monkeypatch):
    desk.write("credentials/openai-key", "canary-of-systemd")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(desk.folder / "credentials"))
    os.chmod(desk.flags["--openai-key-file"], 0o640)

    assert desk.check() == 0

    named = "~/openai-key"
    assert desk.said("OpenAI key") == [
        f"warning: others than its owner may use {named}; run: chmod 600 {named}"
    ]


# ---- journal -----------------------------------------------------------------


def contents(folder):
    """Its files but for the index of the locks, and when files were last added or removed."""
    files = [path for path in Path(folder).iterdir() if path.suffix != ".sqlite3-shm"]
    return folder.stat().st_mtime_ns, {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_journal_that_does_not_exist_is_not_made(desk):
    assert desk.check() == 0

    assert not (desk.folder / "state").exists()


@pytest.mark.parametrize("running", [False, True])
def test_a_journal_is_looked_at_and_not_touched(desk, running):
    folder = desk.folder / "state"
    journal = hermes_voice.Journal(folder)
    journal.add_lines("c1", [], 1.0)
    if not running:
        journal._database.close()
    before = contents(folder)

    assert desk.check() == 0

    assert desk.said("journal") == ["ok: in ~/state"]
    assert contents(folder) == before
    if running:
        journal._database.close()


HINT = "give another folder, move the file away, or run without memory: --state none"


def test_a_folder_that_cannot_be_made_is_told(desk):
    below = desk.write("file", "") + "/state"

    assert desk.check(state=below) == 1

    said = "problem: --state ~/file/state: the journal cannot be used: [Errno 20] a file is in the way"
    assert desk.said("journal") == [f"{said}; {HINT}"]


def test_a_folder_that_cannot_be_written_is_told(desk):
    assert desk.check(state="/proc/self/state") == 1

    (said,) = desk.said("journal")
    assert said.endswith(f"the journal cannot be used: [Errno 13] it cannot be written; {HINT}")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("pragma user_version = 99", "it was written by a newer hermes-voice"),
        (None, "file is not a database"),
    ],
)
def test_a_journal_that_cannot_be_used_is_told(desk, broken, said):
    path = desk.folder / "state" / hermes_voice.JOURNAL_FILE
    path.parent.mkdir()
    if broken:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(broken)
    else:
        path.write_text("no database at all" * 100)

    assert desk.check() == 1

    assert desk.said("journal") == [f"problem: --state ~/state: the journal cannot be used: {said}; {HINT}"]


def test_no_journal_is_fine(desk):
    assert desk.check(state="none") == 0

    assert desk.said("journal") == ["ok: in memory only: a restart forgets what was asked and said"]


# ---- certificate -------------------------------------------------------------


def certificate(desk, days):
    """A file with a certificate for *.home.arpa that runs out in so many days, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hermes-voice")])
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(days=100))
        .not_valid_after(now + datetime.timedelta(days=days, hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("*.home.arpa")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return desk.write("c.pem", (key.private_bytes(*plain) + made.public_bytes(Encoding.PEM)).decode())


RENEW = "renew it, or make one as the README says; a server that runs will take it over"
OTHER = f"browsers refuse ~/c.pem: Hostname mismatch, certificate is not valid for 'your host #2'; {RENEW}"


@pytest.mark.parametrize(
    ("days", "code", "said"),
    [
        (14, 0, "ok: in ~/c.pem, good for 14 days"),
        (13, 0, f"warning: in ~/c.pem, good for 13 days; {RENEW}"),
        (-1, 1, f"problem: browsers refuse ~/c.pem: certificate has expired; {RENEW}"),
    ],
)
def test_how_long_a_certificate_is_good_and_for_whom_is_told(desk, days, code, said):
    config = desk.write("config.json", '{"public_hosts": ["voice.home.arpa", "voice.example.org"]}')
    token = desk.write("token", TOKEN)

    assert desk.check(tls_cert=certificate(desk, days), access_token_file=token, config=config) == code

    assert desk.said("certificate") == [said, f"warning: {OTHER}"]
    assert desk.said("reach") == ["ok: HTTPS"]


def test_a_certificate_that_cannot_be_used_is_a_problem(desk):
    assert desk.check(tls_cert=desk.write("c.pem", "nonsense")) == 1

    (said,) = desk.said("certificate")
    assert said.startswith("problem: --tls-cert ~/c.pem: it must hold a certificate chain in PEM")


# ---- port and reach ----------------------------------------------------------


def test_a_port_of_another_program_is_a_problem(desk):
    with ScriptedHermes({("GET", "/healthz"): [reply(200, {"status": "ok"})]}) as foreign:
        assert desk.check(listen=f"127.0.0.1:{foreign.port}") == 1
        (asked,) = foreign.seen

    assert desk.said("port") == [
        f"problem: {foreign.port} is taken by another program; give another port with --listen"
    ]
    assert not [key for key in desk.keys if key in str(asked.headers)]


def test_a_port_of_a_silent_program_is_a_problem(desk, monkeypatch):
    monkeypatch.setattr(hermes_voice, "ASK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        assert desk.check(listen=f"127.0.0.1:{port}") == 1

    assert desk.said("port") == [
        f"problem: {port} is taken by another program; give another port with --listen"
    ]


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0", "[::1]"])
def test_a_hermes_voice_that_is_running_may_have_the_port(desk, listen):
    token = desk.write("token", TOKEN)
    argv = desk.argv(listen=f"{listen}:0", access_token_file=token)
    server, _ = hermes_voice.build_server(hermes_voice.parse_arguments(argv), os.environ)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        code = desk.check(listen=f"{listen}:{server.server_port}", access_token_file=token)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

    assert code == 0
    assert desk.said("port") == [f"ok: {server.server_port} is taken by a hermes-voice that is running"]


def test_a_port_that_another_program_has_for_ipv4_is_not_free_for_both(desk, monkeypatch):
    monkeypatch.setattr(hermes_voice, "ASK_SECONDS", 0.1)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]

        desk.check(listen=f"[::]:{port}", access_token_file=desk.write("token", TOKEN))

    assert not [line for line in desk.said("port") if "free" in line]


def test_an_address_of_another_computer_is_told_but_not_which(desk):
    token = desk.write("token", TOKEN)

    assert desk.check(listen="192.0.2.1:8790", access_token_file=token) == 1

    assert desk.said("port") == [
        "problem: cannot listen: Cannot assign requested address;"
        " give this computer's address and a port above 1023"
    ]
    assert desk.said("reach") == [
        "warning: without HTTPS browsers give no microphone to pages from other computers;"
        " put a reverse proxy with TLS in front, and its name into public_hosts"
    ]


def test_others_without_a_token_are_a_problem(desk):
    assert desk.check(listen="0.0.0.0:0") == 1

    assert desk.said("port") == [
        "problem: --listen your address:0: others could reach it, so it needs --access-token-file;"
        " whoever gets in drives Hermes"
    ]


def test_public_hosts_want_a_token_and_a_proxy_with_tls(desk):
    config = desk.write("config.json", '{"public_hosts": ["voice.example.org"]}')

    assert desk.check(config=config) == 0
    without = desk.said("reach")
    assert desk.check(config=config, access_token_file=desk.write("token", TOKEN)) == 0

    fine = "ok: 1 public host(s), for which a reverse proxy must have TLS"
    assert desk.said("reach") == [fine]
    assert without == [
        "warning: who comes through public_hosts drives Hermes without an access token;"
        " make one with `openssl rand -hex 32` and name its file with --access-token-file",
        fine,
    ]


# ---- Hermes ------------------------------------------------------------------


@pytest.fixture(scope="module", params=VERSIONS)
def gateway(request, hermes_python):
    with HermesGateway(hermes_python(request.param)) as gateway:
        yield gateway


OLD = [
    "warning: {} takes no words while it works: the task is stopped and started again with them;"
    " update Hermes to 0.20.4 or newer",
    "warning: {} cannot repeat a start safely, load a conversation, or bind an answer to its question;"
    " update Hermes to 0.21.0 or newer",
]
FULL = "; has runs, steering, safe repeats, history and bound answers"


def test_a_real_hermes_is_known_with_its_version_and_its_approvals(
    gateway, home, capsys, openai, monkeypatch
):
    desk = Desk(home, capsys, gateway, openai)
    monkeypatch.setenv("HERMES_HOME", str(gateway.home))
    old = gateway.version.startswith("0.19")

    assert desk.check() == 0

    has = "; has runs" if old else FULL
    lacks = [line.format(gateway.version) for line in OLD] if old else []
    assert desk.said("Hermes") == [f"ok: {gateway.version}, key accepted{has}", *lacks]
    assert desk.said("approvals") == ["ok: manual: every dangerous command asks you"]
    assert desk.said("clock") in (
        ["ok: agrees with Hermes and OpenAI"],
        ["ok: agrees with OpenAI and Hermes"],
    )


def test_a_real_hermes_refuses_a_wrong_key(gateway, home, capsys, openai):
    desk = Desk(home, capsys, gateway, openai)

    assert desk.check(hermes_key_file=desk.write("wrong", "not-the-key-of-this-hermes")) == 1

    assert desk.said("Hermes") == ["problem: refused its key (HTTP 401); check the Hermes key file"]


def test_without_a_key_hermes_and_openai_are_still_looked_for(desk):
    assert desk.check(hermes_key_file=None, openai_key_file=None) == 1

    rest = "answers, but there is no key to ask more with; see the"
    assert desk.said("Hermes") == [f"warning: 0.22.2 {rest} Hermes key"]
    assert desk.said("OpenAI") == [f"warning: {rest} OpenAI key"]


@pytest.mark.parametrize(
    ("features", "lacks"),
    [
        ({"run_submission": True}, OLD),
        ({"run_submission": True, "run_steer": True}, OLD[1:]),
    ],
)
def test_an_old_hermes_is_told_with_what_it_lacks_and_what_brings_it(home, capsys, openai, features, lacks):
    with scripted_hermes(features, HEALTH | {"version": "0.20.0"}) as hermes:
        desk = Desk(home, capsys, hermes, openai)

        assert desk.check() == 0

    assert desk.said("Hermes")[1:] == [line.format("0.20.0") for line in lacks]


def test_a_hermes_without_runs_is_a_problem(home, capsys, openai):
    with scripted_hermes({}) as hermes:
        desk = Desk(home, capsys, hermes, openai)

        assert desk.check() == 1

    assert desk.said("Hermes")[:2] == [
        "ok: 0.22.2, key accepted",
        "problem: 0.22.2 has no runs, so it cannot be given work; update Hermes to 0.19.0 or newer",
    ]


def test_a_hermes_without_capabilities_is_too_old(home, capsys, openai):
    with ScriptedHermes({("GET", "/health"): [reply(200, HEALTH)]}) as hermes:
        desk = Desk(home, capsys, hermes, openai)

        assert desk.check() == 1

    assert desk.said("Hermes") == [
        "problem: does not know this task, or is too old for hermes-voice (HTTP 404);"
        " look for a newer Hermes or hermes-voice"
    ]


@pytest.mark.parametrize("answer", [reply(200, "It works!"), reply(404, "404"), reply(200, {"status": "ok"})])
def test_something_else_in_the_place_of_hermes_is_told(home, capsys, openai, answer):
    with ScriptedHermes({("GET", "/health"): [answer]}) as other:
        desk = Desk(home, capsys, other, openai)

        assert desk.check() == 1
        assert [request.path for request in other.seen] == ["/health"]

    assert desk.said("Hermes") == [
        "problem: what answers is not Hermes's API server; give its address with --hermes-url"
    ]


def test_a_hermes_that_hangs_is_not_waited_for(home, capsys, openai, monkeypatch):
    monkeypatch.setattr(hermes_voice, "CHECK_SECONDS", 0.3)
    with ScriptedHermes({("GET", "/health"): [HANG]}) as hermes:
        desk = Desk(home, capsys, hermes, openai)
        began = time.monotonic()

        assert desk.check() == 1

        assert time.monotonic() - began < hermes_voice.ASK_SECONDS
    assert desk.said("Hermes") == [
        "problem: no end after 0.3 s; check the network and its name server, then try again"
    ]


MODES = [
    ("approvals:\n  mode: manual\n", "manual"),
    (
        'model: x\napprovals:\n  # mode: off\n  timeout: 60\n\n  mode: "off" # yes\nother:\n  mode: manual\n',
        "off",
    ),
    ("approvals: {timeout: 3, mode: off}\n", "off"),
    ("approvals:\n  mode: false\n", "off"),
    ("approvals:\n  unattended_mode: approve\n  mode: smart\n", "smart"),
    ("approvals:\n  timeout: 60\nother:\n  mode: off\n", "smart"),
    ("# approvals:\n#   mode: off\n", "smart"),
    ('{"other": {"mode": "x"}, "approvals": {"mode": "manual"}}', "manual"),
    ('{"approvals": {"timeout": 1}, "other": {"mode": "off"}}', "smart"),
    ("", "smart"),
]


@pytest.mark.parametrize(("text", "mode"), MODES)
def test_the_approval_mode_is_read_from_hermess_settings(text, mode):
    assert hermes_voice.approval_mode(text) == mode


@pytest.mark.parametrize("mode", ["manual", "smart", "off", "odd"])
def test_what_the_approval_mode_means_is_told(desk, mode):
    desk.write(".hermes/config.yaml", f"approvals:\n  mode: {mode}\n")

    assert desk.check() == 0

    assert (
        desk.said("approvals")
        == {
            "manual": ["ok: manual: every dangerous command asks you"],
            "smart": ["ok: smart: a model of Hermes's lets pass what it finds harmless, the rest asks you"],
            "off": [
                "warning: off: nothing asks you, and what was misheard is done;"
                " set approvals.mode to smart or manual in Hermes's config.yaml"
            ],
            "odd": ["warning: odd: not known here; see Hermes's documentation"],
        }[mode]
    )


@pytest.mark.parametrize(
    ("timeout", "seconds", "told"),
    [
        (None, 0, None),
        (300, 0, None),
        (90, 90, None),
        ("soon", 0, None),
        (90, 0, "Hermes's approvals.timeout is 90, approval_seconds is 0; set approval_seconds to 90"),
        (600, 90, "Hermes's approvals.timeout is 600, approval_seconds is 90; set approval_seconds to 600"),
        (
            None,
            90,
            "Hermes's approvals.timeout is not set, approval_seconds is 90; set approval_seconds to 0",
        ),
    ],
)
def test_how_long_hermes_waits_for_an_answer_is_compared(desk, timeout, seconds, told):
    line = f"  timeout: {timeout}\n" if timeout else ""
    desk.write(".hermes/config.yaml", f"timeout: 7\napprovals:\n  mode: manual\n{line}")

    assert desk.check(config=desk.write("config.json", json.dumps({"approval_seconds": seconds}))) == 0

    assert desk.said("approvals")[1:] == ([f"warning: {told}"] if told else [])


def test_the_settings_of_this_computers_hermes_say_nothing_about_another_one(desk):
    desk.write(".hermes/config.yaml", "approvals:\n  mode: off\n")

    desk.check(hermes_url="http://192.0.2.1:9", listen="127.0.0.1:0")

    assert desk.said("approvals") == ["ok: cannot be seen from here; Hermes's default is smart"]


# ---- OpenAI ------------------------------------------------------------------


def test_openai_refuses_a_wrong_key(desk):
    assert desk.check(openai_key_file=desk.write("wrong", "sk-not-the-key-of-anybody")) == 1

    assert desk.said("OpenAI") == ["problem: refused the API key (HTTP 401); check the OpenAI key file"]


def test_a_wrong_model_is_named(desk):
    assert desk.check(config=desk.write("config.json", '{"model": "gpt-live-l"}')) == 1

    assert desk.said("OpenAI") == [
        "problem: does not show gpt-live-l to this key; set model to gpt-live-1 or gpt-live-1.1"
    ]


@pytest.mark.parametrize(
    ("mishap", "said"),
    [
        (
            "model_not_found",
            "This OpenAI key may not use the voice model (HTTP 403);"
            " check the project's access to gpt-live-1",
        ),
        (
            "insufficient_quota",
            "The OpenAI account has no credit left, or billing is off (HTTP 429);"
            " top it up, then start again",
        ),
        ("rate_limit", "is limiting calls (HTTP 429); try again in 7 seconds"),
        ("server_error", "has trouble at the moment (HTTP 500); try again in a minute"),
        ("nonsense", "gave an answer that makes no sense here; check that its address is right, or look for a"
         " newer hermes-voice"),
        ("redirect", "gave an answer that makes no sense here; check that its address is right, or look for a"
         " newer hermes-voice"),
    ],
)  # fmt: skip
def test_what_openai_answers_is_told_in_our_words(desk, openai, mishap, said):
    openai.fail_next(mishap, on="models")

    assert desk.check() == 1

    assert desk.said("OpenAI") == [f"problem: {said}"]


def test_a_wrong_address_of_openai_is_told(desk, openai):
    assert desk.check(openai_base_url=openai.url.removesuffix("/v1")) == 1

    (said,) = desk.said("OpenAI")
    assert said.startswith("problem: ")
    assert "401" not in said


# ---- clock -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (3600, r"warning: 3(5[89]|60)\d s behind that of Hermes"),
        (-300, r"warning: (299|3[0-4]\d) s ahead of that of Hermes"),
    ],
)
def test_a_clock_that_is_wrong_is_told(home, capsys, openai, ahead, said):
    with scripted_hermes(headers={"Date": formatdate(time.time() + ahead, usegmt=True)}) as hermes:
        desk = Desk(home, capsys, hermes, openai)

        assert desk.check() == 0

    (line,) = desk.said("clock")
    assert re.fullmatch(said + "; let this computer keep time with NTP", line)


def test_a_date_that_is_none_says_nothing(home, capsys, openai):
    with scripted_hermes(headers={"Date": "tomorrow"}) as hermes:
        desk = Desk(home, capsys, hermes, openai)

        assert desk.check() == 0

    assert desk.said("clock") == ["ok: agrees with OpenAI"]


# ---- what is not shown -------------------------------------------------------


def test_nobody_and_no_host_is_named(desk, monkeypatch, capsys):
    names = {
        "listen": "canary-nas:http",
        "hermes_url": "https://canary-hermes..example:1/canary",
        "openai_base_url": "https://canary-openai..example:1",
        "config": desk.write("config.json", '{"public_hosts": ["canary-voice.example"]}'),
        "access_token_file": "/home/canary-user/token",
        "state": "/Users/canary-user/state\x1b[31m",
    }

    for flag, value in (*names.items(), ("listen", "canary-nas..example:1"), ("hermes_url", "canary-host:1")):
        desk.check(**names | {flag: value})

        assert "canary" not in "\n".join(desk.lines)
        assert all(line.isprintable() for line in desk.lines)
        assert str(desk.folder) not in "\n".join(desk.lines)


def test_what_an_upstream_says_is_not_shown(home, capsys, openai):
    with ScriptedHermes({("GET", "/health"): [reply(200, HEALTH)]}) as hermes:
        hermes.add("GET", "/v1/capabilities", reply(500, {"error": {"message": "canary of 198.51.100.7"}}))
        desk = Desk(home, capsys, hermes, openai)

        assert desk.check() == 1

    assert desk.said("Hermes") == ["problem: ran into an error (HTTP 500); its log says why"]


def test_a_key_in_the_wrong_place_is_not_shown(desk, hermes):
    assert desk.check(config=desk.write("config.json", json.dumps({hermes.key: 1}))) == 1

    (said,) = desk.said("config")
    assert said.startswith("problem: --config ~/config.json: unknown key '•••'; known keys: model, ")


def test_a_host_that_is_no_name_is_not_shown(desk):
    desk.check(config=desk.write("config.json", '{"public_hosts": ["http://canary.example"]}'))

    assert desk.said("config") == [
        "problem: --config ~/config.json: 'public_hosts' holds a wrong one;"
        " give bare names without scheme, port or wildcard"
    ]


@pytest.mark.parametrize("folder", ["/", ""])
def test_a_home_that_is_no_folder_of_a_user_spoils_no_address(desk, monkeypatch, folder):
    monkeypatch.setenv("HOME", folder)

    desk.check(openai_key_file=None)

    assert "make one at https://platform.openai.com/api-keys, " in desk.said("OpenAI key")[0]


def test_a_check_that_fails_is_told_and_the_others_go_on():
    def check(_):
        yield hermes_voice.OK, "first", ""
        raise ZeroDivisionError("canary")

    checkup = hermes_voice.Checkup(hermes_voice.parse_arguments([]), os.environ)

    first, second = checkup._examine("subject", check)

    assert first.text == "first"
    assert (second.level, second.text) == ("problem", "the check itself failed: ZeroDivisionError")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("not valid for 'Agent.example.org'", "not valid for 'Hermes's host'"),
        ("not valid for 'fd00::1' or api.openai.com", "not valid for 'your address' or api.openai.com"),
        ("subagent.example.org", "subagent.example.org"),
        ("at 198.51.100.7: no", "at (an address): no"),
        ("at 127.0.0.1: no", "at 127.0.0.1: no"),
        ("version 0.22.2.post1", "version 0.22.2.post1"),
        ("key sk-0123456789abcdef0123", "key •••"),
        ("/home/somebody/key", "/home/.../key"),
        ("a\nb\x1b[31m", "a b [31m"),
    ],
)
def test_texts_are_made_fit_for_everybody(text, shown):
    def check(_):
        yield hermes_voice.OK, text, ""

    argv = ["--hermes-url", "https://agent.example.org", "--listen", "[fd00::1]:1"]
    checkup = hermes_voice.Checkup(hermes_voice.parse_arguments(argv), os.environ)

    (finding,) = checkup._examine("subject", check)

    assert finding.text == shown
