"""The server over real HTTP: gate, routes, bodies, files, streams, shutdown.

After every test nothing that was answered or logged may hold a secret.
"""

import contextlib
import http.client
import ipaddress
import json
import logging
import os
import queue
import re
import resource
import socket
import struct
import threading
import time

import pytest
from bench import end_runs
from scripted_hermes import ScriptedHermes, reply
from working_hermes import WorkingHermes, join_workers

import hermes_voice
from hermes_voice import (
    ACCEPT_PAUSE,
    BODY_LIMIT,
    CONNECTIONS_MOST,
    HEAD_LIMIT,
    LEAVING_MOST,
    LINGER_LIMIT,
    ROUTES,
    SECURITY_HEADERS,
    SHUTDOWN_SECONDS,
    WRONG_TOKEN_DELAY,
    WRONG_TOKEN_SECONDS,
    WRONG_TOKENS,
    WRONG_TOKENS_AT_ONCE,
    App,
    Config,
    Hermes,
    OpenAI,
    Server,
    Session,
    Waits,
    Warnings,
    WrongTokens,
    read_page,
    serve_until,
)

TIMEOUT = 10  # seconds
SOON = 0.05  # seconds, for what a test waits out
WHILE = 0.5  # seconds, in which a client gets its request through on any machine
SECRETS = {"openai": "canary-openai-key", "hermes": "canary-hermes-key", "access": "canary-access-token"}
TOKEN = f"Bearer {SECRETS['access']}"
CALL = {"sdp": "v=0\r\nm=audio 9\r\n"}
PAGE = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "icon.png": "image/png",
    "app.webmanifest": "application/manifest+json",
}


# What clients have received in this test.
RECEIVED = []


class House:
    """A server between its upstreams, and a client that sends exactly what it is told."""

    def __init__(
        self,
        stack,
        folder,
        access=None,
        hosts=(),
        proxies=(),
        request_seconds=TIMEOUT,
        connections=CONNECTIONS_MOST,
        hermes=None,
        **waits,
    ):
        self.hermes = stack.enter_context(hermes or WorkingHermes())
        self.openai = stack.enter_context(ScriptedHermes())
        self.app = App(
            Config(public_hosts=hosts, trusted_proxies=tuple(map(ipaddress.ip_network, proxies))),
            access,
            OpenAI(f"{self.openai.url}/v1", SECRETS["openai"]),
            Hermes(self.hermes.url, SECRETS["hermes"]),
        )
        self.app.waits = Waits(**{"first": 0.01, "slowest": 0.01} | waits)
        page = read_page(folder)
        self.server = Server(("127.0.0.1", 0), self.app, page, request_seconds, connections=connections)
        self.held_back = []  # the seconds by which answers to wrong tokens would be late
        self.server.hold_back = self.held_back.append
        self.port = self.server.server_port
        self.host = f"localhost:{self.port}"
        self.token = TOKEN if access else None
        self.stack = stack
        stack.callback(end_runs, self.app, ("c1", "c2"))

    def start(self):
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        thread.start()

        def stop():
            self.server.shutdown()
            self.server.server_close()
            self.app.close()
            thread.join(TIMEOUT)

        self.stack.callback(stop)
        return self

    def wait_for(self, waiting):
        """Wait until so many connections wait for a request."""
        until = time.monotonic() + TIMEOUT
        while sum(since is not None for since in [*self.server.waiting.values()]) != waiting:
            assert time.monotonic() < until, self.server.waiting
            time.sleep(0.001)

    def connect(self):
        return self.stack.enter_context(Connection(self))

    def raw(self, data, method="GET"):
        """The answer to these bytes, sent on a connection of their own."""
        with Connection(self) as connection:
            connection.send(data)
            return connection.answer(method)

    def ask(self, method, path, body=None, **headers):
        """The answer to a request on a connection of its own."""
        with Connection(self) as connection:
            return connection.ask(method, path, body, **headers)

    def delegate(self, text="Work.", **fields):
        """An open stream that follows a new run."""
        body = {"hermes_session": "c1", "lines": [{"speaker": "user", "text": text}], **fields}
        return self.connect().open("POST", "/delegate", body)


class Connection:
    """One connection of a client."""

    def __init__(self, house):
        self.house = house
        self.socket = socket.create_connection(("127.0.0.1", house.port), TIMEOUT)
        # Little fits in at once, as on a slow line: a large body is sent while it is read.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def request(self, method, path, body=None, **headers):
        """Send a request. A header that is None is left out, `_` in names stands for `-`."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        lines = {"Host": self.house.host, "Authorization": self.house.token}
        if body is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
        self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + (body or b""))

    def answer(self, method="GET"):
        """Read one whole answer."""
        response = http.client.HTTPResponse(self.socket, method=method)
        response.begin()
        response.data = response.read()
        RECEIVED.append(str(response.headers) + response.data.decode())
        return response

    def ask(self, method, path, body=None, **headers):
        self.request(method, path, body, **headers)
        return self.answer(method)

    def open(self, method, path, body=None, **headers):
        """Send a request whose answer is a stream."""
        self.request(method, path, body, **headers)
        response = http.client.HTTPResponse(self.socket, method=method)
        response.begin()
        RECEIVED.append(str(response.headers))
        return Stream(self, response)

    def at_end(self):
        """Whether the server has closed the connection without a word."""
        return self.socket.recv(1) == b""


class Stream:
    """An NDJSON answer that is read line by line."""

    def __init__(self, connection, response):
        self.connection, self.response = connection, response
        self.updates = []
        self.run_id = self.next()["run_id"]

    def next(self):
        """The next update, None at the end."""
        line = self.response.readline()
        if not line:
            return None
        RECEIVED.append(line.decode())
        self.updates.append(json.loads(line))
        return self.updates[-1]

    def wait(self, kind):
        """Read up to an update of this type."""
        while (update := self.next()) and update["type"] != kind:
            pass
        assert update, self.updates
        return update

    def read(self):
        """Read to the end. Return all updates."""
        while self.next():
            pass
        return self.updates

    def vanish(self):
        self.response.close()
        self.connection.socket.close()


def error_of(response):
    """The code of an error, which has its shape."""
    body = json.loads(response.data)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message"}
    assert response.headers["Content-Type"] == "application/json"
    return body["error"]["code"]


@contextlib.contextmanager
def logged(event, act):
    """Do something at the moment when an event is logged."""
    watcher = logging.Handler()
    watcher.emit = lambda record: act() if event in record.getMessage() else None
    logger = logging.getLogger("hermes_voice")
    logger.addHandler(watcher)
    try:
        yield
    finally:
        logger.removeHandler(watcher)


@pytest.fixture(autouse=True)
def a_warning_is_written_once(monkeypatch):
    """A test is over before it would be written again, however slow the machine is."""
    monkeypatch.setattr("hermes_voice.WARNING_SECONDS", 600)


@pytest.fixture(autouse=True)
def nothing_secret_gets_out(caplog):
    """After every test: no secret was answered or logged."""
    caplog.set_level(logging.DEBUG, "hermes_voice")
    RECEIVED.clear()
    yield
    for secret in SECRETS.values():
        assert secret not in caplog.text
        assert all(secret not in text for text in RECEIVED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A page's folder, and things around it that are not the page."""
    around = tmp_path_factory.mktemp("house")
    folder = around / "static"
    folder.mkdir()
    for name in PAGE:
        (folder / name).write_bytes(f"This is {name}".encode())
    for path in (around / "secret.html", folder / "notes.txt", folder / ".env", folder / "app.js~"):
        path.write_text("not the page")
    return folder


