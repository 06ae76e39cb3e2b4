"""The command: what it says when it cannot start, and a real process from start to stop."""

import contextlib
import http.client
import json
import logging
import os
import pty
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from scripted_hermes import ScriptedHermes, reply
from working_hermes import WorkingHermes

import hermes_voice

SCRIPT = Path(hermes_voice.__file__).resolve()
START_SECONDS = 20
STOP_SECONDS = 5  # what is promised for SIGTERM
KEYS = {
    "openai-key": "canary-openai-key",
    "hermes-key": "canary-hermes-key",
    "access-token": "canary-access-token",
}


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path):
    """No Hermes of this machine is found, and the log is as it was afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("HERMES_HOME", "CREDENTIALS_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("hermes_voice")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate, logger.level = before


@pytest.fixture
def write(tmp_path):
    """A function: write a file that only its owner can read, and return its path."""

    def write(name, text, mode=0o600):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return str(path)

    return write


@pytest.fixture
def flags(write):
    """A function: the arguments of a start that works, with some of them replaced (None: left out)."""

    def flags(**others):
        given = {
            "--listen": "127.0.0.1:0",
            "--hermes-key-file": write("hermes-key", KEYS["hermes-key"] + "\n"),
            "--openai-key-file": write("openai-key", KEYS["openai-key"] + "\n"),
        } | {f"--{name.replace('_', '-')}": value for name, value in others.items()}
        return [part for flag, value in given.items() if value is not None for part in (flag, value)]

    return flags


# ---- what is wrong -----------------------------------------------------------


def refused(capsys, argv):
    """The problems that a start reports, one line each."""
    assert hermes_voice.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert all(line.startswith("hermes-voice: error: ") for line in lines)
    return [line.removeprefix("hermes-voice: error: ") for line in lines]


BAD_FLAGS = [
    ({"listen": "127.0.0.1:http"}, "--listen '127.0.0.1:http'"),
    ({"listen": "127.0.0.1:70000"}, "--listen '127.0.0.1:70000'"),
    ({"listen": "8790"}, "--listen '8790'"),
    ({"listen": "no..such..host:0", "access_token_file": "TOKEN"}, "--listen no..such..host:0"),
    ({"listen": "0.0.0.0:8790"}, "--access-token-file"),
    ({"listen": "[::]:8790"}, "--access-token-file"),
    ({"listen": "192.0.2.1:8790"}, "--access-token-file"),
    ({"listen": "voice.example:8790"}, "--access-token-file"),
    ({"listen": "192.0.2.1:8790", "access_token_file": "TOKEN"}, "--listen 192.0.2.1:8790: Cannot assign"),
    ({"hermes_url": "localhost:8642"}, "--hermes-url 'localhost:8642'"),
    ({"hermes_url": "ftp://localhost"}, "--hermes-url 'ftp://localhost'"),
    ({"hermes_url": "http://"}, "--hermes-url 'http://'"),
    ({"hermes_url": "http://localhost:port"}, "--hermes-url"),
    ({"hermes_url": "http://me:canary-secret@localhost"}, "--hermes-url: the URL must hold no user name"),
    ({"openai_base_url": "api.openai.com/v1"}, "--openai-base-url"),
    ({"openai_base_url": "https://api.openai.com/v1?key=canary-secret"}, "--openai-base-url: the URL must"),
    ({"hermes_key_file": "/no/such/file"}, "--hermes-key-file /no/such/file: cannot be read"),
    ({"hermes_key_file": "/"}, "--hermes-key-file /: cannot be read"),
    ({"openai_key_file": "/no/such/file"}, "--openai-key-file /no/such/file: cannot be read"),
    ({"access_token_file": "/no/such/file"}, "--access-token-file /no/such/file: cannot be read"),
    ({"config": "/no/such/file"}, "--config /no/such/file: cannot be read"),
    ({"static": "/no/such/folder"}, "--static /no/such/folder: cannot be read"),
    ({"static": "EMPTY"}, "holds no index.html"),
    ({"static": "TOKEN"}, "--static"),
]


@pytest.mark.parametrize(("others", "named"), BAD_FLAGS, ids=lambda value: str(value)[:60])
def test_a_flag_that_makes_no_sense_is_named(capsys, flags, write, tmp_path, others, named):
    (tmp_path / "empty").mkdir()
    paths = {"TOKEN": write("token", KEYS["access-token"]), "EMPTY": str(tmp_path / "empty")}

    (problem,) = refused(capsys, flags(**{name: paths.get(value, value) for name, value in others.items()}))

    assert named in problem
    assert "canary" not in problem


BAD_SECRETS = [
    ("", 0o600, "is empty"),
    ("\n", 0o600, "is empty"),
    ("canary-short", 0o600, "too short"),
    ("canary-on-line-one\ncanary-on-line-two", 0o600, "one secret on one line"),
    ("canary with some spaces", 0o600, "one secret on one line"),
    ("canary-schl\u00fcssel-key", 0o600, "one secret on one line"),
    ("canary-" * 1000, 0o600, "one secret on one line"),
    (b"canary-\xff\xfe-no-text-at-all", 0o600, ""),
    ("canary-for-all-to-read", 0o644, "chmod 600"),
    ("canary-for-all-to-write", 0o602, "chmod 600"),
]


@pytest.mark.parametrize("flag", KEYS)
@pytest.mark.parametrize(("text", "mode", "said"), BAD_SECRETS, ids=[row[2] for row in BAD_SECRETS])
def test_a_secret_that_is_not_fit_for_use_is_refused_unseen(capsys, flags, write, flag, text, mode, said):
    path = write("secret", text, mode)

    (problem,) = refused(capsys, flags(**{f"{flag}_file": path}))

    assert problem.startswith(f"--{flag}-file {path}: ")
    assert said in problem
    assert "canary" not in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"modle": "gpt-live-1"}', "did you mean 'model'?"),
        ('{"idle_seconds": "300"}', "'idle_seconds' must be a whole number"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(capsys, flags, write, text, said):
    path = write("config.json", text)

    (problem,) = refused(capsys, flags(config=path))

    assert problem.startswith(f"--config {path}: ")
    assert said in problem


def test_everything_that_is_wrong_is_told_at_once(capsys, write):
    config = write("config.json", '{"modle": "x", "idle_seconds": 1}')

    problems = refused(
        capsys,
        [
            *("--listen", "0.0.0.0:1", "--hermes-url", "nonsense", "--openai-base-url", "nonsense"),
            *("--hermes-key-file", write("short", "x"), "--config", config, "--static", "/no/such/folder"),
        ],
    )

    named = "modle idle_seconds hermes-url openai-base-url openai-key hermes-key --static --listen"
    assert len(problems) == len(named.split())
    for problem, name in zip(problems, named.split(), strict=True):
        assert name in problem


def test_a_missing_key_is_told_with_both_ways_to_give_it(capsys, flags, tmp_path):
    (problem,) = refused(capsys, flags(openai_key_file=None))

    assert "--openai-key-file" in problem
    assert f"{tmp_path}/home/.hermes/.env holds no OPENAI_API_KEY" in problem


def test_a_port_that_is_taken_is_told(capsys, flags):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"

        (problem,) = refused(capsys, flags(listen=listen))

    assert problem == f"--listen {listen}: the port is taken; is it running already?"


@pytest.mark.parametrize(
    "argv", [["--no-such-flag"], ["nonsense"], ["--listen"], ["--openai-key", "canary-openai-key"]]
)
def test_an_unknown_argument_is_an_error_and_no_exception(capsys, argv):
    assert hermes_voice.main(argv) == 2

    assert "hermes-voice: error: " in capsys.readouterr().err


def test_the_version_is_told(capsys):
    assert hermes_voice.main(["--version"]) == 0

    assert capsys.readouterr().out == f"hermes-voice {hermes_voice.__version__}\n"


def test_the_help_names_every_flag(capsys):
    assert hermes_voice.main(["--help"]) == 0

    helped = capsys.readouterr().out
    for flag in ("listen", "hermes-url", "openai-base-url", "config", "static", "version"):
        assert f"--{flag}" in helped
    for name in KEYS:
        assert f"--{name}-file" in helped


# ---- what is found -----------------------------------------------------------


def built(argv, **environ):
    """The server that would start, and its warnings."""
    server, warnings = hermes_voice.build_server(hermes_voice.parse_arguments(argv), environ)
    server.server_close()
    return server, warnings


def keys_of(argv, **environ):
    """The keys that upstreams are shown, and the token that the page must show."""
    with ScriptedHermes() as upstream:
        server, _ = built([*argv, "--hermes-url", upstream.url, "--openai-base-url", upstream.url], **environ)
        for client in (server.app.openai, server.app.hermes):
            client.call("GET", "/")
        shown = [seen.headers["Authorization"].removeprefix("Bearer ") for seen in upstream.seen]
    return {"openai-key": shown[0], "hermes-key": shown[1], "access-token": server.app.access}


LOOSE = {"listen": None, "hermes_key_file": None, "openai_key_file": None}
DOTENV = """
# Hermes's own
OPENAI_API_KEY=an-older-openai-key
export OPENAI_API_KEY="canary-openai-key" # this one
API_SERVER_KEY='canary-hermes-key'
"""


def test_secrets_are_read_from_the_files_that_are_named(flags, write):
    token = write("token", KEYS["access-token"] + "\r\n")

    assert keys_of(flags(access_token_file=token)) == KEYS


def test_secrets_are_found_where_systemd_puts_them(write, tmp_path):
    for name, secret in KEYS.items():
        write(f"credentials/{name}", secret, 0o400)

    found = keys_of(["--listen", "127.0.0.1:0"], CREDENTIALS_DIRECTORY=str(tmp_path / "credentials"))

    assert found == KEYS


@pytest.mark.parametrize("name", ["HERMES_HOME", "HOME"])
def test_keys_are_found_in_hermes_s_env(write, tmp_path, name):
    write("here/.env" if name == "HERMES_HOME" else "here/.hermes/.env", DOTENV)

    found = keys_of(["--listen", "127.0.0.1:0"], **{name: str(tmp_path / "here")})

    assert found == KEYS | {"access-token": None}


def test_a_flag_goes_before_what_is_found(flags, write, tmp_path):
    write("credentials/openai-key", "canary-of-systemd")
    write("here/.env", DOTENV.replace("canary-hermes-key", "canary-of-hermes"))

    found = keys_of(
        flags(), CREDENTIALS_DIRECTORY=str(tmp_path / "credentials"), HERMES_HOME=str(tmp_path / "here")
    )

    assert found == KEYS | {"access-token": None}


def test_a_voice_that_is_not_known_is_warned_about(flags, write):
    _, warnings = built(flags(config=write("config.json", '{"voice": "cedra"}')))

    (warning,) = warnings
    assert "did you mean 'cedar'?" in warning


@pytest.mark.parametrize("token", [True, False])
def test_public_hosts_without_a_token_are_warned_about(flags, write, token):
    config = write("config.json", '{"public_hosts": ["voice.example.org"]}')
    given = {"access_token_file": write("token", KEYS["access-token"])} if token else {}

    _, warnings = built(flags(config=config, **given))

    assert ["without an access token" in warning for warning in warnings] == [True] * (not token)


def test_the_page_lies_beside_the_script(flags):
    server, _ = built(flags())

    assert server.page["/"][1] == (SCRIPT.parent / "static" / "index.html").read_bytes()


def test_another_page_can_be_served(flags, write, tmp_path):
    write("page/index.html", "another page")

    server, _ = built(flags(static=str(tmp_path / "page")))

    assert server.page["/"] == ("text/html; charset=utf-8", b"another page")


def test_a_start_asks_no_name_server_for_its_own_name(flags, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getfqdn", asked.append)

    built(flags())

    assert asked == []


# ---- a process ---------------------------------------------------------------


class Process:
    """The command as a process of its own. `log` is what it has written."""

    def __init__(self, argv, folder):
        self.lines = []
        self.logged = threading.Condition()
        self.listening = threading.Event()
        self.url = None
        environ = os.environ | {"PYTHONDEVMODE": "1"}
        command = [sys.executable, str(SCRIPT), *argv]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def __enter__(self):
        assert self.listening.wait(START_SECONDS), self.log
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()

    def read(self):
        for line in self.process.stdout:
            with self.logged:
                self.lines.append(line)
                self.logged.notify_all()
            if found := re.search(r"server\.listening url=(\S+)", line):
                self.url = found[1]
            if "server.listening" in line:
                self.listening.set()
        self.listening.set()

    @property
    def log(self):
        return "".join(self.lines)

    def wait_log(self, pattern, before=0):
        """Wait until a line after the first `before` matches. Return those lines."""

        def found():
            return re.search(pattern, "".join(self.lines[before:]))

        with self.logged:
            assert self.logged.wait_for(found, START_SECONDS), self.log
            return "".join(self.lines[before:])

    def stop(self, number):
        """Send a signal. Return the exit code."""
        began = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(STOP_SECONDS)
        assert time.monotonic() - began < STOP_SECONDS
        self.reader.join()
        return code

    def post(self, path, body, **headers):
        """The answer to a body, to be read as it comes."""
        headers |= {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=STOP_SECONDS)

    def get(self, path, **headers):
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=STOP_SECONDS) as answer:
            return answer.read()


def test_a_process_serves_until_it_is_told_to_stop(flags, write, tmp_path):
    token = write("token", KEYS["access-token"])
    with contextlib.ExitStack() as stack:
        hermes = stack.enter_context(WorkingHermes())
        openai = stack.enter_context(ScriptedHermes())
        openai.add("POST", "/live/sessions", reply(401, f"no such key: {KEYS['openai-key']}"))
        upstreams = {"hermes_url": hermes.url, "openai_base_url": openai.url}
        sidecar = stack.enter_context(Process(flags(access_token_file=token, **upstreams), tmp_path))
        first, second = sidecar.lines[:2]
        starting = rf"INFO    server\.starting version={hermes_voice.__version__}\n"
        assert re.fullmatch(rf"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ {starting}", first)
        assert "server.listening url=http://127.0.0.1:" in second
        assert "token=needed" in second
        assert b"<html" in sidecar.get("")
        assert json.loads(sidecar.get("healthz")) == {"status": "ok"}

        connection = http.client.HTTPConnection("127.0.0.1", int(sidecar.url.split(":")[2][:-1]), timeout=10)
        stack.callback(connection.close)
        headers = {"Authorization": f"Bearer {KEYS['access-token']}", "Content-Type": "application/json"}
        call = json.dumps({"sdp": "v=0\r\nm=audio 9\r\n"})
        connection.request("POST", "/session", call, headers)
        assert connection.getresponse().read().startswith(b'{"error": {"code": "openai_key_refused"')
        body = {"hermes_session": "c1", "lines": [{"speaker": "user", "text": "Work."}]}
        connection.request("POST", "/delegate", json.dumps(body), headers)
        stream = connection.getresponse()
        run = hermes.run()
        run.emit("tool.started", tool="terminal", preview="ls")
        while b'"tool"' not in stream.readline():
            pass

        assert sidecar.stop(signal.SIGTERM) == 0

        assert json.loads(stream.read().splitlines()[-1])["code"] == "closing"
        assert run.stops == 0
        assert "server.stopped" in sidecar.lines[-1]
    assert "Traceback" not in sidecar.log
    assert all(secret not in sidecar.log for secret in KEYS.values())


def test_a_full_disk_takes_no_task_down(flags, tmp_path):
    """From some moment on no file may grow, so every write of the journal fails."""
    with contextlib.ExitStack() as stack:
        hermes = stack.enter_context(WorkingHermes())
        state = str(tmp_path / "state")
        sidecar = stack.enter_context(Process(flags(hermes_url=hermes.url, state=state), tmp_path))
        body = {"hermes_session": "c1", "lines": [{"speaker": "user", "text": "Work."}]}
        first = sidecar.post("delegate", body)
        hermes.run(1).emit("tool.started", tool="terminal")

        resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        hermes.run(1).end("completed", output="Done all the same.")
        second = sidecar.post("delegate", body)
        hermes.run(2).end("completed", output="And once more.")

        for stream, said in ((first, "Done all the same."), (second, "And once more.")):
            assert json.loads(stream.read().splitlines()[-1])["say"] == [said]
        assert sidecar.stop(signal.SIGTERM) == 0
    assert "journal.failed" in sidecar.log
    assert "Traceback" not in sidecar.log


@pytest.mark.parametrize("debug", [False, True])
def test_the_log_can_be_json_and_tell_all(flags, write, tmp_path, debug):
    config = write("config.json", '{"voice": "cedra"}')
    with Process([*flags(log="json", config=config), *(["--debug"] if debug else [])], tmp_path) as sidecar:
        sidecar.url = json.loads(sidecar.lines[2])["url"]
        sidecar.get("healthz?x=1")
        assert sidecar.stop(signal.SIGTERM) == 0

    lines = [json.loads(line) for line in sidecar.lines]
    events = [line["event"] for line in lines]
    assert all(list(line)[:3] == ["time", "level", "event"] for line in lines)
    answered = [line for line in lines if line["event"] == "request.answered"]
    assert [(line["level"], line["path"], line["status"]) for line in answered] == (
        [("DEBUG", "/healthz", 200)] if debug else []
    )
    assert events[:3] == ["server.starting", "config.warned", "server.listening"]
    assert events[-1] == "server.stopped"


def test_an_interrupt_ends_it_as_well(flags, tmp_path):
    with Process(flags(), tmp_path) as sidecar:
        assert "token=none" in sidecar.log

        assert sidecar.stop(signal.SIGINT) == 0

    assert "Traceback" not in sidecar.log


def test_it_listens_on_ipv6_and_prints_a_url_that_works(flags, tmp_path):
    with Process(flags(listen="[::1]:0"), tmp_path) as sidecar:
        assert sidecar.url.startswith("http://[::1]:")
        assert json.loads(sidecar.get("healthz")) == {"status": "ok"}

        assert sidecar.stop(signal.SIGTERM) == 0


def test_it_serves_everybody_who_has_the_token(flags, write, tmp_path):
    token = write("token", KEYS["access-token"])
    with Process(flags(listen="0.0.0.0:0", access_token_file=token), tmp_path) as sidecar:
        sidecar.url = sidecar.url.replace("0.0.0.0", "127.0.0.1")

        assert b'"version"' in sidecar.get("config", Authorization=f"Bearer {KEYS['access-token']}")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            sidecar.get("config")


def test_an_old_python_is_told():
    old = "import runpy, sys; sys.version_info = 3, 10; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", old, hermes_voice.__file__, "--version"]

    ended = subprocess.run(command, capture_output=True, text=True)

    assert ended.stderr == "hermes-voice: error: this Python is too old; it needs 3.11 or newer\n"
    assert (ended.stdout, ended.returncode) == ("", 1)


def test_a_process_that_cannot_start_says_why_and_ends_with_2(flags, tmp_path):
    sidecar = Process(flags(hermes_url="nonsense"), tmp_path)
    with sidecar:
        assert sidecar.process.wait(START_SECONDS) == 2
        sidecar.reader.join()

    assert sidecar.log.startswith("hermes-voice: error: --hermes-url 'nonsense': ")
    assert len(sidecar.lines) == 1


# ---- the README's first minute ----------------------------------------------


def test_the_block_with_the_key_is_one_paste(tmp_path):
    """Pasted whole into a terminal, it asks for the key and goes on with the server."""
    readme = (SCRIPT.parent / "README.md").read_text()
    (block,) = re.findall(r"```sh\n([^`]*> openai-key[^`]*)```", readme)
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "started with: $*."\n')
    stub.chmod(0o700)
    here, there = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "-i"],
        cwd=tmp_path,
        env={"PATH": f"{stub.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PS1": "$ "},
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
    )
    os.close(there)
    try:
        os.write(here, block.encode())
        read_until(here, "press Enter: ")
        os.write(here, b"sk-canary-key\n")
        shown = read_until(here, "started with")
        shown += read_until(here, ".\r\n") if "hermes_voice.py" not in shown else ""
    finally:
        shell.kill()
        shell.wait()
        os.close(here)

    assert "hermes_voice.py --openai-key-file openai-key" in shown
    key = tmp_path / "openai-key"
    assert key.read_text() == "sk-canary-key\n"
    assert key.stat().st_mode & 0o777 == 0o600


def read_until(terminal, wanted):
    """What a terminal shows up to some words. The block itself is echoed without a line's end behind them."""
    shown = ""
    while not re.search(f'(?<!\\\\){re.escape(wanted)}(?!")', shown):
        ready, _, _ = select.select([terminal], [], [], START_SECONDS)
        assert ready, f"nothing more after {shown!r}"
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown
