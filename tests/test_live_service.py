"""The stand-in for OpenAI's Live API: it must be as strict as the real one, or stricter.

The browser's part is played with aiortc on the service's own loop, so a whole call fits in
one process.
"""

import asyncio
import json
import time
import typing
import urllib.error
import urllib.request

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from live_service import (
    CLIENT_EVENTS,
    DATA_CHANNEL,
    DELEGATION,
    EVENTS,
    FORBIDDEN_VOICES,
    HISTORY_ITEM,
    MODELS,
    PAUSE_PASSES,
    SERVER_EVENTS,
    SESSION,
    VOICES,
    LiveService,
    Speaker,
    peak,
)
from openai.types import live
from openai.types.live import connect_server_event, initial_item_param
from pydantic import BaseModel

from hermes_voice import OpenAI, UpstreamError

MINIMAL = {"model": "gpt-live-1"}
QUICK = {
    "start_delay": 0.02,
    "ack_delay": 0.1,
    "reply_delay": 0.1,
    "speech_rate": 200,
    "drain_delay": 0.05,
}

SERVER_TYPES = {
    typing.get_args(each.model_fields["type"].annotation)[0]: each
    for each in typing.get_args(typing.get_args(connect_server_event.ConnectServerEvent)[0])
}


class Caller:
    """What a page and its sidecar do in a call, or get wrong."""

    def __init__(self, service):
        self.service = service
        self.events = []
        self.loud = False
        self.heard_peak = 0
        self._sent = 0

    def dial(self, label="oai-events", **config):
        offer = self.service.run(self._offer(label))
        status, answer, _ = post(self.service, create(offer, MINIMAL | config))
        assert status == 201
        self.service.run(self._accept(answer["transport"]["sdp"]))
        return self.service.session

    def send(self, type, **fields):
        """Send an event with an event_id of its own, unless the fields hold one."""
        self._sent += 1
        event = {"type": type, "event_id": f"client_{self._sent}"} | fields
        self.send_text(json.dumps(event))
        return event["event_id"]

    def send_text(self, text):
        async def send():
            self._channel.send(text)

        self.service.run(send())

    def say(self, content, channel="commentary", delegation_id=None):
        kind = f"session.{channel}.append"
        return self.send(kind, delegation_id=delegation_id, content=content)

    def wait(self, type, count=1):
        def nth():
            found = [event for event in self.events if event["type"] == type]
            return len(found) >= count and found[count - 1]

        return self.service.wait_for(nth, about=f"{type} number {count} at the caller")

    def types(self):
        return [event["type"] for event in self.events]

    def wait_transcript(self, side, text):
        about = f"the {side} transcript {text!r}"
        self.service.wait_for(lambda: self.transcript(side) == text, about=about)

    def transcript(self, side):
        kind = f"session.{side}_transcript.delta"
        return "".join(event["delta"] for event in self.events if event["type"] == kind)

    def take_microphone_away(self):
        self._sender.replaceTrack(None)

    def leave(self):
        self.service.run(self._peer.close())

    async def _offer(self, label):
        self._peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._sender = self._peer.addTrack(Speaker(lambda: self.loud))
        self._channel = self._peer.createDataChannel(label)
        self._channel.on("message", lambda text: self.events.append(json.loads(text)))
        self._peer.on("track", lambda track: asyncio.ensure_future(self._listen(track)))
        await self._peer.setLocalDescription(await self._peer.createOffer())
        return self._peer.localDescription.sdp

    async def _accept(self, answer):
        await self._peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))

    async def _listen(self, track):
        while True:
            try:
                self.heard_peak = max(self.heard_peak, peak(await track.recv()))
            except MediaStreamError:
                return


def create(offer, session=MINIMAL):
    return {"session": session, "transport": {"type": "webrtc", "sdp": offer}}


def post(service, body, path="/live/sessions", headers=None, timeout=5):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    return ask(service, path, data, headers, timeout)