@pytest.fixture
def build(folder):
    """A function: build a server with these settings, without starting it."""
    with contextlib.ExitStack() as stack:
        stack.callback(join_workers)
        yield lambda **settings: House(stack, folder, **settings)


@pytest.fixture
def serve(build):
    """A function: a running server with these settings."""
    return lambda **settings: build(**settings).start()


@pytest.fixture(scope="module")
def shared_house(folder):
    with contextlib.ExitStack() as stack:
        house = House(stack, folder, access=SECRETS["access"], hosts=("voice.example",)).start()
        yield house
        # Only forgetting a conversation is passed on without more ado.
        assert [seen for seen in house.hermes.seen if seen.method != "DELETE"] == []
        assert house.openai.seen == []


@pytest.fixture
def house(shared_house):
    """A running server with a token, for tests that start no run. It bears no grudge."""
    shared_house.server.wrong_tokens, shared_house.server.warnings = WrongTokens(), Warnings()
    return shared_house


# ---- the gate ----------------------------------------------------------------

OURS = [
    "localhost",
    "localhost:PORT",
    "LocalHost:PORT",
    "localhost.",
    "localhost.:PORT",
    "127.0.0.1",
    "127.0.0.1:PORT",
    "127.0.0.1.:PORT",
    "[::1]",
    "[::1]:PORT",
    "192.168.1.5:8790",
    "[fe80::1]:8790",
    "[::ffff:127.0.0.1]:PORT",
    "[0:0:0:0:0:0:0:1]",
    "voice.example",
    "VOICE.example:443",
    "voice.example.",
]
NOT_OURS = [
    "evil.example",
    "evil.example:PORT",
    "127.evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "voice.example.evil.example",
    "evilvoice.example",
    "localhost..",
    "127.0.0.1..",
    "127.1",
    "0127.0.0.1",
    "127.0.0.1\x00",
    "local\x07host",
    "l\u00f6calhost",
    "localhost:PORT\\@evil.example",
    "[::1].",
    "[::1]x",
    "[::1%",
    "[1:::2]",
    "localhost:port",
    "localhost:PORT:PORT",
    "localhost@evil.example",
    "evil.example/localhost",
    "localhost, evil.example",
    "local host",
    "::1",
    "[::1",
    "[]",
    "[evil.example]",
    "0x7f000001",
    "2130706433",
    "",
    ":PORT",
    "*",
]
EVERYWHERE = ["/", "/healthz", "/config", "/nothing"]


@pytest.mark.parametrize("host", OURS)
def test_a_host_of_ours_is_answered(house, host):
    for path in ("/", "/healthz", "/config"):
        assert house.ask("GET", path, Host=host.replace("PORT", str(house.port))).status == 200


@pytest.mark.parametrize("host", [*NOT_OURS, None])
def test_a_host_that_is_not_ours_is_misdirected(house, host):
    for path in EVERYWHERE:
        answer = house.ask("GET", path, Host=host and host.replace("PORT", str(house.port)))
        assert (answer.status, error_of(answer)) == (421, "misdirected")


@pytest.mark.parametrize("second", ["localhost", "evil.example"])
def test_two_hosts_are_misdirected(house, second):
    answer = house.raw(f"GET / HTTP/1.1\r\nHost: localhost\r\nHost: {second}\r\n\r\n".encode())

    assert answer.status == 421


SAME_ORIGIN = [
    ("localhost:PORT", "http://localhost:PORT"),
    ("LOCALHOST:PORT", "HTTP://localhost:PORT"),
    ("[::1]:PORT", "http://[::1]:PORT"),
    ("localhost", "http://localhost"),
    ("localhost:80", "http://localhost"),
    ("localhost", "http://localhost:80"),
    ("voice.example", "https://voice.example"),
    ("voice.example", "https://voice.example:443"),
    ("voice.example:443", "https://voice.example"),
    ("localhost:PORT", None),
]
OTHER_ORIGIN = [
    ("localhost:PORT", "http://evil.example"),
    ("localhost:PORT", "http://evil.example:PORT"),
    ("localhost:PORT", "http://localhost"),
    ("localhost:PORT", "http://localhost:1"),
    ("localhost:PORT", "http://127.0.0.1:PORT"),
    ("localhost:PORT", "http://localhost:PORT.evil.example"),
    ("localhost:PORT", "http://localhost:PORT@evil.example"),
    ("localhost:PORT", "http://evil.example, http://localhost:PORT"),
    ("localhost:PORT", "localhost:PORT"),
    ("localhost:PORT", "ftp://localhost:PORT"),
    ("localhost:PORT", "chrome-extension://localhost:PORT"),
    ("localhost:443", "http://localhost"),
    ("localhost:80", "https://localhost"),
    ("localhost:PORT", "file://"),
    ("localhost:PORT", "null"),
    ("localhost:PORT", ""),
]


@pytest.mark.parametrize(("host", "origin"), SAME_ORIGIN)
def test_the_page_s_own_origin_is_answered(house, host, origin):
    headers = with_port({"Host": host, "Origin": origin}, house)

    assert house.ask("GET", "/config", **headers).status == 200
    assert house.ask("POST", "/approve", {}, **headers).status == 400


@pytest.mark.parametrize(("host", "origin"), OTHER_ORIGIN)
def test_another_origin_is_refused_everywhere(house, host, origin):
    headers = with_port({"Host": host, "Origin": origin}, house)

    for path in EVERYWHERE:
        answer = house.ask("GET", path, **headers)
        assert (answer.status, error_of(answer)) == (403, "forbidden")
    refused = house.ask("POST", "/delegate", {}, **headers)
    assert (refused.status, b"pass the Host header on" in refused.data) == (403, True)
    assert house.ask("OPTIONS", "/delegate", **headers).status == 403


def with_port(headers, house):
    return {name: value and value.replace("PORT", str(house.port)) for name, value in headers.items()}


def test_one_foreign_origin_among_two_is_refused(house):
    origins = f"Origin: http://{house.host}\r\nOrigin: http://evil.example\r\n"

    answer = house.raw(f"GET / HTTP/1.1\r\nHost: {house.host}\r\n{origins}\r\n".encode())

    assert answer.status == 403


