"""The page's settings and its pairing with a server, in a real browser."""

import contextlib
import json
import re
import subprocess
import threading
import urllib.error
import urllib.request

import pytest
from playwright.sync_api import expect
from sidecar import TOKEN
from test_browser import Line, answering

from hermes_voice import WRONG_TOKENS

FIELDS = ["Voice", "Microphone", "Speaker", "Progress"]
NO_PERMISSION = """
    const nameless = (kind) => ({ kind, deviceId: "", label: "" });
    navigator.mediaDevices.enumerateDevices = async () => ["audioinput", "audiooutput"].map(nameless);
"""


class House(Line):
    """A line whose settings are looked at."""

    def settings(self):
        self.button("Settings").click()
        return self.page.get_by_role("dialog", name="Settings")

    def field(self, name):
        return self.page.get_by_label(name, exact=True)

    def stored(self):
        return json.loads(self.page.evaluate("localStorage.getItem('settings')"))

    def offered(self, name):
        return self.field(name).locator("option").all_text_contents()

    def asked_voice(self):
        return self.live.session.config["audio"]["output"]["voice"]


def house(browser, **options):
    return House(browser, answering("Yes."), **options)


# ---- the dialog --------------------------------------------------------------


def test_the_settings_are_a_dialog_for_keyboard_and_screen_reader(browser):
    with house(browser) as line:
        line.button("Settings").focus()
        line.page.keyboard.press("Enter")

        dialog = line.page.get_by_role("dialog", name="Settings")
        expect(dialog).to_be_visible()
        expect(line.field("Voice")).to_be_focused()
        for name in FIELDS:
            expect(dialog.get_by_role("combobox", name=name, exact=True)).to_be_visible()

        line.page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(line.button("Settings")).to_be_focused()


def test_what_the_server_decides_is_shown_with_where_it_is_set(browser):
    config = {"language": "German", "glossary": ["Nginx", {"term": "Kaya", "spoken": "kye a"}]}
    with house(browser, config=config) as line:
        dialog = line.settings()

        expect(dialog.get_by_text("German", exact=True)).to_be_visible()
        expect(dialog.get_by_text("Nginx, Kaya", exact=True)).to_be_visible()
        expect(dialog).to_contain_text("set on the server, by language and glossary in its config file")
        expect(line.button("Forget the access token on this device")).to_be_hidden()


def test_a_chosen_voice_speaks_in_the_next_call_also_after_a_reload(browser):
    with house(browser, config={"voice": "cedar"}) as line:
        line.settings()
        assert line.offered("Voice")[0] == "The server's choice: Cedar"
        line.field("Voice").select_option(label="Sage")
        line.button("Close").click()
        line.page.reload()

        line.start()
        assert line.asked_voice() == "sage"

        line.settings()
        expect(line.field("Voice")).to_have_value("sage")
        line.field("Voice").select_option(index=0)
        line.button("Close").click()
        line.button("Hang up").click()
        line.start()
        assert line.asked_voice() == "cedar"


def test_the_progress_is_kept(browser):
    with house(browser) as line:
        line.settings()
        expect(line.field("Progress")).to_have_value("normal")
        line.field("Progress").select_option(label="Quiet")
        line.page.reload()

        line.settings()
        expect(line.field("Progress")).to_have_value("quiet")


def test_settings_that_make_no_sense_are_left_out(browser):
    with house(browser) as line:
        stored = '{"voice": "nobody", "microphone": 7, "speaker": {}, "progress": "loud"}'
        line.page.evaluate("text => localStorage.setItem('settings', text)", stored)
        line.page.reload()

        line.settings()
        assert [line.field(name).input_value() for name in FIELDS] == ["", "", "", "normal"]
        line.button("Close").click()
        line.start()
        assert line.asked_voice() == "marin"


# ---- microphone and speaker --------------------------------------------------

TRACKS = """() => {
    window.tracks = [];
    const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (wanted) => {
      const stream = await open(wanted);
      tracks.push(...stream.getAudioTracks());
      return stream;
    };
}"""


def tracks(line):
    """Of every microphone that was opened: is it on, and what is it called?"""
    return line.page.evaluate("tracks.map((track) => [track.readyState, track.label])")