def ask(service, path, data=None, headers=None, timeout=5):
    """Return status, body and headers of the answer; the body is None where it is no JSON."""
    headers = {"Authorization": f"Bearer {service.key}"} | (headers or {})
    request = urllib.request.Request(service.url + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        response = opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        text = response.read()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(text) if is_json else None, dict(response.headers)


@pytest.fixture
def service():
    with LiveService(**QUICK) as service:
        yield service


@pytest.fixture
def caller(service):
    """A caller that has not dialled. In the end, all it was sent must fit the vendor's types."""
    caller = Caller(service)
    yield caller
    caller.leave()
    for event in caller.events:
        assert_fits(SERVER_TYPES[event["type"]], event)


@pytest.fixture
def session(service, caller):
    """A session that has started, with the caller in it."""
    caller.dial()
    caller.wait("session.started")
    return service.session


@pytest.fixture(scope="module")
def offer():
    with LiveService() as service:
        caller = Caller(service)
        text = service.run(caller._offer("oai-events"))
        caller.leave()
    return text


def assert_fits(model, event):
    """Hold an event against the vendor's type, which by itself would allow more fields."""
    unknown = []

    def walk(value):
        if isinstance(value, BaseModel):
            unknown.extend(value.model_extra or ())
            for name in value.model_fields_set:
                walk(getattr(value, name))
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(model.model_validate(event, strict=True))
    assert unknown == []


# ---- tables against the vendor's types ---------------------------------------


def names(shape):
    return {name.rstrip("!") for name in shape}


def required(shape):
    return {name[:-1] for name in shape if name.endswith("!")}


@pytest.mark.parametrize(
    ("shape", "theirs"),
    [
        (SESSION, live.media_session_config_param.MediaSessionConfigParam),
        (DELEGATION, live.ClientDelegationParam),
        (DATA_CHANNEL, live.DataChannelConfigParam),
        (HISTORY_ITEM, initial_item_param.User),
        (HISTORY_ITEM, initial_item_param.Assistant),
        (EVENTS["session.commentary.append"], live.CommentaryAppendEventParam),
        (EVENTS["session.thinking.append"], live.ThinkingAppendEventParam),
        (EVENTS["session.instructions.append"], live.InstructionsAppendEventParam),
        (EVENTS["session.update"], live.SessionUpdateEventParam),
        (EVENTS["session.input_audio.mute"], live.InputAudioMuteEventParam),
        (EVENTS["session.input_audio.unmute"], live.InputAudioUnmuteEventParam),
        (EVENTS["session.close"], live.SessionCloseEventParam),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shapes_have_the_vendors_fields(shape, theirs):
    # Triggers belong to a kind of delegation that the stand-in does without.
    hints = typing.get_type_hints(theirs, include_extras=True)
    needed = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.Required}

    assert names(shape) == set(hints) - {"triggers"}
    assert required(shape) == needed


def test_events_and_voices_are_the_vendors():
    clients = {
        typing.get_args(each.model_fields["type"].annotation)[0]
        for each in typing.get_args(typing.get_args(live.ClientEvent)[0])
    }

    assert set(CLIENT_EVENTS) < clients
    assert set(SERVER_EVENTS) < set(SERVER_TYPES)
    assert set(typing.get_args(live.BuiltInVoice)) < VOICES
    assert not VOICES & FORBIDDEN_VOICES


# ---- opening a session -------------------------------------------------------

EVERYTHING = {
    "model": "gpt-live-1.1",
    "instructions": "Be brief.",
    "audio": {"output": {"voice": "cedar"}},
    "delegation": {"type": "client", "acknowledgement_delay_ms": 1500},
    "client": {
        "data_channel": {
            "allowed_client_events": list(CLIENT_EVENTS),
            "allowed_server_events": [{"type": each} for each in SERVER_EVENTS],
        }
    },
    "idle_timeout_s": 30,
    "wake_policy": {"type": "speech", "vad_threshold": 0.5},
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "It is Monday."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}], "status": "completed"},
    ],
    "safety_identifier": "user-1",
    "store": False,
}


def test_session_is_created_and_counted(service, offer):
    status, answer, _ = post(service, create(offer))

    assert status == 201
    assert_fits(live.LiveCreateResponse, answer)
    assert answer["session"]["id"].startswith("live_")
    assert answer["transport"]["sdp"].startswith("v=0\r\n")
    assert service.creates == 1
    assert service.open_sessions == [service.session]
    assert service.violations == []


@pytest.mark.parametrize(
    "session",
    [
        EVERYTHING,
        MINIMAL | {"delegation": None, "instructions": None, "safety_identifier": None},
        MINIMAL | {"audio": {"output": {"voice": {"id": "voice_1"}}}},
        MINIMAL | {"client": {"data_channel": {"allowed_client_events": "all"}}},
        MINIMAL | {"client": {"data_channel": {"allowed_server_events": []}}},
    ],
)
def test_everything_the_schema_allows_is_accepted(service, offer, session):
    status, _, _ = post(service, create(offer, session))

    assert status == 201
    assert service.session.config == session


def message(role, *parts):
    return {"role": role, "content": [{"type": kind, "text": "x"} for kind in parts]}