@pytest.mark.parametrize(
    ("method", "path", "site", "mode", "destination", "status"),
    [
        ("GET", "/", "cross-site", "navigate", "document", 200),
        ("HEAD", "/", "cross-site", "navigate", "document", 200),
        ("GET", "/", "cross-site", "navigate", "iframe", 403),
        ("GET", "/", "cross-site", "no-cors", "image", 403),
        ("GET", "/app.js", "cross-site", "no-cors", "script", 403),
        ("GET", "/config", "cross-site", "navigate", "document", 403),
        ("GET", "/healthz", "cross-site", "no-cors", "empty", 403),
        ("POST", "/", "cross-site", "navigate", "document", 403),
        ("POST", "/approve", "cross-site", "navigate", "document", 403),
        ("GET", "/config", "same-origin", "cors", "empty", 200),
        ("GET", "/", "same-site", "navigate", "document", 200),
        ("GET", "/", "none", "navigate", "document", 200),
    ],
)
def test_other_sites_may_only_link_to_the_page(house, method, path, site, mode, destination, status):
    metadata = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": destination}

    answer = house.ask(method, path, {} if method == "POST" else None, **metadata)

    assert answer.status == status


RIGHT = [TOKEN, f"bearer {SECRETS['access']}", f"BEARER   {SECRETS['access']}  "]
WRONG = [
    None,
    "",
    "Bearer",
    "Bearer ",
    SECRETS["access"],
    f"Basic {SECRETS['access']}",
    f"Bearer {SECRETS['access']}x",
    f"Bearer {SECRETS['access'][:-1]}",
    f"Bearer {SECRETS['access'].upper()}",
    f"Bearer {SECRETS['access']} {SECRETS['access']}",
    "Bearer caf\u00e9",
    "Bearer \u00c3\u00a9",
    "Bearer \x00",
]


@pytest.mark.parametrize("token", RIGHT)
def test_the_right_token_is_let_in(house, token):
    assert house.ask("GET", "/config", Authorization=token).status == 200


@pytest.mark.parametrize("token", WRONG)
def test_a_wrong_token_is_refused(house, token):
    answer = house.ask("GET", "/config", Authorization=token)

    assert (answer.status, error_of(answer)) == (401, "unauthorized")


def test_a_token_counts_in_its_header_only(house):
    query, cookie = f"/config?token={SECRETS['access'][:9]}", f"token={SECRETS['access']}"

    assert house.ask("GET", query, Authorization=None).status == 401
    assert house.ask("GET", "/config", Authorization=None, Cookie=cookie).status == 401


@pytest.mark.parametrize(("method", "path", "_", "needs_token"), ROUTES)
def test_every_route_says_whether_it_needs_the_token(house, method, path, _, needs_token):
    path, body = path.replace("<id>", "abc"), {} if method == "POST" else None

    assert (house.ask(method, path, body, Authorization=None).status == 401) == needs_token
    assert house.ask(method, path, body).status != 401


def test_only_health_and_the_page_are_open():
    assert [path for _, path, _, needs_token in ROUTES if not needs_token] == ["/healthz", "/pair"]


@pytest.mark.parametrize("path", ["/nothing", "/runs/abc", "/runs/abc/nothing", "/delegate/", "/config/x"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
def test_an_unknown_path_is_told_to_who_has_the_token(house, method, path):
    assert house.ask(method, path).status == 404
    assert house.ask(method, path, Authorization=None).status == 401


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", "GET HEAD"),
        ("/app.js", "GET HEAD"),
        ("/healthz", "GET HEAD"),
        ("/config", "GET HEAD"),
        ("/runs", "GET HEAD"),
        ("/runs/abc/updates", "GET HEAD"),
        ("/runs/abc/stop", "POST"),
        ("/session", "POST"),
        ("/session/close", "POST"),
        ("/delegate", "POST"),
        ("/approve", "POST"),
    ],
)
def test_a_known_path_takes_its_methods_only(house, path, methods):
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = house.ask(method, path, {} if method in ("POST", "PUT", "PATCH") else None)
        assert (answer.status == 405) == (method not in methods.split()), method
        if answer.status == 405:
            assert answer.headers["Allow"].split(", ") == methods.split()
        if answer.status == 405 and method != "HEAD":
            assert error_of(answer) == "wrong_method"


def test_a_path_of_two_methods_names_both(house):
    answer = house.ask("PUT", "/conversations/c1", {})

    assert (answer.status, answer.headers["Allow"]) == (405, "GET, DELETE, HEAD")


# ---- wrong tokens ------------------------------------------------------------


def guess(house, token="Bearer wrong-token", **headers):
    return house.ask("GET", "/config", Authorization=token, **headers)


def test_who_shows_wrong_tokens_is_slowed_then_refused_but_the_right_one_works(serve):
    house = serve(access=SECRETS["access"])

    statuses = [guess(house).status for _ in range(WRONG_TOKENS + 1)]

    assert statuses == [401] * WRONG_TOKENS + [429]
    assert house.held_back == [0] * WRONG_TOKENS_AT_ONCE + [WRONG_TOKEN_DELAY] * (
        WRONG_TOKENS - WRONG_TOKENS_AT_ONCE
    )
    assert house.ask("GET", "/config").status == 200
    refused = guess(house)
    assert (refused.status, error_of(refused)) == (429, "too_many")
    assert 0 < int(refused.headers["Retry-After"]) <= WRONG_TOKEN_SECONDS


def test_a_wrong_pairing_code_is_a_guess_too(serve):
    house = serve(access=SECRETS["access"])
    code = {"code": "A" * 32}

    statuses = [house.ask("POST", "/pair", code, Authorization=None).status for _ in range(WRONG_TOKENS + 1)]

    assert statuses == [401] * WRONG_TOKENS + [429]


@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer ", "Basic d3Jvbmc6d3Jvbmc="])
def test_a_missing_token_is_no_guess(serve, token):
    house = serve(access=SECRETS["access"])

    assert {guess(house, token).status for _ in range(WRONG_TOKENS * 2)} == {401}
    assert house.held_back == []


def test_open_paths_and_servers_without_a_token_take_no_guesses(serve):
    house, tokenless = serve(access=SECRETS["access"]), serve()
    for _ in range(WRONG_TOKENS * 2):
        assert house.ask("GET", "/healthz", Authorization="Bearer wrong-token").status == 200
        assert guess(tokenless).status == 200

    assert guess(house).status == 401


@pytest.mark.parametrize(("proxies", "other_client"), [(["127.0.0.0/8"], 401), ([], 429)])
def test_clients_behind_a_proxy_are_told_apart_where_it_is_trusted(serve, caplog, proxies, other_client):
    house = serve(access=SECRETS["access"], proxies=proxies)
    for _ in range(WRONG_TOKENS + 1):
        guess(house, X_Forwarded_For="198.51.100.7")

    assert guess(house, X_Forwarded_For="198.51.100.7").status == 429
    assert guess(house, X_Forwarded_For="198.51.100.7, 198.51.100.8").status == other_client
    assert ("client=198.51.100.7" in caplog.text) == bool(proxies)


