"""Running it for good: settings read again, what systemd is told, and the unit file."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from pathlib import Path

import pytest
from scripted_hermes import ScriptedHermes, reply
from test_command import KEYS, SCRIPT, Process, flags, nothing_of_this_machine, write  # noqa: F401, fixtures

from hermes_voice import Server, notify, serve_until, watchdog_seconds

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "hermes-voice.service"
README = (ROOT / "README.md").read_text()
TIMEOUT = 10  # seconds


class Manager:
    """What a real systemd would hear, on a socket of its own."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0"))
        self.socket.settimeout(TIMEOUT)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.socket.close()

    def hear(self):
        return self.socket.recv(4096).decode()

    def hear_the_last(self):
        """Hear what is under way, until nothing has come for several times as long as it should."""
        self.socket.settimeout(1)
        until = time.monotonic() + TIMEOUT
        with contextlib.suppress(TimeoutError):
            while self.hear() == "WATCHDOG=1":
                assert time.monotonic() < until, "it goes on"
        self.socket.settimeout(TIMEOUT)


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    address = str(tmp_path / "notify") if request.param == "path" else f"@hermes-voice-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with Manager(address) as manager:
        yield manager


def hung_up(sidecar):
    """Send SIGHUP and wait until its consequence is logged. Return what was logged of it."""
    before = len(sidecar.lines)
    sidecar.process.send_signal(signal.SIGHUP)
    return sidecar.wait_log(r"server\.reloaded|reload\.refused", before)


# ---- systemd -----------------------------------------------------------------


def test_systemd_is_told_what_a_process_does(flags, manager, tmp_path):  # noqa: F811
    with Process(flags(), tmp_path) as sidecar:
        assert manager.hear() == "READY=1"
        assert sidecar.get("healthz")

        hung_up(sidecar)
        reloading, microseconds = manager.hear().split("\nMONOTONIC_USEC=")
        assert reloading == "RELOADING=1"
        assert int(microseconds) > 0
        assert manager.hear() == "READY=1"

        assert sidecar.stop(signal.SIGTERM) == 0
        assert manager.hear() == "STOPPING=1"
    assert "Traceback" not in sidecar.log


def test_a_reload_that_is_refused_ends_for_systemd_as_well(flags, write, manager, tmp_path):  # noqa: F811
    config = write("config.json", "{}")
    with Process(flags(config=config), tmp_path) as sidecar:
        assert manager.hear() == "READY=1"
        write("config.json", "nonsense")

        hung_up(sidecar)

        assert manager.hear().startswith("RELOADING=1\n")
        assert manager.hear() == "READY=1"


def test_the_watchdog_hears_a_process_that_lives(flags, manager, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    with Process(flags(), tmp_path):
        assert [manager.hear() for _ in range(3)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]


@pytest.mark.parametrize("stuck", ["lock", "accept"])
def test_the_watchdog_hears_nothing_of_a_server_that_is_stuck(bench, tmp_path, caplog, stuck):
    with Manager(str(tmp_path / "notify")) as manager:
        app = bench().app
        server = Server(("127.0.0.1", 0), app, {})
        told = threading.Event()
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        thread = threading.Thread(target=serve_until, args=(server, told.wait, environ), daemon=True)
        thread.start()
        assert [manager.hear() for _ in range(2)] == ["READY=1", "WATCHDOG=1"]
        held = threading.Event()
        if stuck == "accept":
            server.process_request = lambda *_: held.wait()
            client = socket.create_connection(server.server_address)
        else:
            app.changed.acquire()

        manager.hear_the_last()

        if stuck == "accept":
            held.set()
            client.close()
        else:
            app.changed.release()
        assert manager.hear() == "WATCHDOG=1"
        told.set()
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert f"server.stuck lock={'held' if stuck == 'lock' else 'free'}" in caplog.text


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 0),
        ({"WATCHDOG_USEC": "30000000"}, 15),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 15),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
        ({"WATCHDOG_USEC": "0"}, 0),
    ],
)
def test_the_watchdog_is_told_twice_in_its_time(environ, seconds):
    assert watchdog_seconds(environ, 7) == seconds


def test_without_a_listening_systemd_nothing_is_told_and_nothing_fails(tmp_path):
    notify({}, "READY=1")
    notify({"NOTIFY_SOCKET": str(tmp_path / "nobody")}, "READY=1")


@pytest.fixture(scope="module")
def systemd_analyze(systemd_analyze_path):
    def run(*words):
        return subprocess.run([systemd_analyze_path, *words, UNIT], capture_output=True, text=True)

    return run


def test_systemd_finds_nothing_wrong_with_the_unit(systemd_analyze):
    found = systemd_analyze("verify")

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_systemd_finds_nothing_wrong_with_the_readme_s_https(systemd_analyze_path, tmp_path):
    (more,) = re.findall(r"```\n(\[Service\]\n.*?)```", README, re.DOTALL)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text() + more)

    found = subprocess.run([systemd_analyze_path, "verify", unit], capture_output=True, text=True)

    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_the_unit_exposes_little(systemd_analyze):
    found = systemd_analyze("security", "--offline=true", "--threshold=20", "--no-pager")

    assert found.returncode == 0, found.stdout


def test_the_unit_says_what_the_process_does():
    unit = UNIT.read_text()

    for line in ("Type=notify", "NotifyAccess=main", "WatchdogSec=30", "ExecReload=/bin/kill -HUP $MAINPID"):
        assert f"\n{line}\n" in unit


