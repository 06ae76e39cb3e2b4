"""HTTPS without a proxy: certificates as the README makes them, and what goes wrong on the wire."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
from test_command import Process, flags, nothing_of_this_machine, refused, write  # noqa: F401, fixtures
from working_hermes import WorkingHermes

from hermes_voice import (
    App,
    Certificate,
    Config,
    ConfigError,
    Hermes,
    OpenAI,
    Reply,
    Server,
    load_certificate,
)

README = (Path(__file__).parents[1] / "README.md").read_text()
NAME = "voice.home.arpa"  # what the README's certificate is for
TIMEOUT = 10  # seconds


@pytest.fixture(scope="session")
def pairs(tmp_path_factory, openssl_path):
    """Folders with ca.pem, cert.pem and key.pem, each made as the README says."""
    return [make_pair(tmp_path_factory.mktemp("pair")) for _ in range(2)]


def make_pair(folder, name=NAME):
    (recipe,) = re.findall(r"```sh\n(subject=.*?)```", README, re.DOTALL)
    assert NAME in recipe
    command = ["sh", "-euc", recipe.replace(NAME, name)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def pair(pairs, tmp_path):
    """The first pair's files, to be overwritten."""
    return install(pairs[0], tmp_path)


def install(source, folder):
    """Put a pair where a server looks for it. Return its two paths."""
    for name in ("cert.pem", "key.pem"):
        path = folder / f"new-{name}"
        path.write_bytes((source / name).read_bytes())
        path.chmod(0o600)
        path.replace(folder / name)
    return folder / "cert.pem", folder / "key.pem"


class House:
    """A TLS server without a page, and clients that trust one authority."""

    def __init__(self, stack, pair, ca, request_seconds=TIMEOUT):
        self.hermes = stack.enter_context(WorkingHermes())
        app = App(Config(), None, OpenAI(self.hermes.url, "k" * 16), Hermes(self.hermes.url, "k" * 16))
        page = {"/": ("text/html; charset=utf-8", b"<html>" + b"x" * 300_000)}
        self.server = Server(("127.0.0.1", 0), app, page, request_seconds, Certificate(*pair))
        self.port, self.ca, self.stack = self.server.server_port, ca, stack
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        thread.start()

        def stop():
            self.server.shutdown()
            self.server.server_close()
            app.close()
            thread.join(TIMEOUT)

        stack.callback(stop)

    def plain(self):
        return self.stack.enter_context(socket.create_connection(("127.0.0.1", self.port), TIMEOUT))

    def connect(self, name=NAME, ca=None, versions=()):
        context = ssl.create_default_context(cafile=(ca or self.ca) / "ca.pem")
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as newer clients do
        context.set_alpn_protocols(["h2", "http/1.1"])
        if versions:
            context.minimum_version, context.maximum_version = versions
            context.set_ciphers("ALL:@SECLEVEL=0")
        return self.stack.enter_context(context.wrap_socket(self.plain(), server_hostname=name))

    def ask(self, connection, method="GET", path="/healthz", body=None):
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {NAME}:{self.port}\r\n".replace(NAME, "localhost")
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(f"{head}\r\n".encode() + data)
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return response