def test_who_knocks_often_does_not_fill_the_log(serve, caplog):
    house = serve(access=SECRETS["access"])
    for _ in range(10):
        guess(house)
        house.ask("GET", "/", Host="evil.example")
        house.ask("GET", "/", Origin="http://evil.example")
        house.ask("POST", "/", {})
        house.raw(b"nonsense\r\n\r\n")

    (line,) = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert line.levelname == "WARNING"
    assert line.getMessage() == 'request.refused client=127.0.0.1 path=/config code=unauthorized detail=""'


def test_a_query_is_not_logged(house, caplog):
    house.ask("GET", f"/nothing?token={SECRETS['access']}")
    house.ask("GET", f"/nothing?token={SECRETS['access']}", Authorization=None)

    assert "path=/nothing code=not_found" in caplog.text
    assert "path=/nothing code=unauthorized" in caplog.text


# ---- bodies ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content_Type": None}, 415, "wrong_type"),
        ({"Content_Type": "text/plain"}, 415, "wrong_type"),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415, "wrong_type"),
        ({"Content_Type": "application/jsonx"}, 415, "wrong_type"),
        ({"Content_Type": "application/json, text/plain"}, 415, "wrong_type"),
        ({"Content_Type": "text/plain; application/json"}, 415, "wrong_type"),
        ({"Content_Type": "text/plain\r\nContent-Type: application/json"}, 415, "wrong_type"),
        ({"Content_Type": "multipart/form-data; boundary=x"}, 400, "bad_request"),
        ({"Content_Type": "application/json/x"}, 415, "wrong_type"),
        ({"Content_Length": None}, 411, "no_length"),
        ({"Content_Length": "two"}, 411, "no_length"),
        ({"Content_Length": "-2"}, 411, "no_length"),
        ({"Content_Length": "+2"}, 411, "no_length"),
        ({"Content_Length": "2, 2"}, 411, "no_length"),
        ({"Content_Length": "0x2"}, 411, "no_length"),
        ({"Content_Length": "2\r\nContent-Length: 2"}, 411, "no_length"),
        ({"Transfer_Encoding": "chunked"}, 411, "no_length"),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411, "no_length"),
        ({"Content_Length": None, "Transfer_Encoding": "gzip, chunked"}, 411, "no_length"),
        ({"Content_Length": str(BODY_LIMIT + 1)}, 413, "too_large"),
        ({"Content_Length": "9" * 12}, 413, "too_large"),
        ({"Content_Length": "9" * 40}, 411, "no_length"),
    ],
)
def test_a_body_needs_its_type_and_its_length(house, headers, status, code):
    with house.connect() as connection:
        connection.request("POST", "/approve", b"{}", **headers)
        connection.socket.shutdown(socket.SHUT_WR)

        answer = connection.answer()

        assert (answer.status, error_of(answer)) == (status, code)
        assert answer.headers["Connection"] == "close"
        assert connection.at_end()


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_taken_by_any_of_its_names(house, kind):
    answer = house.ask("POST", "/approve", {}, Content_Type=kind)

    assert (answer.status, error_of(answer)) == (400, "bad_request")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b'{"a": "\xff"}',
        b'{"a": 1} {"b": 2}',
        b"[" * 100_000,
        b'{"a":' * 40_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: body[:10].decode("latin-1"),
)
def test_a_body_is_one_json_object(house, body):
    answer = house.ask("POST", "/approve", body)

    assert (answer.status, error_of(answer)) == (400, "bad_request")
    assert "'" not in json.loads(answer.data)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/session", {"sdp": 5}, "sdp"),
        ("/session", {"sdp": "v=0\r\nm=audio", "voice": 5}, "voice"),
        ("/session/close", {"session_id": ["live_1"]}, "session_id"),
        ("/delegate", {"hermes_session": {}}, "hermes_session"),
        ("/delegate", {"hermes_session": "c1", "lines": {}}, "lines"),
        ("/delegate", {"hermes_session": "c1", "lines": [{"speaker": {}}]}, "lines[0]"),
        *(
            (
                "/conversations/c1/lines",
                {"lines": [{"speaker": "user", "text": "Hi", "key": "1", **odd}]},
                name,
            )
            for name, values in {
                "age_seconds": (-1, "1", True, None, [], float("nan"), float("inf")),
                "delegation": (1, "a b", "", "x" * 65),
            }.items()
            for odd in ({name: value} for value in values)
        ),
        ("/approve", {"run_id": 5, "choice": "once"}, "run_id"),
        ("/approve", {"run_id": "abc", "choice": {}}, "choice"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(house, path, body, named):
    answer = house.ask("POST", path, body)

    assert answer.status == 400
    assert f"'{named}'" in json.loads(answer.data)["error"]["message"]


def test_half_a_character_is_refused_in_an_id(house):
    body = {"hermes_session": "\ud83d", "lines": [{"speaker": "user", "text": "Hi"}]}

    answer = house.ask("POST", "/delegate", body)

    assert answer.status == 400
    assert "hermes_session" in json.loads(answer.data)["error"]["message"]


def test_half_a_character_in_what_was_said_is_mended_and_kept(house):
    said = {"key": "p_1", "speaker": "user", "text": "a\ud83d\u0000b\u2028c"}

    answer = house.ask("POST", "/conversations/c1/lines", {"lines": [said]})
    kept = json.loads(house.ask("GET", "/conversations/c1").data)["lines"]

    assert answer.status == 200
    assert [line["text"] for line in kept] == ["a\ufffd b\nc"]


def test_the_longest_request_fits_into_a_body(house):
    line = {"key": "p_1", "speaker": "user", "text": "\u6f22" * hermes_voice.REQUEST_CHARS}

    body = json.dumps({"lines": [line]}, ensure_ascii=False).encode()

    answer = house.ask("POST", "/conversations/c1/lines", body)
    kept = json.loads(house.ask("GET", "/conversations/c1").data)["lines"]

    assert answer.status == 200
    assert kept[0]["text"] == line["text"]


@pytest.mark.parametrize("query", ["", "?conversation=", "?conversation=a%2Fb", "?conversation=..", "?x=c1"])
def test_a_conversation_is_named_by_its_id(house, query):
    assert house.ask("GET", f"/runs{query}").status == 400


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "%20", "9" * 10, "\u0661"])
def test_an_update_is_named_by_its_number(serve, after):
    house = serve()
    stream = house.delegate()

    path = f"/runs/{stream.run_id}/updates?after={after}"

    assert house.ask("GET", path.encode().decode("latin-1")).status == 400


