"""The README's ways to HTTPS in a browser: nginx and Caddy, the real ones, and without a proxy."""

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
from live_service import LiveService
from playwright.sync_api import expect
from scripted_hermes import ScriptedHermes, reply
from sidecar import START_SECONDS, TOKEN, Sidecar
from test_tls import make_pair
from working_hermes import WorkingHermes

README = (Path(__file__).parents[1] / "README.md").read_text()
TIMEOUT = 10  # seconds

NGINX = """
daemon off;
user %(user)s;
pid nginx.pid;
error_log stderr notice;
events {}
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {
        listen 127.0.0.1:%(port)s ssl;
        ssl_certificate cert.pem;
        ssl_certificate_key key.pem;
%(recipe)s
    }
}
"""

CADDY = """
{
	admin off
	auto_https off
}
%(recipe)s
"""


def recipes(pattern):
    """The README's snippets that begin like this: at the root, and below a path."""
    found = re.findall(rf"^```\n({pattern}.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    return found


ROOT, BELOW = 0, 1
BASES = {ROOT: "/", BELOW: "/voice/"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class Proxy:
    """A proxy in front of a port, made as the README says."""

    def __init__(self, name, path, folder, pair, where, upstream_port, more=""):
        self.port, self.folder = free_port(), folder
        names = {"port": self.port, "user": os.environ.get("USER", "root")}
        for file in ("cert.pem", "key.pem"):
            (folder / file).write_bytes((pair / file).read_bytes())
        if name == "nginx":
            recipe, frame = recipes("location ")[where].replace("    proxy_buffering off;\n", more), NGINX
            self.command = [path, "-p", str(folder), "-e", "stderr", "-c", str(folder / "config")]
            self.ready = "start worker process"
        else:
            recipe, frame = recipes(r"voice\.example\.org \{")[where], CADDY
            recipe = recipe.replace(
                "voice.example.org {", f"https://localhost:{self.port} {{\n\ttls cert.pem key.pem"
            )
            self.command = [path, "run", "--adapter", "caddyfile", "--config", str(folder / "config")]
            self.ready = "serving initial configuration"
        assert "127.0.0.1:8790" in recipe
        recipe = recipe.replace("127.0.0.1:8790", f"127.0.0.1:{upstream_port}")
        (folder / "config").write_text(frame % {**names, "recipe": recipe})
        self.environ = os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder)}
        self.url = f"https://localhost:{self.port}{BASES[where]}"
        self.lines = []

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=self.environ,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        up = threading.Event()
        self.reader = threading.Thread(target=self.read, args=(up,))
        self.reader.start()
        assert up.wait(START_SECONDS)
        assert self.process.poll() is None, self.lines
        return self

    def read(self, up):
        for line in self.process.stderr:
            self.lines.append(line)
            if self.ready in line:
                up.set()
        up.set()

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait(TIMEOUT)
        self.reader.join()
        self.process.stderr.close()

    def ask(self, method, path, body=None, **headers):
        """An answer whose body is still to be read, and its connection."""
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=TIMEOUT, context=context)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        return connection.getresponse(), connection


@pytest.fixture(scope="module")
def pair(tmp_path_factory, openssl_path):
    return make_pair(tmp_path_factory.mktemp("pair"), "localhost")


@pytest.fixture(params=["nginx", "caddy"])
def proxy(request, tmp_path, pair):
    """A function: a proxy of this kind in front of a port."""
    path = request.getfixturevalue(f"{request.param}_path")

    def proxy(where, upstream_port):
        folder = tmp_path / f"proxy-{where}"
        folder.mkdir()
        return Proxy(request.param, path, folder, pair, where, upstream_port)

    return proxy


@pytest.fixture
def sidecar():
    with (
        LiveService() as live,
        WorkingHermes() as hermes,
        Sidecar(live, hermes.url, hermes.key, token=TOKEN) as sidecar,
    ):
        sidecar.hermes = hermes
        sidecar.port = int(sidecar.url.rstrip("/").rpartition(":")[2])
        yield sidecar


@pytest.mark.parametrize("where", BASES)
def test_a_page_behind_the_proxy_works_and_follows_a_run_as_it_happens(browser, proxy, sidecar, where):
    with proxy(where, sidecar.port) as front:
        sidecar.url = front.url
        page = sidecar.open(browser, ignore_https_errors=True)
        page.get_by_label("Access token", exact=True).fill(TOKEN)
        page.get_by_role("button", name="Let me in").click()
        page.get_by_role("textbox", name="Message Hermes").fill("Look around.")
        page.get_by_role("button", name="Send", exact=True).click()
        run = sidecar.hermes.run()
        card = page.get_by_role("article")

        # A buffer would hold these back until the run has ended.
        run.emit("tool.started", tool="terminal", preview="ls -la the-cellar")
        expect(card).to_contain_text("the-cellar")
        run.end("completed", output="Nothing but spiders.")

        expect(card).to_contain_text("Nothing but spiders.")
        assert page.evaluate("isSecureContext")
        assert page.faults == []
        page.context.close()