@pytest.mark.parametrize(
    ("session", "status", "code", "param"),
    [
        ({}, 400, "invalid_value", "session.model"),
        ({"model": 1}, 400, "invalid_value", "session.model"),
        ({"model": "gpt-5"}, 403, "model_not_found", "session.model"),
        ({"keywords": []}, 400, "unknown_parameter", "session.keywords"),
        ({"turn_detection": None}, 400, "unknown_parameter", "session.turn_detection"),
        ({"audio": {"format": {}}}, 400, "unknown_parameter", "session.audio.format"),
        ({"audio": {"input": {}}}, 400, "unknown_parameter", "session.audio.input"),
        (
            {"audio": {"output": {"voice": "fable"}}},
            403,
            "forbidden",
            "session.audio.output.voice",
        ),
        (
            {"audio": {"output": {"voice": "bob"}}},
            400,
            "invalid_value",
            "session.audio.output.voice",
        ),
        ({"instructions": 7}, 400, "invalid_value", "session.instructions"),
        ({"instructions": "x" * 65_537}, 400, "invalid_value", "session.instructions"),
        ({"delegation": {}}, 400, "invalid_value", "session.delegation.type"),
        ({"delegation": {"type": "responses"}}, 400, "invalid_value", "session.delegation.type"),
        (
            {"delegation": {"type": "client", "acknowledgement_delay_ms": "0"}},
            400,
            "invalid_value",
            "session.delegation.acknowledgement_delay_ms",
        ),
        ({"client": {}}, 400, "invalid_value", "session.client.data_channel"),
        (
            {"client": {"data_channel": {"allowed_client_events": ["session.start"]}}},
            400,
            "invalid_value",
            "session.client.data_channel.allowed_client_events[0]",
        ),
        (
            {"client": {"data_channel": {"allowed_server_events": ["info"]}}},
            400,
            "invalid_value",
            "session.client.data_channel.allowed_server_events[0]",
        ),
        ({"idle_timeout_s": 30.0}, 400, "invalid_value", "session.idle_timeout_s"),
        ({"idle_timeout_s": True}, 400, "invalid_value", "session.idle_timeout_s"),
        ({"wake_policy": {"type": "word"}}, 400, "invalid_value", "session.wake_policy.type"),
        (
            {"wake_policy": {"type": "speech", "vad_threshold": 2}},
            400,
            "invalid_value",
            "session.wake_policy.vad_threshold",
        ),
        ({"input": [message("user", "input_text")] * 129}, 400, "invalid_value", "session.input"),
        (
            {"input": [{"role": "user", "content": [{"text": "x" * 32_800}]}]},
            400,
            "invalid_value",
            "session.input",
        ),
        (
            {"input": [message("system", "input_text")]},
            400,
            "invalid_value",
            "session.input[0].role",
        ),
        (
            {"input": [message("user", "text")]},
            400,
            "invalid_value",
            "session.input[0].content[0].type",
        ),
        (
            {"input": [message("assistant", "input_text")]},
            400,
            "invalid_value",
            "session.input[0].content[0].type",
        ),
        (
            {"input": [message("user", "input_text", "input_text")]},
            400,
            "invalid_value",
            "session.input[0].content",
        ),
        ({"input": [message("user")]}, 400, "invalid_value", "session.input[0].content"),
        ({"store": "no"}, 400, "invalid_value", "session.store"),
    ],
)
def test_session_outside_the_schema_is_refused(service, offer, session, status, code, param):
    body = create(offer, MINIMAL | session if session else session)

    answered, answer, _ = post(service, body)

    error = answer["error"]
    assert (answered, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert len(service.violations) == 1
    assert service.sessions == []


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "not a dict"),
        ({"session": MINIMAL}, 400, "'transport'"),
        ({"session": MINIMAL, "transport": {"type": "webrtc"}}, 400, "'transport.sdp'"),
        ({"session": MINIMAL, "transport": {"type": "websocket"}}, 400, "Only the webrtc"),
        (create("v=0\r\n") | {"model": "gpt-live-1"}, 400, "Unknown parameter: 'model'"),
    ],
)
def test_other_bodies_are_refused(service, body, status, part):
    answered, answer, _ = post(service, body)

    assert answered == status
    assert part in answer["error"]["message"]
    assert len(service.violations) == 1


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (str.strip, "EOF"),
        (lambda sdp: sdp.replace("\r\n", "\n"), "EOF"),
        (lambda sdp: sdp.replace("\r\n", "\n", 1), "invalid syntax"),
        (lambda sdp: " " + sdp, "invalid syntax"),
        (lambda sdp: sdp[: sdp.index("m=application")], "no m=application"),
        (lambda sdp: sdp.replace("m=audio", "m=video"), "no m=audio"),
        (lambda sdp: sdp.replace("a=candidate", "a=candidat"), "no a=candidate"),
        (lambda sdp: sdp.replace("a=fingerprint", "a=thumb"), "no a=fingerprint"),
        (lambda sdp: sdp.replace("typ host", "typ"), "Failed to parse offer"),
    ],
)
def test_damaged_offer_is_refused(service, offer, damage, part):
    status, answer, _ = post(service, create(damage(offer)))

    assert (status, answer["error"]["code"]) == (400, "invalid_offer")
    assert answer["error"]["message"].startswith("Failed to parse offer: ")
    assert part in answer["error"]["message"]
    assert len(service.violations) == 1


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Authorization": "Bearer sk-wrong"}, 401, "invalid_api_key"),
        ({"Authorization": ""}, 401, "invalid_api_key"),
        ({"OpenAI-Alpha": "live=v1"}, 403, "live_api_access_denied"),
        ({"Content-Type": "application/sdp"}, 415, "invalid_value"),
    ],
)
def test_wrong_headers_are_refused(service, offer, headers, status, code):
    answered, answer, _ = post(service, create(offer), headers=headers)

    assert (answered, answer["error"]["code"]) == (status, code)
    assert len(service.violations) == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/live/sessions?model=gpt-live-1", 400),
        ("/live/client_secrets", 404),
        ("/live/sessions/live_1/fork", 404),
        ("/live/sessions/live_1/hangup", 404),
    ],
)
def test_wrong_urls_are_refused(service, offer, path, status):
    answered, _, _ = post(service, create(offer), path)

    assert answered == status
    assert len(service.violations) == 1