def test_another_microphone_takes_over_in_the_middle_of_a_call(browser):
    with house(browser) as line:
        line.page.evaluate(TRACKS)
        session = line.start()
        line.button("Mute").click()
        line.settings()

        line.field("Microphone").select_option(label="Fake Audio Input 2")

        # Not wait_for_function, whose eval the page's policy forbids once it has to wait.
        ended = "tracks.length == 2 && tracks[0].readyState == 'ended'"
        line.live.wait_for(lambda: line.page.evaluate(ended), about="the first microphone's end")
        assert tracks(line)[1] == ["live", "Fake Audio Input 2"]
        assert line.page.evaluate("tracks[1].enabled") is False, "it stays muted"
        line.button("Close").click()
        line.button("Unmute").click()
        line.live.wait_for(lambda: not session.microphone_silent, about="the other microphone's beep")
        assert line.live.creates == 1, "nothing was negotiated again"
        expect(line.status).to_have_text("Listening")


def live_tracks(line):
    return [label for state, label in tracks(line) if state == "live"]


def test_a_microphone_chosen_while_the_session_is_renewed_is_that_of_both(browser):
    with house(browser, session_lifetime=14, session_overtime=60) as line:
        line.page.evaluate(TRACKS)
        line.start()
        line.live.session_lifetime, line.live.create_delay = 7200, 4
        line.settings()
        line.live.wait_for(lambda: len(tracks(line)) == 2, timeout=15, about="the next session's microphone")

        line.field("Microphone").select_option(label="Fake Audio Input 2")

        line.live.wait_for(lambda: live_tracks(line) == ["Fake Audio Input 2"] * 2)
        second = line.live.wait_live(timeout=20, count=2)
        line.live.wait_for(lambda: line.live.open_sessions == [second], about="the end of the first session")
        line.live.wait_for(lambda: live_tracks(line) == ["Fake Audio Input 2"])
        line.live.wait_for(lambda: not second.microphone_silent, about="the other microphone's beep")


HELD = """() => {
    const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (wanted) => {
      await new Promise((resolve) => (window.allow = resolve));
      navigator.mediaDevices.getUserMedia = open;
      return open(wanted);
    };
}"""


WAITING = "Waiting for the microphone. Allow it if the browser asks…"


def test_a_microphone_that_is_allowed_after_the_hang_up_is_let_go_at_once(browser):
    with house(browser) as line:
        line.page.evaluate(TRACKS)
        line.page.evaluate(HELD)
        line.button("Start call").click()
        expect(line.status).to_have_text(WAITING)

        line.button("Hang up").click()
        expect(line.status).to_have_text("Off")
        line.page.evaluate("allow()")

        line.live.wait_for(lambda: [state for state, _ in tracks(line)] == ["ended"])
        assert line.live.creates == 0
        line.start()
        assert [state for state, _ in tracks(line)] == ["ended", "live"]


def test_a_microphone_chosen_while_the_first_one_is_being_opened_is_used(browser):
    with house(browser) as line:
        line.page.evaluate(TRACKS)
        line.page.evaluate(HELD)
        line.button("Start call").click()
        expect(line.status).to_have_text(WAITING)
        line.settings()
        line.field("Microphone").select_option(label="Fake Audio Input 2")

        line.page.evaluate("allow()")

        line.live.wait_live()
        line.live.wait_for(lambda: live_tracks(line) == ["Fake Audio Input 2"])


def test_the_chosen_devices_are_used_by_the_next_call(browser):
    with house(browser) as line:
        line.page.evaluate(TRACKS)
        line.settings()
        line.field("Microphone").select_option(label="Fake Audio Input 1")
        line.field("Speaker").select_option(label="Fake Audio Output 2")
        speaker = line.field("Speaker").input_value()
        line.button("Close").click()

        line.start()

        assert tracks(line) == [["live", "Fake Audio Input 1"]]
        expect(line.page.locator("#voice")).to_have_js_property("sinkId", speaker)


def test_another_speaker_is_used_at_once(browser):
    with house(browser) as line:
        line.start()
        line.settings()

        line.field("Speaker").select_option(label="Fake Audio Output 1")

        speaker = line.field("Speaker").input_value()
        expect(line.page.locator("#voice")).to_have_js_property("sinkId", speaker)
        assert line.stored()["speaker"] == speaker


def test_devices_that_are_gone_are_replaced_with_a_notice(browser):
    with house(browser) as line:
        line.page.evaluate(TRACKS)
        gone = {"microphone": "a-headset", "speaker": "a-headset"}
        line.page.evaluate("text => localStorage.setItem('settings', text)", json.dumps(gone))
        line.page.reload()
        line.page.evaluate(TRACKS)

        line.start()

        expect(line.log).to_contain_text("The microphone is not there any more. The default one is used now.")
        expect(line.log).to_contain_text("The speaker is not there any more. The default one is used now.")
        expect(line.page.locator("#voice")).to_have_js_property("sinkId", "")
        assert [state for state, _ in tracks(line)] == ["live"]
        assert line.stored() == gone, "it may come back tomorrow"