@pytest.fixture
def build(pair, pairs):
    """A function: a running server."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: House(stack, pair, pairs[0], **settings)


@pytest.mark.parametrize("name", [NAME, "192.168.1.5"])
def test_a_device_that_trusts_the_authority_gets_a_sound_connection(build, name):
    house = build()

    connection = house.connect(name)

    assert connection.version() == "TLSv1.3"
    assert connection.selected_alpn_protocol() == "http/1.1"
    for _ in range(2):  # the connection is kept
        assert json.load(house.ask(connection)) == {"status": "ok"}
    page = house.ask(connection, path="/").read()
    assert len(page) > 300_000


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused(build):
    house = build()
    old = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1)

    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        house.connect(versions=old)

    newer = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2)
    assert house.connect(versions=newer).version() == "TLSv1.2"


def test_plain_http_is_told_what_to_do(build, caplog):
    caplog.set_level("INFO", "hermes_voice")
    response = (house := build()).ask(house.plain(), path="/")

    assert response.status == 400
    assert b"https://" in response.read()
    assert "reason=HTTP_REQUEST" in caplog.text


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01", b"SSH-2.0-client\r\n" * 9], ids=["nothing", "some", "ssh"]
)
def test_a_handshake_that_never_ends_holds_nobody_up_and_is_ended(build, sent):
    house = build(request_seconds=2)
    slow = [house.plain() for _ in range(5)]
    for connection in slow:
        connection.sendall(sent)

    assert json.load(house.ask(house.connect())) == {"status": "ok"}

    for connection in slow:
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass


def test_a_client_that_does_not_trust_the_certificate_is_logged_and_no_crash(build, pairs, caplog):
    caplog.set_level("INFO", "hermes_voice")
    house = build()

    with pytest.raises(ssl.SSLCertVerificationError):
        house.connect(ca=pairs[1])

    assert json.load(house.ask(house.connect())) == {"status": "ok"}
    house.server.shutdown()
    assert "crashed" not in caplog.text


def test_updates_are_streamed_as_they_come(build):
    house = build()
    body = {"hermes_session": "c1", "lines": [{"speaker": "user", "text": "Work."}]}
    stream = house.ask(house.connect(), "POST", "/delegate", body)
    run = house.hermes.run()

    run.emit("tool.started", tool="terminal", preview="ls")
    while b'"tool"' not in (line := stream.readline()):
        assert line
    run.end("completed", output="Three files.")

    assert b'"done"' in stream.read()


def test_the_end_of_a_connection_is_said_to_the_client(build):
    """Without TLS's own goodbye the client could not tell an end from a cut."""
    house = build()
    connection = house.connect()
    connection.suppress_ragged_eofs = False
    connection.sendall(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")

    received = b""
    while chunk := connection.recv(4096):  # an end without the goodbye raises SSLEOFError
        received += chunk

    assert received.endswith(b'{"status": "ok"}')


def test_a_body_that_is_refused_unread_does_not_cost_its_client_the_answer(build):
    house = build()
    connection = house.connect()

    refused = house.ask(connection, "POST", "/delegate", {"lines": "x" * 600_000})

    assert refused.status == 413


@pytest.mark.parametrize("goodbye", [True, False], ids=["goodbye", "cut"])
def test_whether_a_client_is_gone_is_known_while_it_is_answered(build, monkeypatch, goodbye):
    """A call whose page has gone is not opened, see post_session."""
    house = build()
    seen, look = [], threading.Event()
    ended = threading.Event()

    def asking(app, request):
        seen.append(request.gone())
        look.set()
        deadline = time.monotonic() + TIMEOUT
        while not request.gone() and time.monotonic() < deadline:
            pass
        seen.append(request.gone())
        ended.set()
        return Reply({})

    monkeypatch.setattr("hermes_voice._PATTERNS", [("POST", re.compile("/ask"), asking)])
    connection = house.connect()
    connection.sendall(b"POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       b"Content-Length: 2\r\n\r\n{}")  # fmt: skip
    assert look.wait(TIMEOUT)
    if goodbye:
        with contextlib.suppress(ssl.SSLError):
            connection.settimeout(0)
            connection.unwrap()
    else:
        connection.close()

    assert ended.wait(TIMEOUT)
    assert seen == [False, True]


# ---- the files ---------------------------------------------------------------


def encrypt_key(folder):
    command = "openssl pkey -in key.pem -aes256 -passout pass:secret-of-key -out locked.pem"
    subprocess.run(command.split(), check=True, cwd=folder)
    (folder / "locked.pem").replace(folder / "key.pem")


BAD_PAIRS = {
    "no certificate": (lambda folder: (folder / "cert.pem").unlink(), "--tls-cert", "No such file"),
    "no key": (lambda folder: (folder / "key.pem").unlink(), "--tls-key", "No such file"),
    "not PEM": (lambda folder: (folder / "cert.pem").write_text("hello"), "--tls-cert", "in PEM"),
    "empty": (lambda folder: (folder / "cert.pem").write_text(""), "--tls-cert", "in PEM"),
    "key not PEM": (lambda folder: (folder / "key.pem").write_text("hello"), "--tls-cert", "in PEM"),
    "for all": (lambda folder: (folder / "key.pem").chmod(0o644), "--tls-key", "chmod 600"),
    "password": (encrypt_key, "--tls-cert", "without a password"),
}


@pytest.mark.parametrize("spoil", BAD_PAIRS)
def test_a_pair_that_does_not_work_is_refused_in_one_line(capsys, flags, pair, spoil):  # noqa: F811
    act, flag, said = BAD_PAIRS[spoil]
    act(pair[0].parent)

    (problem,) = refused(capsys, flags(tls_cert=str(pair[0]), tls_key=str(pair[1])))

    assert problem.startswith(f"{flag} {pair[0].parent}")
    assert said in problem


def test_a_key_of_another_certificate_is_refused(pairs):
    with pytest.raises(ConfigError, match="belongs to another certificate"):
        load_certificate(pairs[0] / "cert.pem", pairs[1] / "key.pem")


def test_a_key_needs_its_certificate(capsys, flags, pair):  # noqa: F811
    (problem,) = refused(capsys, flags(tls_key=str(pair[1])))

    assert problem.startswith(f"--tls-key {pair[1]}: needs --tls-cert")


def test_one_file_may_hold_both_and_is_then_private(pair):
    both = pair[0]
    both.write_bytes(both.read_bytes() + pair[1].read_bytes())
    both.chmod(0o600)

    assert load_certificate(both, both)

    both.chmod(0o644)
    with pytest.raises(ConfigError, match=f"--tls-cert {both}: every user can read it"):
        load_certificate(both, both)


# ---- renewal -----------------------------------------------------------------


def serial(house, ca):
    connection = house.connect(ca=ca)
    return connection.getpeercert()["serialNumber"]


def test_a_renewed_pair_is_shown_to_the_next_connection_and_a_bad_one_is_not(
    build, pair, pairs, monkeypatch, caplog
):
    monkeypatch.setattr("hermes_voice.CERTIFICATE_SECONDS", -1)
    caplog.set_level("INFO", "hermes_voice")
    house = build()
    kept = house.connect()
    first = serial(house, pairs[0])

    pair[0].write_bytes((pairs[1] / "cert.pem").read_bytes())  # half of the renewal
    assert serial(house, pairs[0]) == first
    assert serial(house, pairs[0]) == first
    assert caplog.text.count("certificate.refused") == 1

    install(pairs[1], pair[0].parent)
    assert serial(house, pairs[1]) != first
    assert "certificate.loaded" in caplog.text

    pair[1].unlink()
    assert serial(house, pairs[1]) != first
    assert json.load(house.ask(kept)) == {"status": "ok"}


def test_the_files_are_not_looked_at_for_every_connection(build, pair, pairs, monkeypatch):
    monkeypatch.setattr("hermes_voice.CERTIFICATE_SECONDS", TIMEOUT)
    house = build()
    install(pairs[1], pair[0].parent)

    assert serial(house, pairs[0])


def test_a_process_serves_https_and_says_so(flags, pair, pairs, tmp_path):  # noqa: F811
    argv = flags(tls_cert=str(pair[0]), tls_key=str(pair[1]))
    with Process(argv, tmp_path) as sidecar:
        assert sidecar.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=pairs[0] / "ca.pem")
        context.check_hostname = False  # the README's certificate is not for loopback
        port = int(sidecar.url.rstrip("/").rpartition(":")[2])
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            assert json.load(connection.getresponse()) == {"status": "ok"}

        assert sidecar.stop(15) == 0
    assert "Traceback" not in sidecar.log
