"""A real Hermes gateway with a scripted model and a throw-away home. Standard library only.

    with HermesGateway(find_hermes()["0.22.2"]) as gateway:
        gateway.call("POST", "/v1/runs", {"input": "Tidy up. [[danger]]"})

By hand, to try something against a real Hermes:

    python tests/hermes_gateway.py --version 0.22.2

prints one line of JSON with the URL and the key, and runs until SIGTERM or Ctrl-C.

The gateway gets a minimal environment: no key of the caller leaks in, and its HTTP proxy
is a closed port, so that it cannot look anything up outside. It is loopback only, asks
before every dangerous command, and runs commands as the user who started it.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from scripted_model import NAME, SCENARIOS, ScriptedModel

# The oldest and the newest Hermes that hermes-voice is tested with.
VERSIONS = ("0.19.0", "0.22.2")
ENVIRONMENTS = Path(
    os.environ.get("HERMES_VOICE_TEST_ENVS") or Path(__file__).resolve().parents[1] / ".test-env"
)

# Seconds. A start takes two; on a busy machine it has taken fifteen.
START_TIMEOUT = 60
# Seconds. An idle gateway needs two to stop; one with a run would wait for it.
STOP_TIMEOUT = 5
# Seconds until a question runs out: enough to answer by voice on a busy machine, and a test
# that waits it out is not long.
APPROVAL_SECONDS = 20
PASSED_VARIABLES = ("LANG", "LC_ALL", "TZ", "TMPDIR")
# Nothing listens on the discard port.
NOWHERE = "http://127.0.0.1:9"


def find_hermes():
    """The Python of each Hermes version that is installed, by version."""
    pythons = {version: ENVIRONMENTS / f"hermes-{version}" / "bin" / "python" for version in VERSIONS}
    return {version: python for version, python in pythons.items() if python.exists()}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def descendants(pid):
    """The processes below one. Linux only, elsewhere none are found."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, ()))
    for child in found:  # Grows while it is walked.
        found += children.get(child, ())
    return found


class HermesGateway:
    """One `hermes gateway run` that serves its API and nothing else.

    `approvals` and `config` are sections added to its configuration.
    """

    def __init__(self, python, approvals=None, config=None):
        self.python = Path(python).absolute()  # Not resolved: a venv's python is a link.
        self.model = ScriptedModel()
        self.key = secrets.token_hex(24)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.version = None
        self.process = None
        self.root = Path(tempfile.mkdtemp(prefix="hermes-voice-"))
        self.home = self.root / "hermes-home"
        self.config = {
            "model": {
                "default": NAME,
                "provider": "custom",
                "base_url": self.model.url,
                "api_key": "scripted",
            },
            # By default an auxiliary model decides, and most questions never reach a client.
            "approvals": {"mode": "manual", **(approvals or {})},
            # The scanner would be downloaded on first use.
            "security": {"tirith_enabled": False},
            # A model that is down fails a run after seconds instead of five minutes.
            "agent": {"auto_recovery_cycles": 0},
        }
        for section, values in (config or {}).items():
            self.config[section] = {**self.config.get(section, {}), **values}

    def __enter__(self):
        for folder in (self.home, self.root / "user", self.root / "work"):
            folder.mkdir()
        # JSON is YAML too.
        (self.home / "config.yaml").write_text(json.dumps(self.config))
        self.model.__enter__()
        try:
            self.launch()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception):
        self.stop()

    def launch(self):
        """Start the process, again after a kill on the same port and home, and wait until it
        answers."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", "hermes_cli.main", "gateway", "run"],
                cwd=self.root / "work",
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for whoever started us.
            )
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.version = self.call("GET", "/health", timeout=2)[1]["version"]
                return
            except (OSError, ValueError):
                time.sleep(0.05)  # A process that starts has no event to wait for.
        log = self.log_path.read_text(errors="replace")
        raise RuntimeError(f"Hermes did not start; the end of its log:\n{log[-3000:]}")

    @property
    def log_path(self):
        return self.root / "gateway.log"

    def environment(self):
        """All that the gateway is told besides its configuration."""
        return {
            **{name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(self.root / "user"),
            "HERMES_HOME": str(self.home),
            "API_SERVER_ENABLED": "true",
            "API_SERVER_HOST": "127.0.0.1",
            "API_SERVER_PORT": str(self.port),
            "API_SERVER_KEY": self.key,
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1,localhost",
            "PYTHONUNBUFFERED": "1",
        }

    def kill(self):
        """Crash it and what it runs. Its home stays, so that `launch` brings it back."""
        self._end(signal.SIGKILL)

    def stop(self):
        """End it and its model, and remove its home. Safe to call twice."""
        if self.process:
            self._end(signal.SIGTERM)
        self.model.__exit__()
        shutil.rmtree(self.root, ignore_errors=True)

    def _end(self, signum):
        # A gateway that is killed leaves its commands running.
        commands = descendants(self.process.pid)
        self.process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT)
        # Signals to a process that has been waited for are not sent.
        self.process.kill()
        for pid in commands:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def call(self, method, path, payload=None, timeout=30):
        """Make one request. Return the status and the JSON, or text, of the answer."""
        try:
            with self._open(method, path, payload, timeout) as response:
                status, body = response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                status, body = error.code, error.read()
        try:
            return status, json.loads(body)
        except ValueError:
            return status, body.decode("utf-8", "replace")

    def events(self, run_id):
        """Follow a run: yield its events until it is over. Only one may follow a run before
        0.22."""
        with self._open("GET", f"/v1/runs/{run_id}/events", None, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def _open(self, method, path, payload, timeout):
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if payload is None else json.dumps(payload).encode(),
            headers={"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(request, timeout=timeout)

    def warm_up(self):
        """Make one run, which imports the agent: two seconds in which nothing is answered."""
        _, started = self.call("POST", "/v1/runs", {"input": "Hello", "session_id": "warm-up"})
        for _event in self.events(started["run_id"]):
            pass


def main():
    parser = argparse.ArgumentParser(
        description="Run a real Hermes gateway with a scripted model.",
        epilog="Directives in a request, as in [[slow delay=1]]:\n"
        + "".join(f"  {name:12}{' '.join(f.__doc__.split())}\n" for name, f in SCENARIOS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found = find_hermes()
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[-1])
    parser.add_argument("--approval-timeout", type=int, default=60, metavar="SECONDS")
    args = parser.parse_args()
    if args.version not in found:
        parser.error(f"no Hermes {args.version} in {ENVIRONMENTS}; python3 tests/run.py gets it")

    done = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: done.set())
    approvals = {"timeout": args.approval_timeout}
    with HermesGateway(found[args.version], approvals) as gateway:
        gateway.warm_up()
        told = {name: getattr(gateway, name) for name in ("url", "key", "version")}
        told |= {"model": gateway.model.url, "home": str(gateway.home)}
        print(json.dumps(told | {"pid": gateway.process.pid}), flush=True)
        done.wait()


if __name__ == "__main__":
    main()