def test_a_microphone_that_is_unplugged_in_a_call_is_replaced(browser):
    with house(browser) as line:
        line.page.evaluate(TRACKS)
        session = line.start()

        line.page.evaluate("tracks[0].stop(); tracks[0].dispatchEvent(new Event('ended'))")

        expect(line.log).to_contain_text("The microphone is not there any more.")
        assert [state for state, _ in tracks(line)] == ["ended", "live"]
        line.live.wait_for(lambda: not session.microphone_silent)


UNPLUG = """() => {
    window.open = navigator.mediaDevices.getUserMedia;
    navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('', 'NotFoundError'));
    for (const track of tracks) {
      track.stop();
      track.dispatchEvent(new Event('ended'));
    }
}"""
PLUG_IN = "void (navigator.mediaDevices.getUserMedia = open)"
TELL_MEASURED = """() => {
    const measure = RTCPeerConnection.prototype.getStats;
    RTCPeerConnection.prototype.getStats = function () {
      console.info("measured");
      return measure.call(this);
    };
}"""
NOBODY = "Nobody hears you: the microphone is gone"


def plug_in(line):
    line.page.evaluate(PLUG_IN)
    line.page.evaluate("void navigator.mediaDevices.dispatchEvent(new Event('devicechange'))")


def choose_another(line):
    line.page.evaluate(PLUG_IN)
    line.settings()
    line.field("Microphone").select_option(label="Fake Audio Input 2")
    line.button("Close").click()


@pytest.mark.parametrize("mend", [plug_in, choose_another])
def test_a_microphone_that_nothing_replaces_is_a_state_until_there_is_one(browser, mend):
    with house(browser) as line:
        line.live.tolerate("no audio from the client")
        line.page.evaluate(TRACKS)
        session = line.start("Listening")

        line.page.evaluate(UNPLUG)
        expect(line.status).to_have_text(NOBODY)
        expect(line.log).to_contain_text("Plug one in, or choose one in the settings.")
        line.page.evaluate("void navigator.mediaDevices.dispatchEvent(new Event('devicechange'))")
        line.page.evaluate(TELL_MEASURED)
        for _ in range(4):  # after three it would be taken for a fault of the network
            with line.page.expect_console_message(lambda message: message.text == "measured"):
                pass
        expect(line.status).to_have_text(NOBODY)
        assert line.log.locator(".notice").count() == 1
        mend(line)

        expect(line.status).to_have_text("Listening")
        expect(line.log).to_contain_text("The microphone is back.")
        line.live.wait_for(lambda: not session.microphone_silent)


def test_a_speaker_that_is_unplugged_in_a_call_is_replaced(browser):
    with house(browser) as line:
        line.start()
        line.settings()
        line.field("Speaker").select_option(label="Fake Audio Output 1")
        voice = line.page.locator("#voice")
        expect(voice).not_to_have_js_property("sinkId", "")

        line.page.evaluate(NO_PERMISSION + "navigator.mediaDevices.dispatchEvent(new Event('devicechange'))")

        expect(voice).to_have_js_property("sinkId", "")
        expect(line.log).to_contain_text("The speaker is not there any more.")
        expect(line.field("Speaker")).to_have_value("")


def test_a_microphone_that_does_not_open_leaves_the_one_so_far(browser):
    with house(browser) as line:
        line.page.evaluate(TRACKS)
        line.start()
        line.settings()
        refuse = "() => Promise.reject(new DOMException('', 'NotReadableError'))"
        line.page.evaluate(f"void (navigator.mediaDevices.getUserMedia = {refuse})")

        line.field("Microphone").select_option(label="Fake Audio Input 2")

        expect(line.log).to_contain_text("in use by another program")
        assert [state for state, _ in tracks(line)] == ["live"]


def test_before_the_page_may_listen_no_device_has_a_name(browser):
    with house(browser) as line:
        line.page.evaluate(NO_PERMISSION)

        dialog = line.settings()

        assert line.offered("Microphone") == line.offered("Speaker") == ["The default one"]
        expect(dialog).to_contain_text("start a call first")


def test_where_the_browser_chooses_the_speaker_nothing_is_offered(browser):
    with house(browser) as line:
        line.page.evaluate("delete HTMLMediaElement.prototype.setSinkId")

        dialog = line.settings()

        expect(line.field("Speaker")).to_be_disabled()
        expect(dialog).to_contain_text("lets no page choose the speaker")
        line.button("Close").click()
        line.start()