@pytest.mark.parametrize(
    ("headers", "status", "times"),
    [
        ({}, 413, 30),
        ({"Authorization": "Bearer wrong"}, 401, 5),
        ({"Host": "evil.example"}, 421, 5),
        ({"Origin": "http://evil.example"}, 403, 5),
        ({"Content_Type": "text/plain"}, 415, 5),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411, 5),
        ({"Content_Length": "nonsense"}, 411, 5),
    ],
)
def test_a_client_that_sends_a_megabyte_sees_why_it_is_refused(house, headers, status, times):
    """Each time: an answer, and no reset in its place."""
    body = b"100000\r\n" + b"x" * 0x100000 + b"\r\n0\r\n\r\n"

    for _ in range(times):
        assert house.ask("POST", "/delegate", body, **headers).status == status


def test_a_client_that_sends_without_end_is_hung_up(house):
    block, sent = b"x" * (1 << 20), 0
    with house.connect() as connection:
        connection.request("POST", "/delegate", b"", Content_Length="9" * 12)
        with contextlib.suppress(ConnectionError):
            while sent < 2 * LINGER_LIMIT:
                connection.send(block)
                sent += len(block)

    assert LINGER_LIMIT // 2 <= sent < 2 * LINGER_LIMIT


def test_a_body_that_is_cut_off_does_nothing(house):
    with house.connect() as connection:
        connection.request("POST", "/delegate", b'{"hermes_session"', Content_Length="500")
        connection.socket.shutdown(socket.SHUT_WR)

        assert connection.at_end()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 413),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Content_Type": "text/plain"}, 415),
    ],
)
def test_a_client_that_asks_first_is_refused_before_it_sends(house, headers, status):
    with house.connect() as connection:
        size = str(BODY_LIMIT + 1)
        connection.request("POST", "/approve", b"", Content_Length=size, Expect="100-continue", **headers)

        answer = connection.socket.recv(1000)

    assert answer.startswith(b"HTTP/1.1 %d " % status)


def test_a_client_that_asks_first_is_told_to_go_on(house):
    with house.connect() as connection:
        connection.request("POST", "/approve", b"", Content_Length="2", Expect="100-continue")
        assert connection.socket.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.send(b"{}")

        assert connection.answer().status == 400


# ---- the page's files --------------------------------------------------------


@pytest.mark.parametrize("name", PAGE)
def test_the_page_s_files_are_served_with_their_type(house, name):
    answer = house.ask("GET", f"/{name}", Authorization=None)

    assert (answer.status, answer.data) == (200, f"This is {name}".encode())
    assert answer.headers["Content-Type"] == PAGE[name]
    assert answer.headers["Cache-Control"] == "no-cache"


def test_the_root_is_the_page_and_a_query_changes_nothing(house):
    for path in ("/", "/?from=dashboard", "/index.html"):
        assert house.ask("GET", path).data == b"This is index.html"


TRICKS = [
    "/..",
    "/../secret.html",
    "/./index.html",
    "/static/index.html",
    "/index.html/",
    "/INDEX.HTML",
    "/app.js~",
    "/notes.txt",
    "/.env",
    "/secret.html",
    "/%2e%2e",
    "/%2e%2e/secret.html",
    "/..%2fsecret.html",
    "/%2E%2E%5Csecret.html",
    "/..\\secret.html",
    "/index.html%00",
    "/index%2ehtml",
    "//evil.example/",
    "//x",
    "///..//secret.html",
    "/config/",
    "/config;x",
    "/config%3Fx",
    "/runs/../config",
    "/runs/%2e%2e/updates",
    "/runs/../updates",
    "/runs/./updates",
    "/runs//updates",
    "/runs/%61bc/updates",
    "/runs/abc%00/updates",
    "/config#x",
    "HTTP://LOCALHOST/healthz",
    "localhost:443",
    "/runs/a.b/updates",
    "/runs/a%2Fb/updates",
    "/runs/a/b/updates",
    "/runs/a%20b/updates",
    "/runs/caf\u00e9/updates",
    "/runs/" + "a" * 65 + "/updates",
    "/runs/abc/updates/",
    "http://localhost/config",
    "http://evil.example/",
    "config",
    "*",
]


@pytest.mark.parametrize("path", TRICKS)
def test_a_path_is_a_key_and_never_part_of_a_file_name(house, path):
    for method in ("GET", "POST"):
        answer = house.ask(method, path, {} if method == "POST" else None)
        assert (answer.status, error_of(answer)) == (404, "not_found")
    assert house.ask("GET", path, Authorization=None).status == 401


@pytest.mark.parametrize("code", [*range(0x0A), *range(0x0B, 0x20), *range(0x7F, 0xA1)])
def test_a_control_character_in_the_first_line_is_refused(house, code):
    for line in (f"GET /healthz{chr(code)} HTTP/1.1", f"GET{chr(code)}/healthz HTTP/1.1"):
        answer = house.raw(f"{line}\r\nHost: localhost\r\n\r\n".encode("latin-1"))
        assert answer.status in (400, 501), line


# ---- every answer ------------------------------------------------------------