def test_models_are_listed_one_by_one(service):
    for name in MODELS:
        assert ask(service, f"/models/{name}")[1]["id"] == name
    assert service.violations == []

    assert ask(service, "/models/gpt-5")[0] == 404
    assert len(service.violations) == 1


# ---- announced failures ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("invalid_api_key", 401, "invalid_api_key"),
        ("live_api_access_denied", 403, "live_api_access_denied"),
        ("model_not_found", 403, "model_not_found"),
        ("forbidden_voice", 403, "forbidden"),
        ("rate_limit", 429, "rate_limit_exceeded"),
        ("insufficient_quota", 429, "insufficient_quota"),
        ("credit_balance_exhausted", 400, "credit_balance_exhausted"),
        ("server_error", 500, "server_error"),
    ],
)
def test_announced_failure_happens_once_and_is_nobodys_fault(service, offer, name, status, code):
    service.fail_next(name)

    answered, answer, headers = post(service, create(offer))

    assert (answered, answer["error"]["code"]) == (status, code)
    assert ("Retry-After" in headers) == (name == "rate_limit")
    assert post(service, create(offer))[0] == 201
    assert service.creates == 2
    assert service.violations == []


def test_announced_mishaps_happen(service, offer):
    service.fail_next("nonsense")
    assert post(service, create(offer))[:2] == (200, None)

    service.fail_next("reset")
    with pytest.raises(ConnectionResetError):
        post(service, create(offer))

    service.fail_next("hang")
    with pytest.raises(TimeoutError):
        post(service, create(offer), timeout=0.2)

    assert service.creates == 3
    assert service.violations == []


def test_redirect_that_is_followed_is_noticed(service, offer):
    service.fail_next("redirect")

    post(service, create(offer))

    assert service.followed == [{"method": "GET", "authorization": True}]
    assert service.violations == ["followed a redirect with the key"]


def test_failures_can_be_announced_for_other_requests(service, offer):
    post(service, create(offer))
    service.fail_next("server_error", on="hangup")
    service.fail_next("invalid_api_key", on="models")

    assert post(service, {}, f"/live/sessions/{service.session.id}/hangup")[0] == 500
    assert ask(service, "/models/gpt-live-1")[0] == 401
    assert service.session.state == "created"


def test_announced_violation_is_tolerated(service):
    service.tolerate("not valid JSON")

    post(service, b"{")
    post(service, {})

    assert len(service.tolerated) == len(service.violations) == 1


# ---- start -------------------------------------------------------------------


def test_session_starts_with_its_configuration(service, caller):
    caller.dial(**EVERYTHING)

    started = caller.wait("session.started")["session"]

    assert started["id"] == service.session.id
    assert started["model"] == "gpt-live-1.1"
    assert started["audio"] == {"output": {"voice": "cedar"}}
    assert started["delegation"]["acknowledgement_delay_ms"] == 1500
    assert started["input"] == EVERYTHING["input"]
    assert 7100 < started["expires_at"] - time.time() <= 7200
    assert service.wait_live() is service.session


def test_nothing_may_be_sent_before_the_start(service, caller):
    service.start_delay = None
    session = caller.dial()
    service.wait_for(lambda: caller._channel.readyState == "open")

    caller.say("Too early.")
    service.wait_for("session.commentary.append")

    assert session.state == "created"
    assert service.violations == ["session.commentary.append: sent before session.started"]
    assert caller.events == []


def test_channel_of_another_name_is_noticed(service, caller):
    caller.dial(label="events")

    service.wait_for(lambda: service.violations)

    assert service.violations == ["the data channel is called 'events'"]


# ---- appends and speech ------------------------------------------------------


def test_commentary_is_acknowledged_and_then_spoken(service, caller, session):
    event_id = caller.say("Staging is healthy.")

    acknowledged = caller.wait("session.commentary.appended")
    spoken = service.wait_spoken("healthy")

    assert acknowledged["client_event_id"] == event_id
    assert acknowledged["start_ms"] % 200 == 0
    assert acknowledged["end_ms"] == acknowledged["start_ms"] + 200
    assert (spoken.source, spoken.event_id) == ("commentary", event_id)
    assert spoken.said == spoken.text
    assert spoken.ended_at - spoken.started_at < 1
    caller.wait_transcript("output", "Staging is healthy.")
    assert service.violations == []


def test_voice_is_a_tone_between_silences(service, caller, session):
    service.speech_rate = 100
    quiet = caller.heard_peak

    caller.say("This is long enough to be heard.")
    service.wait_for(lambda: caller.heard_peak > 4000)

    assert quiet < 64
    assert session.talking
    service.wait_spoken("heard")
    assert not session.talking