# ---- pairing -----------------------------------------------------------------


def pairing_link(line):
    """What `--pair` prints beside the running server."""
    token = line.sidecar.command[line.sidecar.command.index("--access-token-file") + 1]
    command = [*line.sidecar.command[:2], "--access-token-file", token, "--pair", line.sidecar.url]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return printed.split()[-1]


def token_of(line):
    return line.page.evaluate("[localStorage.getItem('token'), sessionStorage.getItem('token')]")


def test_a_link_pairs_a_device_once_and_settings_forget_it(browser):
    with house(browser, token=TOKEN) as line:
        expect(line.field("Access token")).to_be_visible()
        link = pairing_link(line)
        line.page.goto("about:blank")

        line.page.goto(link)

        expect(line.log).to_contain_text("This device is paired")
        assert line.page.url == line.sidecar.url
        assert token_of(line) == [TOKEN, None]
        line.page.reload()
        expect(line.button("Start call")).to_be_visible()
        expect(line.field("Access token")).to_be_hidden()
        line.start()

        line.settings()
        line.button("Forget the access token on this device").click()

        expect(line.field("Access token")).to_be_visible()
        line.live.wait_for(lambda: not line.live.open_sessions, about="the end of the call")
        assert token_of(line) == [None, None]

        line.page.goto("about:blank")
        line.page.goto(link)
        expect(line.page.get_by_text("expired or was used before")).to_be_visible()
        expect(line.page.get_by_text("Or enter the token here")).to_be_visible()
        assert line.page.url == line.sidecar.url
        assert token_of(line) == [None, None]
        assert "device.paired" in line.sidecar.log
        assert link.partition("#pair=")[2] not in line.sidecar.log


def test_a_link_that_is_pasted_into_the_open_page_pairs_it_too(browser):
    with house(browser, token=TOKEN) as line:
        expect(line.field("Access token")).to_be_visible()

        line.page.evaluate("link => { location.href = link }", pairing_link(line))

        expect(line.log).to_contain_text("This device is paired")
        expect(line.button("Start call")).to_be_visible()
        assert line.page.url == line.sidecar.url


def test_a_paired_device_stays_paired_when_it_opens_a_bad_link(browser):
    with house(browser, token=TOKEN) as line:
        expect(line.field("Access token")).to_be_visible()
        line.page.evaluate("token => localStorage.setItem('token', token)", TOKEN)

        line.page.goto("about:blank")
        line.page.goto(f"{line.sidecar.url}#pair=garbage")

        expect(line.log).to_contain_text(re.compile("not this server's or not whole. Print a new one"))
        expect(line.button("Start call")).to_be_visible()
        assert token_of(line) == [TOKEN, None]
        assert line.page.url == line.sidecar.url


def guess(line):
    """Show the server a wrong token."""
    request = urllib.request.Request(f"{line.sidecar.url}config", headers={"Authorization": "Bearer wrong"})
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=10)


def test_a_device_with_a_stale_token_can_enter_the_right_one_after_many_wrong_ones(browser):
    with house(browser, token=TOKEN) as line:
        expect(line.field("Access token")).to_be_visible()
        line.page.evaluate("localStorage.setItem('token', 'stale')")
        guesses = [threading.Thread(target=guess, args=(line,)) for _ in range(WRONG_TOKENS)]
        for each in guesses:
            each.start()
        for each in guesses:
            each.join()

        line.page.reload()

        expect(line.page.get_by_text("Too many wrong access tokens. Check the token")).to_be_visible()
        line.field("Access token").fill(f"\u200b{TOKEN}\u00a0\u2026")
        line.field("Access token").press("Enter")
        expect(line.button("Start call")).to_be_visible()
        expect(line.field("Access token")).to_be_hidden()
        assert token_of(line) == [None, TOKEN]


# ---- how it looks ------------------------------------------------------------


@pytest.mark.parametrize("width", [320, 1100])
def test_the_settings_fit_the_screen(browser, width):
    with house(browser, config={"glossary": ["w" * 80, "Nginx"], "language": "l" * 100}) as line:
        line.page.set_viewport_size({"width": width, "height": 640})

        line.settings()

        assert line.page.evaluate("document.documentElement.scrollWidth") <= width
        dialog = "document.getElementById('choices')"
        assert line.page.evaluate(f"{dialog}.scrollWidth <= {dialog}.clientWidth")
        for name in FIELDS:
            box = line.field(name).bounding_box()
            assert box["height"] >= 44
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