# ---- settings read again -----------------------------------------------------


@contextlib.contextmanager
def settled(flags, write, tmp_path):  # noqa: F811
    """A process with every setting in a file, and the OpenAI that it speaks to."""
    config = write("config.json", json.dumps({"voice": "cedar"}))
    token = write("token", KEYS["access-token"])
    write("page/index.html", "the first page")
    with ScriptedHermes() as openai:
        openai.add("POST", "/live/sessions", reply(401, "no"))
        argv = flags(
            config=config, access_token_file=token, static=str(tmp_path / "page"), openai_base_url=openai.url
        )
        with Process(argv, tmp_path) as sidecar:
            yield sidecar, openai
            assert sidecar.stop(signal.SIGTERM) == 0
        assert "Traceback" not in sidecar.log


def voice(sidecar, token):
    return json.loads(sidecar.get("config", Authorization=f"Bearer {token}"))["voice"]


def key_shown(sidecar, openai, token):
    """The key that OpenAI is shown for a call."""
    before = len(openai.seen)
    call = {"sdp": "v=0\r\nm=audio 9\r\n"}
    with contextlib.suppress(urllib.error.HTTPError):
        sidecar.post("session", call, Authorization=f"Bearer {token}").close()
    (seen,) = openai.seen[before:]
    return seen.headers["Authorization"]


def test_a_hangup_signal_reads_everything_again(flags, write, tmp_path):  # noqa: F811
    with settled(flags, write, tmp_path) as (sidecar, openai):
        assert voice(sidecar, KEYS["access-token"]) == "cedar"
        with pytest.raises(urllib.error.HTTPError, match="421"):
            sidecar.get("", Host="voice.example.org")
        write("config.json", json.dumps({"voice": "marin", "public_hosts": ["voice.example.org"]}))
        write("token", "another-access-token")
        write("openai-key", "another-openai-key")
        write("page/index.html", "the second page")
        write("page/more.js", "more")

        logged = hung_up(sidecar)

        assert "server.reloaded token=needed" in logged
        assert voice(sidecar, "another-access-token") == "marin"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            voice(sidecar, KEYS["access-token"])
        assert sidecar.get("", Host="voice.example.org") == b"the second page"
        assert sidecar.get("more.js") == b"more"
        assert key_shown(sidecar, openai, "another-access-token") == "Bearer another-openai-key"


SPOILS = {
    "config.json": ("{", "is not JSON"),
    "token": ("short", "too short"),
    "openai-key": ("", "is empty"),
    "hermes-key": ("two words and more", "one secret on one line"),
    "page/index.html": (None, "holds no index.html"),
}


@pytest.mark.parametrize("name", SPOILS)
def test_whatever_is_wrong_everything_stays_as_it_was(flags, write, tmp_path, name):  # noqa: F811
    with settled(flags, write, tmp_path) as (sidecar, openai):
        good = {
            "config.json": json.dumps({"voice": "marin", "public_hosts": ["voice.example.org"]}),
            "token": "another-access-token",
            "openai-key": "another-openai-key",
            "hermes-key": "another-hermes-key",
            "page/index.html": "the second page",
        }
        for other, text in good.items():
            write(other, text)
        text, said = SPOILS[name]
        write(name, text) if text is not None else (tmp_path / name).unlink()

        logged = hung_up(sidecar)

        assert re.search(r"WARN\w* +reload\.refused", logged)
        assert said in logged
        token = KEYS["access-token"]
        assert voice(sidecar, token) == "cedar"
        assert sidecar.get("") == b"the first page"
        assert key_shown(sidecar, openai, token) == f"Bearer {KEYS['openai-key']}"
        with pytest.raises(urllib.error.HTTPError, match="421"):
            sidecar.get("", Host="voice.example.org")

        for other, text in good.items():
            write(other, text)
        assert "server.reloaded" in hung_up(sidecar)
        assert voice(sidecar, "another-access-token") == "marin"


def test_a_reload_names_every_problem(flags, write, tmp_path):  # noqa: F811
    with settled(flags, write, tmp_path) as (sidecar, _):
        write("config.json", '{"voise": "marin", "idle_seconds": 1}')
        write("token", "")

        sidecar.process.send_signal(signal.SIGHUP)

        for problem in ("voise", "idle_seconds", "is empty"):
            sidecar.wait_log(rf"reload\.refused.*{problem}")


def test_a_token_that_is_gone_does_not_open_the_server(flags, write, monkeypatch, tmp_path):  # noqa: F811
    write("credentials/access-token", KEYS["access-token"])
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    with Process(flags(), tmp_path) as sidecar:
        (tmp_path / "credentials" / "access-token").unlink()

        assert "the access token is gone" in hung_up(sidecar)

        with pytest.raises(urllib.error.HTTPError, match="401"):
            sidecar.get("config")


def test_a_process_ends_with_the_terminal_that_it_runs_in(flags, tmp_path):  # noqa: F811
    """Its log has gone with the window, and nobody would know that it still runs."""
    ours, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, SCRIPT, *flags()], cwd=tmp_path, stderr=theirs)
    os.close(theirs)
    text = b""
    while b"server.listening" not in text:
        text += os.read(ours, 4096)

    os.close(ours)
    process.send_signal(signal.SIGHUP)

    try:
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