# What the README's recipe turns off, and the server's header as well.
HOLDING_BACK = "    proxy_ignore_headers X-Accel-Buffering;\n"


def test_behind_a_proxy_that_holds_streams_back_the_page_says_so_and_asks(
    browser, nginx_path, tmp_path, pair, sidecar
):
    with Proxy("nginx", nginx_path, tmp_path, pair, ROOT, sidecar.port, HOLDING_BACK) as front:
        sidecar.url = front.url
        page = sidecar.open(browser, ignore_https_errors=True)
        page.get_by_label("Access token", exact=True).fill(TOKEN)
        page.get_by_role("button", name="Let me in").click()
        page.get_by_role("textbox", name="Message Hermes").fill("Clean up.")
        page.get_by_role("button", name="Send", exact=True).click()
        run = sidecar.hermes.run()
        card = page.get_by_role("article")

        run.emit("tool.started", tool="terminal", preview="ls -la the-cellar")
        expect(card).to_contain_text("the-cellar")
        expect(page.get_by_role("log")).to_contain_text("holds its answers back")
        run.ask("rm -rf the-cellar")
        page.get_by_role("button", name="Deny", exact=True).click()
        expect(card).to_contain_text("You denied it.")
        run.end("completed", output="Nothing but spiders.")

        expect(card).to_contain_text("Nothing but spiders.")
        expect(page.get_by_role("article")).to_have_count(1)
        assert len(sidecar.hermes.runs) == 1
        page.context.close()


@pytest.mark.parametrize("where", BASES)
def test_each_update_passes_the_proxy_at_once(proxy, sidecar, where):
    with proxy(where, sidecar.port) as front:
        body = {"hermes_session": "c1", "lines": [{"speaker": "user", "text": "Work."}]}
        token = {"Authorization": f"Bearer {TOKEN}"}
        stream, connection = front.ask("POST", f"{BASES[where]}delegate", body, **token)
        assert stream.status == 200
        run = sidecar.hermes.run()

        for number in range(3):
            run.emit("tool.started", tool="terminal", preview=f"step {number}")
            while f"step {number}".encode() not in (line := stream.readline()):
                assert line
        run.end("completed", output="Done.")

        assert b'"done"' in stream.read()
        connection.close()


@pytest.mark.parametrize("where", BASES)
def test_the_server_learns_the_host_and_who_asks_and_cannot_be_told_lies(proxy, where):
    with ScriptedHermes({("GET", "/*"): [reply(200, {})]}) as upstream:
        port = int(upstream.url.rpartition(":")[2])
        with proxy(where, port) as front:
            answer, connection = front.ask("GET", f"{BASES[where]}x", **{"X-Forwarded-For": "203.0.113.9"})
            connection.close()

        assert answer.status == 200
        (seen,) = upstream.seen
        assert seen.path == "/x"
        assert seen.headers["Host"] == f"localhost:{front.port}"
        assert seen.headers["X-Forwarded-For"] in ("127.0.0.1", "::1")


def test_a_call_over_the_server_s_own_https(browser, pair):
    """As from a phone in the house: by a name, which browsers trust only over HTTPS."""
    files = ("--tls-cert", f"{pair}/cert.pem", "--tls-key", f"{pair}/key.pem")
    with LiveService() as live, WorkingHermes() as hermes:
        sidecar = Sidecar(live, hermes.url, hermes.key, {"public_hosts": ["voice.home.arpa"]}, TOKEN)
        sidecar.command += files
        with sidecar:
            sidecar.url = sidecar.url.replace("127.0.0.1", "voice.home.arpa")
            page = sidecar.open(browser, ignore_https_errors=True)
            page.get_by_label("Access token", exact=True).fill(TOKEN)
            page.get_by_role("button", name="Let me in").click()

            page.get_by_role("button", name="Start call").click()
            session = live.wait_live()
            session.user_says("Look around.", delegate=True)
            hermes.run().end("completed", output="Nothing but spiders.")

            live.wait_spoken("Nothing but spiders.")
            assert page.url.startswith("https://voice.home.arpa:")
            assert page.faults == []
            page.context.close()


def test_a_path_without_its_slash_leads_to_the_page(proxy, sidecar):
    with proxy(BELOW, sidecar.port) as front:
        answer, connection = front.ask("GET", "/voice")
        connection.close()

    assert answer.status in (301, 302, 308)
    assert answer.headers["Location"].endswith("/voice/")