def test_second_commentary_cuts_the_first_off_in_the_middle_of_a_word(service, caller, session):
    service.speech_rate = 60
    caller.say("Extraordinarily-long-words-are-hard-to-say.")
    service.wait_for(lambda: session.talking)

    caller.say("Second.")
    service.wait_spoken("Second.")

    first, second = session.spoken
    assert first.cut
    assert first.text.startswith(first.said)
    assert 0 < len(first.said) < len(first.text)
    assert not second.cut
    caller.wait_transcript("output", f"{first.said} Second.")
    assert service.violations == []


def test_commentary_in_a_burst_leaves_only_the_last(service, caller, session):
    for text in ("One.", "Two.", "Three."):
        caller.say(text)

    service.wait_spoken("Three.")

    assert [(each.said, each.cut) for each in session.spoken] == [
        ("", True),
        ("", True),
        ("Three.", False),
    ]


@pytest.mark.parametrize("channel", ["thinking", "instructions"])
def test_silent_appends_are_acknowledged_only(service, caller, session, channel):
    caller.say("The user looks at the calendar.", channel)

    caller.wait(f"session.{channel}.appended")

    assert session.contents(channel) == ["The user looks at the calendar."]
    assert session.spoken == []


def test_acknowledgements_need_not_name_their_cause(service, caller, session):
    service.echo_client_event_id = False

    caller.say("A note.", "thinking")

    assert "client_event_id" not in caller.wait("session.thinking.appended")


def test_voice_may_stay_away(service, caller, session):
    service.reply_delay = None

    caller.say("Is anybody there?")
    caller.wait("session.commentary.appended")
    session.assistant_says("Hm.")

    assert [each.text for each in session.spoken] == ["Hm."]


def test_without_audio_nothing_is_placed(service, caller, session):
    service.track_gap = 0.5
    session.user_says("Hello.")
    caller.take_microphone_away()
    service.wait_for(lambda: service.violations)
    clock = session.clock_ms
    service.drain_delay = 3 * service.ack_delay

    lost = caller.say("Never placed.")
    caller.send("session.close")
    closed = caller.wait("session.closed")

    assert service.violations == ["no audio from the client for 0.5 s"]
    assert session.clock_ms == clock
    error = caller.events[-2]["error"]
    assert error["code"] == "context_injection_incomplete"
    assert error["client_event_id"] == lost
    assert closed["reason"] == "close_requested"
    assert session.spoken == []


# ---- the user ----------------------------------------------------------------


def test_user_is_transcribed_word_by_word(service, caller, session):
    assert session.user_says("What is on today?") is None
    assert session.user_says("Well?") is None
    caller.wait_transcript("input", "What is on today? Well?")

    deltas = [event for event in caller.events if "delta" in event]
    assert [each["delta"] for each in deltas] == ["What", " is", " on", " today?", " Well?"]
    assert all(each["start_ms"] % 200 == 0 for each in deltas)
    starts = [each["start_ms"] for each in deltas]
    assert starts == sorted(starts)


def test_delegation_is_an_id_and_the_time_of_the_last_words(service, caller, session):
    id = session.user_says("Check my mail.", delegate=True)

    event = caller.wait("session.delegation.created")

    caller.wait_transcript("input", "Check my mail.")
    last = next(each for each in caller.events if "mail" in each.get("delta", ""))
    assert event["delegation"] == {"id": id, "type": "delegation", "target": "client"}
    assert event["offset_ms"] == last["start_ms"]
    caller.say("No mail.", delegation_id=id)
    assert service.wait_spoken("No mail.").delegation_id == id
    assert service.violations == []


def test_delegation_can_come_before_the_last_words(service, caller, session):
    session.user_says("Check my mail please now.", delegate=True, delegate_before_last_words=True)
    caller.wait_transcript("input", "Check my mail please now.")

    kinds = [kind for kind in caller.types() if "output" not in kind]
    assert kinds[1:] == [
        "session.input_transcript.delta",
        "session.input_transcript.delta",
        "session.input_transcript.delta",
        "session.delegation.created",
        "session.input_transcript.delta",
        "session.input_transcript.delta",
    ]


def test_fragments_can_come_late_and_twice(service, caller, session):
    session.user_says("one two three", late_fragment=True, duplicate_event=True)
    service.wait_for(lambda: caller.types().count("session.input_transcript.delta") == 4)

    deltas = [event for event in caller.events if "delta" in event]
    assert [each["delta"] for each in deltas] == ["one", " three", " two", " two"]
    assert deltas[2]["start_ms"] <= deltas[1]["start_ms"]
    assert deltas[2] == deltas[3]


def test_a_fragment_can_come_after_the_delegation(service, caller, session):
    session.user_says("one two three", delegate=True, late_fragment=True, late_by=0.2)
    caller.wait("session.input_transcript.delta", count=3)

    kinds = [kind for kind in caller.types() if "input_transcript" in kind or "delegation" in kind]
    assert kinds == [
        "session.input_transcript.delta",
        "session.input_transcript.delta",
        "session.delegation.created",
        "session.input_transcript.delta",
    ]
    deltas = [event["delta"] for event in caller.events if event["type"] == kinds[0]]
    assert deltas == ["one", " three", " two"]