def kinds_of_answers(house):
    """One answer of each kind, with its status."""
    yield 200, house.ask("GET", "/")
    yield 200, house.ask("HEAD", "/")
    yield 200, house.ask("GET", "/healthz")
    yield 200, house.ask("GET", "/config")
    yield 400, house.ask("POST", "/approve", b"{")
    yield 401, house.ask("GET", "/config", Authorization=None)
    yield 403, house.ask("GET", "/", Origin="null")
    yield 404, house.ask("GET", "/nothing")
    yield 404, house.ask("HEAD", "/nothing")
    yield 404, house.ask("POST", "/runs/abc/stop", {})
    yield 405, house.ask("GET", "/delegate")
    yield 411, house.ask("POST", "/delegate", b"{}", Content_Length=None)
    yield 413, house.ask("POST", "/delegate", b" " * (BODY_LIMIT + 1))
    yield 415, house.ask("POST", "/delegate", b"{}", Content_Type="text/plain")
    yield 421, house.ask("GET", "/", Host="evil.example")
    yield 500, house.ask("POST", "/session/close", {"session_id": "live_1"})
    yield 502, house.ask("POST", "/session", CALL)
    yield 400, house.raw(b"nonsense\r\n\r\n")
    yield 421, house.raw(b"GET /\r\n\r\n")
    yield 400, house.raw(b"GET / HTTP/1.1 and more\r\n\r\n")
    yield 400, house.raw(b"GET / HTTP/x\r\n\r\n")
    yield 400, house.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls\r\n\r\n")
    yield 413, house.ask("POST", "/pair", b" " * (HEAD_LIMIT + 1), Authorization=None)
    yield 431, house.raw(b"GET /" + b"x" * HEAD_LIMIT + b" HTTP/1.1\r\n\r\n")
    yield 431, house.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * HEAD_LIMIT + b"\r\n\r\n")
    yield 431, house.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n")
    yield 431, house.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: %01000d\r\n" % 0 * 40 + b"\r\n")
    yield 501, house.raw(b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    yield 505, house.raw(b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n")
    yield 505, house.raw(b"GET / HTTP/1.10\r\nHost: localhost\r\n\r\n")
    yield 505, house.raw(b"GET / HTTP/0.9\r\nHost: localhost\r\n\r\n")
    yield 200, house.delegate().response


def test_every_answer_has_its_shape_and_the_security_headers(serve):
    house = serve(access=SECRETS["access"])
    house.openai.add("POST", "/v1/live/sessions", reply(401, f"wrong: {SECRETS['openai']}"))
    house.app.openai.hang_up = None

    for status, answer in kinds_of_answers(house):
        assert answer.status == status
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers.get_all(name) == [value]
        assert answer.headers["Cache-Control"] in ("no-store", "no-cache")
        assert answer.headers["Server"].strip() == "hermes-voice"
        if status >= 400 and answer.data:
            assert error_of(answer)


def test_the_policy_lets_the_page_speak_to_this_server_only():
    policy = SECURITY_HEADERS["Content-Security-Policy"]

    assert SECURITY_HEADERS["X-Content-Type-Options"] == "nosniff"
    assert SECURITY_HEADERS["Referrer-Policy"] == "no-referrer"
    assert "microphone=(self)" in SECURITY_HEADERS["Permissions-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy


def test_a_crash_is_told_without_its_reason(serve, caplog):
    house = serve()
    house.app.openai.open_session = None

    answer = house.ask("POST", "/session", CALL)

    assert (answer.status, error_of(answer)) == (500, "internal")
    assert b"NoneType" not in answer.data
    assert "request.crashed" in caplog.text
    assert "TypeError" in caplog.text


@pytest.mark.parametrize("path", ["/\x1b[31mred", "/\x07", "/\x7f", "/caf\u00e9\x9b"])
def test_control_characters_of_a_path_are_escaped_in_the_log(house, caplog, path):
    house.ask("GET", path, Authorization=None)

    logged = [record.getMessage() for record in caplog.records]
    assert any("request.refused client=" in line for line in logged)
    assert all(line.isascii() and line.isprintable() for line in logged)


def test_head_is_get_without_the_body(serve):
    house = serve()
    with house.connect() as connection:
        for path in ("/", "/app.js", "/healthz", "/config", "/nothing"):
            get, head = house.ask("GET", path), connection.ask("HEAD", path)
            assert (head.status, head.data) == (get.status, b"")
            assert head.headers["Content-Length"] == get.headers["Content-Length"]
            assert head.headers["Content-Type"] == get.headers["Content-Type"]
            if get.status != 200:
                break
        stream = house.delegate()
        head = house.ask("HEAD", f"/runs/{stream.run_id}/updates")
        assert (head.status, head.headers["Content-Type"]) == (200, "application/x-ndjson")


def test_config_holds_what_the_page_needs_and_no_secret(house):
    config = json.loads(house.ask("GET", "/config").data)

    assert {"version", "model", "voice", "voices", "idle_seconds"} <= set(config)
    assert config["voice"] in config["voices"]


def test_health_tells_that_it_lives_and_nothing_else(house):
    assert json.loads(house.ask("GET", "/healthz").data) == {"status": "ok"}


# ---- connections -------------------------------------------------------------


def test_a_connection_is_kept(serve):
    house = serve()
    with house.connect() as connection:
        assert connection.ask("GET", "/").status == 200
        assert connection.ask("HEAD", "/app.js").status == 200
        assert connection.ask("POST", "/approve", {}).status == 400
        assert connection.ask("POST", "/runs/abc/stop", {}).status == 404
        stream = connection.open(
            "POST", "/delegate", {"hermes_session": "c1", "lines": [{"speaker": "user", "text": "Work."}]}
        )
        house.hermes.run().end("completed", output="Done.")
        assert stream.read()[-1]["type"] == "done"
        assert connection.ask("GET", "/healthz").status == 200


def test_requests_that_come_together_are_answered_one_by_one(house):
    with house.connect() as connection:
        connection.request("GET", "/healthz")
        connection.request("POST", "/approve", {})
        connection.request("GET", "/nothing", Connection="close")

        data = connection.socket.makefile("rb").read()

    assert re.findall(rb"HTTP/1\.1 (\d+)", data) == [b"200", b"400", b"404"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content_Length": "0"},
        {"Content_Length": "nonsense"},
        {"Content_Length": "5\r\nContent-Length: 5"},
        {"Content_Length": None, "Transfer_Encoding": "chunked"},
        {"Content_Length": None, "Transfer_Encoding": "x"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/healthz"])
def test_a_body_where_none_belongs_is_not_taken_for_the_next_request(house, path, headers):
    with house.connect() as connection:
        connection.request("GET", path, b"GET /config HTTP/1.1\r\nHost: localhost\r\n\r\n", **headers)

        answer = connection.answer()

        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert connection.at_end()


@pytest.mark.parametrize(
    "line",
    ["nonsense", "Content-Length : 5", "X Y: z", "\u00fc: 1", "X: a\r", "X: a\rY: b", "\r"],
)
def test_headers_behind_a_malformed_line_are_not_overlooked(house, line):
    head = f"GET / HTTP/1.1\r\nHost: localhost\r\n{line}\r\nOrigin: http://evil.example\r\n\r\n"
    with house.connect() as connection:
        connection.send(head.encode("latin-1"))

        answer = connection.answer()

        assert (answer.status, answer.headers["Connection"]) == (400, "close")


@pytest.mark.parametrize("wish", [b"HTTP/1.0", b"HTTP/1.1\r\nConnection: Close"])
def test_a_connection_is_closed_for_who_wants_that(house, wish):
    with house.connect() as connection:
        connection.send(b"GET /healthz " + wish + b"\r\nHost: localhost\r\n\r\n")

        answer = connection.answer()

        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert connection.at_end()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow",
        b"POST /approve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_a_silent_client_is_hung_up(serve, sent):
    house = serve(request_seconds=SOON)
    with house.connect() as connection:
        connection.send(sent)

        assert connection.at_end()


def test_a_client_that_drips_is_hung_up(serve):
    """A byte now and then does not prolong the time that a request may take."""
    house = serve(request_seconds=0.2)
    with house.connect() as connection:
        connection.socket.settimeout(0.05)
        for byte in b"GET / HTTP/1.1\r\nX-Slow: " + b"x" * 1000:
            try:
                connection.send(bytes([byte]))
                assert connection.at_end()
            except TimeoutError:
                continue
            except ConnectionError:  # A byte was under way when the server closed.
                pass
            return
    raise AssertionError("it may drip for ever")


def test_a_kept_connection_is_hung_up_when_it_falls_silent(serve):
    house = serve(request_seconds=WHILE)
    with house.connect() as connection:
        assert connection.ask("GET", "/healthz").status == 200

        assert connection.at_end()


def test_who_sends_nothing_makes_room_for_who_does(serve):
    house = serve(connections=4)
    silent = [house.connect() for _ in range(4)]
    silent[1].send(b"GET / HTTP/1.1\r\nX-Half")

    assert house.ask("GET", "/healthz").status == 200

    assert silent[0].at_end()
    assert silent[3].ask("GET", "/healthz").status == 200


def test_a_kept_connection_makes_room_after_those_that_have_waited_longer(serve):
    house = serve(connections=3)
    kept, silent = house.connect(), house.connect()
    house.wait_for(waiting=2)
    kept.ask("GET", "/config")
    house.wait_for(waiting=2)
    house.connect()
    house.wait_for(waiting=3)

    house.connect()

    assert silent.at_end()
    assert kept.ask("GET", "/healthz").status == 200


def test_who_reads_nothing_of_the_page_makes_room_for_who_does(serve):
    house = serve(connections=2)
    house.server.page["/big.js"] = "text/javascript", b" " * (32 << 20)  # more than a socket takes
    deaf = [house.connect() for _ in range(2)]
    for connection in deaf:
        connection.request("GET", "/big.js", Authorization=None)
        assert connection.socket.recv(1) == b"H"

    assert house.ask("GET", "/healthz").status == 200


def test_streams_go_on_when_there_is_no_room(serve, caplog):
    house = serve(connections=2)
    streams = [house.delegate(), house.delegate(hermes_session="c2")]
    for _ in range(LEAVING_MOST + 10):
        with house.connect() as connection:
            # The answer can come before the request is sent.
            with contextlib.suppress(ConnectionError):
                connection.request("GET", "/healthz")
            answer = connection.answer()
            assert (answer.status, error_of(answer)) == (503, "no_room")
            assert int(answer.headers["Retry-After"]) > 0
            assert SECURITY_HEADERS.items() <= dict(answer.headers).items()

    house.hermes.run(1).end("completed", output="Done.")
    house.hermes.run(2).end("completed", output="Done.")

    for stream in streams:
        assert stream.read()[-1]["type"] == "done"
    assert [record.getMessage() for record in caplog.records if "connection" in record.getMessage()] == [
        "connection.refused client=127.0.0.1 connections=2"
    ]
    house.wait_for(waiting=2)
    assert house.ask("GET", "/healthz").status == 200


def test_a_server_without_descriptors_neither_spins_nor_dies(serve, caplog):
    """It is given no more than it has, so that accept() fails until there are some again."""
    house = serve()
    stream = house.delegate()
    run = house.hermes.run()
    house.hermes.wait_for("GET", "/v1/runs/run_1/events")
    clients = [socket.socket() for _ in range(3)]
    house.stack.callback(lambda: [client.close() for client in clients])
    accept, failed = house.server.get_request, queue.SimpleQueue()

    def watched():
        try:
            return accept()
        except OSError:
            failed.put(time.monotonic())
            raise

    house.server.get_request = watched
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        for client in clients:
            client.connect(("127.0.0.1", house.port))
        first, _, third = [failed.get(timeout=TIMEOUT) for _ in range(3)]
        run.emit("tool.started", tool="terminal")
        stream.wait("tool")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert third - first >= 2 * ACCEPT_PAUSE
    assert caplog.text.count("connection.unaccepted") == 1
    clients[0].sendall(f"GET /healthz HTTP/1.1\r\nHost: {house.host}\r\n\r\n".encode())

    assert clients[0].recv(100).startswith(b"HTTP/1.1 200 ")
    run.end("completed", output="Done.")
    assert stream.read()[-1]["type"] == "done"


# ---- streams -----------------------------------------------------------------


def test_a_client_without_chunks_gets_its_stream_plain(serve):
    house = serve()
    body = json.dumps({"hermes_session": "c1", "lines": [{"speaker": "user", "text": "Work."}]})
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with house.connect() as connection:
        connection.send(f"POST /delegate HTTP/1.0\r\nConnection: keep-alive\r\n{head}\r\n{body}".encode())
        house.hermes.run().end("completed", output="Done.")

        answer = connection.answer()

        assert "Transfer-Encoding" not in answer.headers
        assert answer.headers["Connection"] == "close"
        assert json.loads(answer.data.splitlines()[-1])["say"] == ["Done."]
        assert connection.at_end()


def test_a_delegation_is_answered_by_its_updates(serve):
    house = serve()
    stream = house.delegate()
    run = house.hermes.run()
    run.emit("tool.started", tool="terminal", preview="ls")
    run.end("completed", output="Three files.")

    updates = stream.read()

    assert stream.response.headers["Content-Type"] == "application/x-ndjson"
    assert stream.response.headers["X-Accel-Buffering"] == "no"
    assert updates[0]["type"] == "run"
    numbers = [update["seq"] for update in updates]
    assert numbers == sorted(set(numbers))
    assert [update["type"] for update in updates].count("done") == 1
    assert updates[-1]["say"] == ["Three files."]


def test_an_update_is_sent_at_once(serve):
    house = serve()
    stream = house.delegate()
    run = house.hermes.run()

    for number in range(3):
        run.emit("tool.started", tool=f"tool {number}")
        assert stream.wait("tool")["label"] == f"using tool {number}"


def test_a_page_that_comes_back_misses_nothing_and_sees_nothing_twice(serve):
    """Twenty times it leaves in the middle of a run that goes on."""
    house = serve()
    stream = house.delegate()
    run = house.hermes.run()
    seen = []

    for number in range(20):
        for part in range(3):
            run.emit("tool.started", tool=f"tool {number}.{part}")
        seen += stream.updates[1:] if not seen else []
        seen.append(stream.wait("tool"))
        stream.vanish()
        after = seen[-1]["seq"]
        stream = house.connect().open("GET", f"/runs/{stream.run_id}/updates?after={after}")
    run.end("completed", output="Done.")
    seen += stream.read()[1:]

    whole = house.connect().open("GET", f"/runs/{stream.run_id}/updates").read()[1:]
    tools = [update["label"] for update in seen if update["type"] == "tool"]
    assert tools == [f"using tool {number}.{part}" for number in range(20) for part in range(3)]
    assert [update for update in whole if update["type"] != "run"] == [
        update for update in seen if update["type"] != "run"
    ]
    assert house.hermes.asked("POST", "/v1/runs/*/stop") == []


def test_two_pages_see_the_same(serve):
    house = serve()
    first = house.delegate()
    second = house.connect().open("GET", f"/runs/{first.run_id}/updates")
    run = house.hermes.run()
    run.emit("tool.started", tool="terminal")
    run.end("completed", output="Done.")

    assert first.read()[1:] == second.read()[1:]


def test_a_page_that_vanishes_does_not_stop_the_run(serve):
    house = serve()
    stream = house.delegate()
    run = house.hermes.run()
    run.emit("tool.started", tool="terminal")
    stream.wait("tool")

    stream.vanish()
    for number in range(50):
        run.emit("tool.completed", tool=f"tool {number}")
    run.end("completed", output="Done all the same.")

    updates = house.connect().open("GET", f"/runs/{stream.run_id}/updates").read()
    assert updates[-1]["say"] == ["Done all the same."]
    assert run.stops == 0


def test_a_quiet_stream_has_heartbeats_and_no_time_limit(serve):
    house = serve(heartbeat=WHILE / 5, request_seconds=WHILE)
    stream = house.delegate()

    for _ in range(10):
        stream.wait("heartbeat")
    house.hermes.run().end("completed", output="Done.")

    assert stream.read()[-1]["type"] == "done"


def test_an_unknown_run_has_no_stream(house):
    answer = house.ask("GET", "/runs/abc/updates")

    assert (answer.status, error_of(answer)) == (404, "run_not_found")


def test_the_runs_of_a_conversation_are_listed(serve):
    house = serve()
    stream = house.delegate("Count to three.", delegation_id="d1")
    house.hermes.run().end("completed", output="One, two, three.")
    done = stream.read()[-1]

    (listed,) = json.loads(house.ask("GET", "/runs?conversation=c1").data)["runs"]

    assert (listed["run_id"], listed["state"]) == (stream.run_id, "ended")
    assert (listed["request"], listed["delegations"]) == ("Count to three.", ["d1"])
    assert listed["result"] == done
    assert json.loads(house.ask("GET", "/runs?conversation=c2").data)["runs"] == []


def test_an_approval_and_a_stop_go_over_http(serve):
    house = serve(access=SECRETS["access"])
    stream = house.delegate()
    run = house.hermes.run()
    run.ask(request_id="q_1")
    question = stream.wait("approval")

    answered = house.ask("POST", "/approve", {"run_id": question["run_id"], "heard": "No."})
    late = house.ask("POST", "/approve", {"run_id": question["run_id"], "choice": "once"})
    stopped = house.ask("POST", f"/runs/{stream.run_id}/stop", {})

    assert json.loads(answered.data) == {"choice": "deny", "resolved": 1}
    assert (late.status, error_of(late)) == (409, "too_late")
    assert (stopped.status, json.loads(stopped.data)["run_id"]) == (202, stream.run_id)
    assert stream.read()[-1]["finish_reason"] == "cancelled"
    assert [answer["choice"] for answer in run.answers] == ["deny"]


# ---- calls -------------------------------------------------------------------


def opened(after=None):
    body = {"session": {"id": "live_1"}, "transport": {"type": "webrtc", "sdp": "v=0 answer\r\n"}}
    return reply(201, body, after=after)


def test_a_call_is_opened_over_http(serve):
    house = serve(access=SECRETS["access"])
    house.openai.add("POST", "/v1/live/sessions", opened())

    answer = house.ask("POST", "/session", CALL)

    told = json.loads(answer.data)
    assert told == {"session_id": "live_1", "sdp": "v=0 answer\r\n", "seconds_left": 7200}


def test_a_call_is_metered_over_http(serve):
    house = serve()
    house.openai.add("POST", "/v1/live/sessions", opened())
    house.ask("POST", "/session", CALL)

    told = house.ask("POST", "/session/meter", {"session_id": "live_1", "seconds": 15.5})
    other = house.ask("POST", "/session/meter", {"session_id": "live_2"})

    assert 7200 - TIMEOUT < json.loads(told.data)["seconds_left"] <= 7200
    assert (other.status, error_of(other)) == (409, "not_live")


def test_a_call_whose_page_hangs_up_meanwhile_is_hung_up(serve):
    house = serve()
    gate = threading.Event()
    house.openai.add("POST", "/v1/live/sessions", opened(after=gate))
    house.openai.add("POST", "/v1/live/sessions/live_1/hangup", reply(200))
    with house.connect() as connection:
        connection.request("POST", "/session", CALL)
        house.openai.wait_for("POST", "/v1/live/sessions")
    gate.set()

    house.openai.wait_for("POST", "/v1/live/sessions/live_1/hangup")


def test_a_call_whose_answer_cannot_be_sent_is_hung_up(serve):
    """The page resets the connection after it was last looked at."""
    house = serve()
    house.openai.add("POST", "/v1/live/sessions", opened())
    house.openai.add("POST", "/v1/live/sessions/live_1/hangup", reply(200))
    connection = house.connect()
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with logged("session.opened", connection.socket.close):
        connection.request("POST", "/session", CALL)
        house.openai.wait_for("POST", "/v1/live/sessions/live_1/hangup")


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (reply(401, f"Incorrect API key: {SECRETS['openai']}"), 502, "openai_key_refused"),
        (reply(200, "<html>"), 502, "openai_garbled"),
        (reply(200, "{", cut_short=True), 504, "openai_unreachable"),
    ],
)
def test_an_upstream_s_failure_is_explained(serve, caplog, answer, status, code):
    house = serve()
    house.openai.add("POST", "/v1/live/sessions", answer)

    refused = house.ask("POST", "/session", CALL)

    assert (refused.status, error_of(refused)) == (status, code)
    assert "OpenAI" in json.loads(refused.data)["error"]["message"]
    assert f"code={code}" in caplog.text


# ---- the start and the end ---------------------------------------------------


def test_a_server_that_starts_takes_up_the_call_that_goes_on(build):
    house = build()
    now = time.time()
    house.app.journal.save_session(Session("live_1", "call", "c1", now, now))
    told = threading.Event()
    thread = threading.Thread(target=serve_until, args=(house.server, told.wait))

    thread.start()
    answer = house.ask("POST", "/session/meter", {"session_id": "live_1"})
    told.set()
    thread.join(TIMEOUT)

    assert 7200 - 2 * TIMEOUT < json.loads(answer.data)["seconds_left"] <= 7200


def test_a_shutdown_gives_every_stream_its_last_line(build):
    house = build(heartbeat=60)
    told, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (serve_until(house.server, told.wait), ended.set()))
    thread.start()
    streams = [house.delegate(), house.delegate(hermes_session="c2")]
    streams.append(house.connect().open("GET", f"/runs/{streams[0].run_id}/updates"))
    idle = house.connect()
    idle.ask("GET", "/healthz")
    left = []

    with logged("server.stopped", lambda: left.append(house.server.streams)):
        told.set()
        assert ended.wait(SHUTDOWN_SECONDS)

    thread.join(TIMEOUT)
    assert left == [0]
    for stream in streams:
        last = stream.read()[-1]
        assert (last["type"], last["code"]) == ("error", "closing")
        assert [update["type"] for update in stream.updates].count("error") == 1
    with pytest.raises(ConnectionRefusedError):
        house.connect()
