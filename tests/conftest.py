"""What tests share: where Chromium, Node and Hermes are, and when a test may be skipped.

A test that needs one of them asks for its fixture and is skipped with the reason where it
is missing. In CI (CI=true) nothing may be missing: there every skip is a failure.
"""

import contextlib
import os
import shutil
from importlib.util import find_spec

import pytest
from bench import Bench
from hermes_gateway import APPROVAL_SECONDS, VERSIONS, HermesGateway, find_hermes
from run import CHROMIUM_HINT, HERMES_HINT, NODE_HINT, find_chromium, find_node
from sidecar import CHROMIUM_FLAGS
from working_hermes import join_workers

EXPECT_MS = 30_000  # nothing takes so long where all is well, whatever the machine

IN_CI = os.environ.get("CI") == "true"

# With plain pytest, tests whose packages the machine does not have are left out.
PACKAGES = {
    "test_browser.py": ("playwright", "aiortc", "aiohttp"),
    "test_check.py": ("aiortc", "aiohttp", "cryptography"),
    "test_config.py": ("hypothesis",),
    "test_core.py": ("hypothesis",),
    "test_demo.py": ("playwright",),
    "test_end_to_end.py": ("playwright", "aiortc", "aiohttp"),
    "test_figures.py": ("playwright", "aiortc", "aiohttp"),
    "test_hostile.py": ("playwright", "aiortc", "aiohttp"),
    "test_lifecycle.py": ("playwright", "aiortc", "aiohttp"),
    "test_live_service.py": ("aiortc", "aiohttp", "openai"),
    "test_long_talk.py": ("playwright", "aiortc", "aiohttp"),
    "test_pair.py": ("zxingcpp",),
    "test_proxies.py": ("playwright", "aiortc", "aiohttp"),
    "test_talk.py": ("playwright", "aiortc", "aiohttp"),
    "test_restart.py": ("playwright", "aiortc", "aiohttp"),
    "test_settings.py": ("playwright", "aiortc", "aiohttp"),
}
collect_ignore = [
    name for name, packages in PACKAGES.items() if any(find_spec(package) is None for package in packages)
]
assert not (IN_CI and collect_ignore), f"left out in CI: {collect_ignore}"


def pytest_report_header():
    return [f"left out, run tests/run.py for it: {name}" for name in collect_ignore]


# A test is marked by what it asks for, so that `-m "not browser"` can leave it out.
MARKS = {"chromium_path": "browser", "hermes_python": "hermes"}


@pytest.fixture(scope="session")
def chromium_path():
    return found(find_chromium(), CHROMIUM_HINT)


@pytest.fixture(scope="session")
def browser(chromium_path):
    """One headless Chromium for all tests; each opens contexts of its own."""
    from playwright.sync_api import expect, sync_playwright  # Plain pytest has only what the machine has.

    expect.set_options(timeout=EXPECT_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=chromium_path, args=CHROMIUM_FLAGS, timeout=4 * EXPECT_MS
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def node_path():
    return found(find_node(), NODE_HINT)


@pytest.fixture(scope="session")
def openssl_path():
    return found(shutil.which("openssl"), "openssl (Debian: apt install openssl)")


@pytest.fixture(scope="session")
def nginx_path():
    return found(find_server("nginx"), "nginx (Debian: apt install nginx-light)")


@pytest.fixture(scope="session")
def caddy_path():
    return found(find_server("caddy"), "caddy (Debian: apt install caddy)")


@pytest.fixture(scope="session")
def systemd_analyze_path():
    return found(shutil.which("systemd-analyze"), "systemd-analyze (Debian: apt install systemd)")


def find_server(name):
    """Debian keeps some of them where only root's PATH leads."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin")


@pytest.fixture(scope="session")
def hermes_python():
    """A function: the Python that runs a version of Hermes."""
    installed = find_hermes()
    return lambda version: found(installed.get(version), f"Hermes {version}: {HERMES_HINT}")


@pytest.fixture(scope="module", params=VERSIONS)
def hermes(request, hermes_python):
    """A real Hermes of each version."""
    with HermesGateway(hermes_python(request.param), {"timeout": APPROVAL_SECONDS}) as gateway:
        gateway.warm_up()
        yield gateway


@pytest.fixture
def line(hermes, browser):
    """A page whose sidecar has a real Hermes."""
    from test_browser import Line

    with Line(browser, contextlib.nullcontext(hermes), {"approval_seconds": APPROVAL_SECONDS}) as line:
        yield line


@pytest.fixture
def gate(tmp_path):
    """A command that lasts until a test opens it."""
    with Gate(tmp_path / "gate") as gate:
        yield gate


class Gate:
    def __init__(self, path):
        os.mkfifo(path)
        self.command = f"head -n 1 {path}"
        self.end = os.open(path, os.O_RDWR)  # So that neither end waits for the other.

    def __enter__(self):
        return self

    def __exit__(self, *error):
        os.close(self.end)

    def open(self):
        os.write(self.end, b"open\n")


@pytest.fixture
def bench():
    """A function: a Bench with these settings."""
    with contextlib.ExitStack() as stack:
        stack.callback(join_workers)
        yield lambda **settings: Bench(stack, **settings)


def found(path, hint):
    if path is None:
        pytest.skip(f"not found: {hint}")
    return str(path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        for fixture in MARKS.keys() & set(item.fixturenames):
            item.add_marker(MARKS[fixture])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    return refuse_skip((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    return refuse_skip((yield))


def refuse_skip(report):
    """Turn a skip into a failure in CI. An expected failure is no skip."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a skip is a failure in CI: {report.longrepr[2]}"
    return report