def test_delegation_can_come_without_words_and_twice(service, caller, session):
    first = session.delegate()

    session.delegate(id=first)
    caller.wait("session.delegation.created", count=2)
    second = session.delegate()

    assert first != second
    assert session.delegations == [first, first, second]


def test_user_can_talk_over_the_voice(service, caller, session):
    session.assistant_says("Let me tell you a very long story about this.", wait=False)
    service.wait_for(lambda: session.talking)

    session.user_says("Stop.", interrupt=True)

    assert session.spoken[0].cut
    assert not session.talking


# ---- automatic acknowledgement -----------------------------------------------


def test_delegation_is_acknowledged_aloud(service, caller, session):
    session.delegate()

    assert service.wait_spoken("Let me check.").source == "acknowledgement"
    caller.wait_transcript("output", "Let me check.")


@pytest.mark.parametrize(("channel", "expected"), [("commentary", 0), ("thinking", 0), ("instructions", 1)])
def test_context_cancels_a_pending_acknowledgement(service, caller, channel, expected):
    caller.dial(delegation={"type": "client", "acknowledgement_delay_ms": 200})
    session = service.wait_live()
    session.delegate()

    caller.say("It takes a while.", channel)
    caller.wait(f"session.{channel}.appended")
    session.user_says("Take your time.", word_delay=0.1)

    sources = [each.source for each in session.spoken]
    assert sources.count("acknowledgement") == expected


def test_acknowledgement_can_be_delayed_later_and_switched_off(service, caller, session):
    event_id = caller.send(
        "session.update",
        session={"delegation": {"type": "client", "acknowledgement_delay_ms": 200}},
    )
    updated = caller.wait("session.updated")
    assert updated["client_event_id"] == event_id
    assert updated["session"]["delegation"]["acknowledgement_delay_ms"] == 200
    session.delegate()
    assert session.spoken == []
    service.wait_spoken("Let me check.")

    service.auto_acknowledge = False
    session.delegate()
    session.user_says("Hello? Hello?", word_delay=0.15)

    assert len(session.spoken) == 1
    assert service.violations == []


# ---- what a client must not send ---------------------------------------------


def append(**changes):
    return {"type": "session.commentary.append", "delegation_id": None, "content": "x"} | changes


@pytest.mark.parametrize(
    ("event", "code", "param", "part"),
    [
        ({"type": "response.cancel"}, "invalid_value", "type", "Supported: session.commentary"),
        ({"type": ["session.close"]}, "invalid_value", "type", "Invalid event type"),
        ({}, "invalid_value", "type", "Invalid event type None"),
        ({"type": "session.start", "session": MINIMAL}, "session_already_started", None, "already"),
        ({"type": "response.create"}, "invalid_value", "type", "requires Responses delegation"),
        ({"type": "session.close", "reason": "bye"}, "unknown_parameter", "reason", "Unknown"),
        (append(text="x"), "unknown_parameter", "text", "Unknown"),
        (append(content=""), "invalid_value", "content", "nonempty"),
        (append(content=" \n"), "invalid_value", "content", "nonempty"),
        (append(content="x\ud83d"), "invalid_value", "content", "not valid Unicode"),
        (append(content=["x"]), "invalid_value", "content", "not a str"),
        (append(content="x" * 2001), "invalid_value", "content", "must not exceed 500 tokens."),
        (append(delegation_id=""), "invalid_value", "delegation_id", "unknown"),
        (append(delegation_id="item_0"), "invalid_value", "delegation_id", "unknown"),
        (append(event_id="x" * 513), "invalid_value", "event_id", "too long"),
        (
            {"type": "session.thinking.append", "content": "x"},
            "invalid_value",
            "delegation_id",
            "Missing",
        ),
        (
            {"type": "session.update", "session": {"instructions": "x"}},
            "immutable_field_update",
            "session.instructions",
            "cannot change",
        ),
        (
            {"type": "session.update", "session": {"delegation": {"type": "responses"}}},
            "immutable_field_update",
            "session.delegation.type",
            "cannot change",
        ),
        (
            {"type": "session.update", "session": {"speed": 2}},
            "unknown_parameter",
            "session.speed",
            "Unknown",
        ),
    ],
)
def test_event_outside_the_schema_is_refused(service, caller, session, event, code, param, part):
    event = {"event_id": "bad_1"} | event

    caller.send_text(json.dumps(event))
    error = caller.wait("error")["error"]

    assert (error["code"], error.get("param")) == (code, param)
    assert part in error["message"]
    assert error["client_event_id"] == event["event_id"]
    assert len(service.violations) == 1
    assert error["message"] in service.violations[0]
    assert session.state == "live"


@pytest.mark.parametrize(
    ("events", "part"),
    [
        ([append()], "no event_id"),
        ([append(event_id="a"), append(event_id="a")], "event_id 'a' was used before"),
        ([append(event_id="a", content="é" * 201)], "402 bytes of content, over 400"),
    ],
)
def test_careless_event_passes_but_is_noticed(service, caller, session, events, part):
    for event in events:
        caller.send_text(json.dumps(event))

    caller.wait("session.commentary.appended", count=len(events))

    assert len(service.violations) == 1
    assert part in service.violations[0]


