"""The sidecar as a real process, and the page it serves in a real browser.

with LiveService() as live, Sidecar(live, hermes.url, hermes.key) as sidecar:
    page = sidecar.open(browser)
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "hermes_voice.py"
START_SECONDS = 20
STOP_SECONDS = 5  # what DESIGN promises for SIGTERM

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP evil.example 127.0.0.1,MAP voice.home.arpa 127.0.0.1",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]

TOKEN = "access-token-for-tests"


class Sidecar:
    """A running hermes_voice.py on a free port. `log` is what it wrote so far."""

    def __init__(self, live, hermes_url, hermes_key, config=None, token=None):
        self.folder = tempfile.TemporaryDirectory(prefix="hermes-voice-")
        self.secrets = [live.key, hermes_key, *([token] if token else [])]
        self.command = [
            sys.executable,
            str(SCRIPT),
            *("--listen", "127.0.0.1:0", "--hermes-url", hermes_url, "--openai-base-url", live.url),
            *("--openai-key-file", self.write("openai-key", live.key)),
            *("--hermes-key-file", self.write("hermes-key", hermes_key)),
            *("--config", self.write("config.json", json.dumps(config or {}))),
            *("--state", f"{self.folder.name}/state"),
            *(("--access-token-file", self.write("token", token)) if token else ()),
        ]
        self.lines = []
        self.url = None

    def write(self, name, text):
        path = Path(self.folder.name) / name
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def __enter__(self):
        self.listening = threading.Event()
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()
        assert self.listening.wait(START_SECONDS), self.log
        return self

    def kill(self):
        """Crash it."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()

    def crash_and_start_again(self):
        """Crash it, and start it on the same port, as systemd would."""
        self.kill()
        self.command[3] = self.url.removeprefix("http://").rstrip("/")
        self.__enter__()

    def read_log(self):
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r'server\.listening url="?(http[^\s"]+)', line)
            if found:
                self.url = found[1]
                self.listening.set()

    def __exit__(self, *error):
        self.process.send_signal(signal.SIGTERM)
        try:
            # How quick it is, test_command.py looks at.
            assert self.process.wait(START_SECONDS) == 0, self.log
        finally:
            self.process.kill()
            self.reader.join()
            self.process.stderr.close()
            self.folder.cleanup()
        assert "Traceback" not in self.log, self.log
        for secret in self.secrets:
            assert secret not in self.log

    @property
    def log(self):
        return "".join(self.lines)

    def get(self, path):
        """A JSON answer of the sidecar."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def open(self, browser, **options):
        """Open the page in a fresh context. `page.faults` lists what went wrong in it."""
        context = browser.new_context(**{"viewport": {"width": 900, "height": 700}, **options})
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda message: note_fault(page, message))
        page.goto(self.url)
        return page


def note_fault(page, message):
    """An error in the console is a fault, but for requests that a test lets fail."""
    if message.type == "error" and "Failed to load resource" not in message.text:
        page.faults.append(message.text)


def conversation_of(page):
    return page.evaluate("localStorage.getItem('conversation')")