@pytest.mark.parametrize("text", ["hello", "[]", '"session.close"'])
def test_what_is_no_event_is_noticed(service, caller, session, text):
    caller.send_text(text)

    service.wait_for(lambda: service.violations)

    assert service.violations[0].startswith("not an event: ")


def test_too_many_appends_at_once_are_refused(service, caller, session):
    service.ack_delay = 5

    for number in range(65):
        caller.say(f"Note {number}.", "thinking")

    assert caller.wait("error")["error"]["code"] == "rate_limit_exceeded"
    assert len(service.violations) == 1


def test_permissions_hold_both_ways(service, caller):
    allowed = {
        "allowed_client_events": ["session.close"],
        "allowed_server_events": [
            {"type": kind} for kind in ("info", "error", "session.started", "session.closed")
        ],
    }
    caller.dial(client={"data_channel": allowed})
    session = service.wait_live()

    session.user_says("Nobody sees this.", delegate=True)
    caller.say("Nobody hears this.")
    assert caller.wait("error")["error"]["code"] == "permission_denied"
    caller.send("session.close")
    caller.wait("session.closed")

    assert caller.types() == ["info", "session.started", "error", "session.closed"]
    assert caller.events[0]["code"] == "data_channel_permissions"
    assert "session.delegation.created" in [each.type for each in session.withheld]
    assert len(service.violations) == 1


# ---- mute, pause, usage ------------------------------------------------------


def test_muted_user_is_not_heard_but_time_goes_on(service, caller, session):
    muted = caller.send("session.input_audio.mute")
    assert caller.wait("session.input_audio.muted")["client_event_id"] == muted
    clock = session.clock_ms

    assert session.user_says("Nobody hears this.", delegate=True) is None
    caller.say("A note.", "thinking")
    caller.wait("session.thinking.appended")

    assert session.muted
    assert session.clock_ms > clock
    assert caller.transcript("input") == ""
    caller.send("session.input_audio.unmute")
    caller.wait("session.input_audio.unmuted")
    session.user_says("Hello.")
    caller.wait_transcript("input", "Hello.")
    assert service.violations == []


def test_microphone_is_measured(service, caller, session):
    service.silence_window = 0.5
    caller.loud = True
    service.wait_for(lambda: session.sound_heard_at)
    assert not session.microphone_silent

    caller.loud = False

    service.wait_for(lambda: session.microphone_silent)
    assert service.violations == []


def test_pause_holds_appends_until_the_user_speaks(service, caller, session):
    session.pause()
    caller.wait("session.paused")
    clock = session.clock_ms

    caller.say("Held back.")
    caller.loud = True
    service.wait_for(lambda: session.sound_heard_at)
    assert session.clock_ms == clock
    session.user_says("Hello?")
    service.wait_spoken("Held back.")

    kinds = [kind for kind in caller.types() if kind.startswith("session.")]
    assert kinds.index("session.resumed") < kinds.index("session.commentary.appended")
    assert service.violations == []


def test_what_is_sent_to_a_sleeping_session_is_noted_but_for_mute_and_close(service, caller, session):
    service.tolerate("sent while the session was paused")
    session.pause()
    slept = time.monotonic()
    service.wait_for(lambda: time.monotonic() - slept > PAUSE_PASSES)

    caller.send("session.input_audio.mute")
    caller.wait("session.input_audio.muted")
    assert service.tolerated == []
    caller.say("Held back.")
    service.wait_for(lambda: service.tolerated)

    caller.send("session.close")
    caller.wait("session.closed")
    assert len(service.tolerated) == 1
    assert service.violations == []


def test_idle_session_pauses_by_itself(service, caller):
    caller.dial(idle_timeout_s=1, wake_policy={"type": "speech"})
    session = service.wait_live()

    caller.wait("session.paused")
    session.resume()
    caller.wait("session.resumed")
    caller.send("session.close")

    usage = caller.wait("session.closed")["usage"]
    assert usage["seconds"] == usage["active_seconds"] + usage["paused_seconds"]
    assert session.clock_ms >= 1000


def test_usage_is_reported_as_it_grows(service, caller):
    service.usage_interval = 0.4
    caller.dial()

    third = caller.wait("session.usage.updated", count=3)

    assert third["usage"] == {"seconds": 1}
    assert 0 <= third["context_window"]["usage_ratio"] < 0.01


# ---- the end -----------------------------------------------------------------


def test_close_is_answered_once_after_a_moment(service, caller, session):
    event_id = caller.send("session.close")

    closed = caller.wait("session.closed")

    assert closed["reason"] == "close_requested"
    assert closed["client_event_id"] == event_id
    assert session.closed_reason == "close_requested"
    caller.leave()
    assert caller.types().count("session.closed") == 1
    assert service.open_sessions == []
    assert service.violations == []


def test_nothing_may_be_sent_after_the_close(service, caller, session):
    caller.send("session.close")
    caller.say("One more thing.", "thinking")

    assert caller.wait("error")["error"]["code"] == "session_closed"
    caller.wait("session.closed")
    caller.send("session.input_audio.mute")
    service.wait_for(lambda: len(service.violations) == 2)

    assert all("sent after the session was closed" in each for each in service.violations)
    assert caller.types().count("session.closed") == 1


def test_leaving_before_the_close_is_answered_is_noticed(service, caller, session):
    service.drain_delay = 1
    caller.send("session.close")
    service.wait_for(lambda: session.state == "closing")

    caller.leave()
    service.wait_for(lambda: session.state == "closed")

    assert service.violations == ["the peer connection closed before session.closed"]
    assert session.closed_reason == "connection_lost"


def test_leaving_without_a_close_loses_the_connection(service, caller, session):
    caller.leave()
    service.wait_for(lambda: session.state == "closed")

    assert session.closed_reason == "connection_lost"
    assert service.violations == []


def test_hangup_closes_a_session_once(service, caller, session):
    path = f"/live/sessions/{session.id}/hangup"

    assert ask(service, path, b"")[:2] == (200, None)
    assert caller.wait("session.closed")["reason"] == "close_requested"
    service.wait_for(lambda: session.state == "closed")
    assert ask(service, path, b"")[0] == 404

    assert service.hangups == [session.id, session.id]
    assert service.violations == []


def test_hangup_closes_a_session_nobody_joined(service, offer):
    post(service, create(offer))

    ask(service, f"/live/sessions/{service.session.id}/hangup", b"")
    service.wait_for(lambda: service.open_sessions == [])

    assert service.session.closed_reason == "close_requested"


def test_session_that_refuses_the_hangup_is_closed_by_who_attaches(service, caller, session):
    service.fail_next("server_error", on="hangup")

    assert OpenAI(service.url, service.key).hang_up(session.id) is True

    assert session.state == "closed"
    assert caller.wait("session.closed")["reason"] == "close_requested"
    assert service.violations == []


@pytest.mark.parametrize("how", ["server_error", "reset", "nonsense", "redirect", "hang"])
def test_session_that_refuses_all_of_it_is_not_called_closed(service, offer, how):
    post(service, create(offer))
    service.fail_next("server_error", on="hangup")
    service.fail_next(how, on="attach")
    openai = OpenAI(service.url, service.key)
    openai.read_seconds = 0.2

    with pytest.raises(UpstreamError):
        openai.hang_up(service.session.id)

    assert service.session.state == "created"
    assert service.followed == []


def test_session_that_does_not_say_that_it_closed_is_not_called_closed(service, caller, session):
    service.fail_next("server_error", on="hangup")
    service.drain_delay = 60
    openai = OpenAI(service.url, service.key)
    openai.read_seconds = 0.2

    with pytest.raises(UpstreamError, match="did not confirm"):
        openai.hang_up(session.id)

    assert session.state == "closing"


def test_attaching_is_refused_for_a_session_that_is_not_there(service):
    assert ask(service, "/live/sessions/live_1/attach")[0] == 404


def test_session_that_is_hung_up_while_it_starts_never_starts(service, caller):
    service.start_delay = service.drain_delay = 0.1
    session = caller.dial()
    service.wait_for(lambda: session._channel)

    ask(service, f"/live/sessions/{session.id}/hangup", b"")

    caller.wait("session.closed")
    assert caller.types() == ["session.closed"]


def test_session_expires(service, caller):
    service.session_lifetime = 0.3
    caller.dial()

    assert caller.wait("session.closed")["reason"] == "expired"


def test_service_can_close_the_session(service, caller, session):
    session.assistant_says("I am afraid I cannot say this, not at all.", wait=False)

    session.close("content")

    assert caller.wait("session.closed")["reason"] == "content"
    assert session.spoken[0].cut


def test_dropped_connection_ends_without_a_last_word(service, caller, session):
    session.drop()
    service.wait_for(lambda: caller._peer.connectionState == "closed")

    assert session.closed_reason == "connection_lost"
    assert "session.closed" not in caller.types()


def test_dead_session_says_nothing(service, caller, session):
    session.die()
    before = len(caller.events)

    session.send_raw({"type": "session.resumed", "event_id": "event_x"})
    caller.send("session.close")

    assert caller._channel.readyState == "open"
    assert len(caller.events) == before
    assert service.open_sessions == []


def test_session_survives_a_pulled_cable(service, caller, session):
    session.unplug()
    caller.say("Sent into the dark.", "thinking")
    clock = session.clock_ms
    assert not session.received

    session.plug_in()
    caller.wait("session.thinking.appended")

    assert session.clock_ms > clock
    assert service.violations == []
    service.track_gap = 0.5
    caller.take_microphone_away()
    service.wait_for(lambda: service.violations)


# ---- waiting -----------------------------------------------------------------


def test_waiting_in_vain_tells_what_happened_instead(service, caller, session):
    caller.say("A note.", "thinking")
    session.wait_event("session.thinking.append")

    with pytest.raises(AssertionError) as caught:
        service.wait_spoken("never", timeout=0.05)

    story = str(caught.value)
    assert "in vain for the words 'never'" in story
    assert "received: ['session.thinking.append']" in story
