"""A strict stand-in for OpenAI's Live API, for tests.

It answers the HTTP request that opens a session, is the far end of the WebRTC call with a
real peer connection, and behaves on the data channel as the service does: a start that takes
a moment, acknowledgements on a clock that moves only with input audio, a voice that a second
commentary cuts off, a close that wants to be waited for.

    with LiveService() as service:
        ...  # a sidecar gets service.url and service.key, and a page dials
        session = service.wait_live()
        delegation = session.user_says("What is on today?", delegate=True)
        service.wait_spoken("Three things")
        assert service.violations == []

Whatever a client does that the service would answer with an error, and whatever it lets pass
at the user's cost, is added to `service.violations`. A test that misbehaves on purpose
announces it with `service.tolerate(...)`.

Public names are for the test's thread and block there; underscored ones run on the service's
own event loop. Lists may be read at any time. All times are time.monotonic().

Sections: limits, shapes, audio, voice, session, service.
"""

import asyncio
import functools
import heapq
import inspect
import itertools
import json
import re
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction

from aiohttp import web
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

# ---- limits ------------------------------------------------------------------

MODELS = ("gpt-live-1", "gpt-live-1.1")
VOICE_NAMES = """
    alloy ash ballad beacon bossa brise cedar cinder coral delta echo flitz gleam harema juni
    marin meridian nira noeul nuri quartz ripple sage shida shimmer shitan sillage stone tempo
    verse vesper willow
"""
VOICES = frozenset(VOICE_NAMES.split())
FORBIDDEN_VOICES = frozenset({"fable", "nova", "onyx"})

INSTRUCTIONS_TOKENS = 16_384
HISTORY_MESSAGES = 128
HISTORY_TOKENS = 8_192
APPEND_TOKENS = 500
# The project's own rule: the vendor's samples cut at 400 bytes, which needs no tokenizer and
# is safe in every script.
APPEND_BYTES = 400
EVENT_ID_CHARACTERS = 512
UNPLACED_APPENDS = 64

GRID = 200  # milliseconds, the step of every time on the session's timeline
SILENCE_PEAK = 64  # of 32,768: what a codec leaves of digital silence
LINGER = 1.0  # seconds between session.closed and the end of the peer connection

CLIENT_EVENTS = (
    "session.commentary.append",
    "session.thinking.append",
    "session.instructions.append",
    "session.update",
    "session.input_audio.mute",
    "session.input_audio.unmute",
    "session.close",
)
# What is placed while the session is paused is not documented, so a client waits.
WHILE_PAUSED = ("session.input_audio.mute", "session.input_audio.unmute", "session.close")
PAUSE_PASSES = 0.5  # seconds until the client must know of it
PATIENCE = 30.0  # seconds; nothing takes so long where all is well, whatever the machine
SERVER_EVENTS = (
    "info",
    "error",
    "session.started",
    "session.updated",
    "session.closed",
    "session.paused",
    "session.resumed",
    "session.usage.updated",
    "session.input_audio.muted",
    "session.input_audio.unmuted",
    "session.input_transcript.delta",
    "session.output_transcript.delta",
    "session.delegation.created",
    "session.commentary.appended",
    "session.thinking.appended",
    "session.instructions.appended",
)
CLOSE_REASONS = ("close_requested", "expired", "content", "remote_hangup", "connection_lost")

# What `fail_next` can announce: the status, code and message of a refusal, or a mishap.
FAILURES = {
    "invalid_api_key": (401, "invalid_api_key", "Incorrect API key provided."),
    "live_api_access_denied": (403, "live_api_access_denied", "No access to the Live API."),
    "model_not_found": (403, "model_not_found", "The model does not exist or is not yours."),
    "forbidden_voice": (403, "forbidden", "This voice is not available."),
    "rate_limit": (429, "rate_limit_exceeded", "Too many concurrent Live sessions."),
    "insufficient_quota": (429, "insufficient_quota", "You exceeded your current quota."),
    "credit_balance_exhausted": (400, "credit_balance_exhausted", "Your credit is exhausted."),
    "server_error": (500, "server_error", "The server had an error."),
}
MISHAPS = ("hang", "reset", "nonsense", "redirect")
RETRY_AFTER = 7  # seconds, sent with rate_limit


# ---- shapes ------------------------------------------------------------------
# What the vendor's schema allows, as data. A type stands for its values, a tuple for a
# choice, a list for any number of its one entry, a dict for an object of just these fields
# ("!" marks the required ones), a function for what it does not refuse.


class Refusal(Exception):
    """The answer to a bad request or event, in the vendor's words where they are known."""

    def __init__(self, message, code="invalid_value", param=None, status=400):
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status

    def body(self):
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"type": kind, "code": self.code, "message": self.message, "param": self.param}


def failure(name, param=None):
    status, code, message = FAILURES[name]
    return Refusal(message, code, param, status)


def check(value, shape, path=""):
    """Hold a value against a shape. Refuse with the path of the first thing that breaks it."""
    if isinstance(shape, dict):
        check_fields(value, shape, path)
    elif isinstance(shape, list):
        check(value, list, path)
        for index, entry in enumerate(value):
            check(entry, shape[0], f"{path}[{index}]")
    elif isinstance(shape, tuple):
        if value not in shape:
            raise Refusal(f"Invalid value for '{path}': {value!r}.", param=path)
    elif isinstance(shape, type):
        if not isinstance(value, shape):
            raise Refusal(f"Invalid type for '{path}': not a {shape.__name__}.", param=path)
        # What is left of a character that was cut in two.
        if shape is str and re.search("[\ud800-\udfff]", value):
            raise Refusal(f"'{path}' is not valid Unicode.", param=path)
    else:
        shape(value, path)


def check_fields(value, shape, path):
    check(value, dict, path)
    prefix = f"{path}." if path else ""
    shapes = {name.rstrip("!"): entry for name, entry in shape.items()}
    for name in value:
        if name not in shapes:
            message = f"Unknown parameter: '{prefix}{name}'."
            raise Refusal(message, "unknown_parameter", prefix + name)
    for name in shape:
        if name.endswith("!") and name[:-1] not in value:
            param = prefix + name[:-1]
            raise Refusal(f"Missing required parameter: '{param}'.", param=param)
    for name, entry in value.items():
        check(entry, shapes[name], prefix + name)


def either(word, shape):
    """Allow this one value or what the shape allows."""

    def check_either(value, path):
        if value != word:
            check(value, shape, path)

    return check_either


def between(low, high, *kinds):
    """Allow a number of these types; a boolean is none, whatever isinstance says."""

    def check_between(value, path):
        if type(value) not in kinds or not low <= value <= high:
            raise Refusal(f"Invalid value for '{path}': not in {low} to {high}.", param=path)

    return check_between


def tokens(text):
    """Estimate tokens as the open re-implementation of the service does."""
    return (len(text.encode()) + 3) // 4


def instructions(value, path):
    check(value, str, path)
    if tokens(value) > INSTRUCTIONS_TOKENS:
        raise Refusal(f"'{path}' must not exceed {INSTRUCTIONS_TOKENS} tokens.", param=path)


def voice(value, path):
    if isinstance(value, dict):
        check(value, {"id!": str}, path)
    elif value in tuple(FORBIDDEN_VOICES):
        raise failure("forbidden_voice", path)
    else:
        check(value, tuple(VOICES), path)


def model(value, path):
    check(value, str, path)
    if value not in MODELS:
        raise failure("model_not_found", path)


PART_TYPES = {
    "developer": ("input_text",),
    "user": ("input_text",),
    "assistant": ("text", "output_text"),
}
HISTORY_ITEM = {
    "type": ("message",),
    "role!": tuple(PART_TYPES),
    "content!": list,
    "id": either(None, str),
    "status": either(None, ("incomplete", "completed")),
}


def history(items, path):
    check(items, [HISTORY_ITEM], path)
    if len(items) > HISTORY_MESSAGES:
        raise Refusal(f"'{path}' has more than {HISTORY_MESSAGES} messages.", param=path)
    for index, item in enumerate(items):
        at = f"{path}[{index}].content"
        check(item["content"], [{"text!": str, "type": PART_TYPES[item["role"]]}], at)
        if len(item["content"]) != 1:
            raise Refusal(f"'{at}' must have exactly one part.", param=at)
    if sum(tokens(item["content"][0]["text"]) for item in items) > HISTORY_TOKENS:
        raise Refusal(f"'{path}' must not exceed {HISTORY_TOKENS} tokens.", param=path)


# The vendor has two more owners of delegations; this stand-in does without.
DELEGATION = {"type!": ("client",), "acknowledgement_delay_ms": between(0, 60_000, int)}
DATA_CHANNEL = {
    "allowed_client_events": either("all", [CLIENT_EVENTS]),
    "allowed_server_events": either("all", [{"type!": SERVER_EVENTS}]),
}
SESSION = {
    "model!": model,
    "instructions": either(None, instructions),
    "audio": {"output": {"voice": voice}},
    "delegation": either(None, DELEGATION),
    "client": {"data_channel!": DATA_CHANNEL},
    "idle_timeout_s": between(1, 7200, int),
    "wake_policy": {"type!": ("speech",), "vad_threshold": between(0, 1, int, float)},
    "input": history,
    "safety_identifier": either(None, str),
    "store": bool,
}
CREATE = {"session!": SESSION, "transport!": {"type!": ("webrtc",), "sdp!": str}}

BARE = {"type!": str, "event_id": either(None, str)}
APPEND = BARE | {"delegation_id!": either(None, str), "content!": str}
UPDATE = BARE | {"session!": {"delegation": either(None, DELEGATION)}}
EVENTS = dict(zip(CLIENT_EVENTS, (APPEND, APPEND, APPEND, UPDATE, BARE, BARE, BARE), strict=True))


def check_create(body):
    """Refuse a body of POST /live/sessions that the service would refuse."""
    transport = body.get("transport") if isinstance(body, dict) else None
    if isinstance(transport, dict) and transport.get("type", "webrtc") != "webrtc":
        raise Refusal("Only the webrtc transport is supported.", param="transport.type")
    check(body, CREATE)
    check_offer(body["transport"]["sdp"])


def check_offer(sdp):
    """Refuse an offer that was trimmed or re-encoded on its way, or that lacks a part."""

    def refuse(why):
        raise Refusal(f"Failed to parse offer: {why}", "invalid_offer", "transport.sdp")

    if not sdp.endswith("\r\n"):
        refuse("failed to unmarshal SDP: EOF")
    if re.search(r"(?<!\r)\n|\r(?!\n)", sdp) or not sdp.startswith("v=0\r\n"):
        refuse("failed to unmarshal SDP: sdp: invalid syntax")
    for part in ("m=audio ", "m=application ", "a=candidate:", "a=ice-ufrag:", "a=fingerprint:"):
        if f"\r\n{part}" not in sdp:
            refuse(f"no {part.strip()}")


def check_event(event):
    """Refuse a client event by its form alone; what the session knows comes later."""
    kind = event.get("type")
    if kind == "session.start":
        raise Refusal("The session has already started.", "session_already_started")
    if kind in ("response.create", "response.item.create"):
        raise Refusal(f"{kind} requires Responses delegation.", param="type")
    if kind not in CLIENT_EVENTS:
        supported = ", ".join(CLIENT_EVENTS)
        raise Refusal(f"Invalid event type {kind!r}. Supported: {supported}.", param="type")
    if kind == "session.update":
        check_immutable(event.get("session"))
    check(event, EVENTS[kind])
    if len(event.get("event_id") or "") > EVENT_ID_CHARACTERS:
        raise Refusal("event_id is too long.", param="event_id")
    content = event.get("content", "-")
    if not content.strip():
        raise Refusal("content must be a nonempty string.", param="content")
    if tokens(content) > APPEND_TOKENS:
        message = f"Context append text must not exceed {APPEND_TOKENS} tokens."
        raise Refusal(message, param="content")


def check_immutable(changes):
    """Refuse what a running session cannot change, before the shape calls it unknown."""
    if not isinstance(changes, dict):
        return
    fixed = {name.rstrip("!") for name in SESSION} - {"delegation"}
    params = [f"session.{name}" for name in changes if name in fixed]
    delegation = changes.get("delegation")
    if isinstance(delegation, dict) and delegation.get("type", "client") != "client":
        params.append("session.delegation.type")
    for param in params:
        raise Refusal(f"'{param}' cannot change.", "immutable_field_update", param)


# ---- audio -------------------------------------------------------------------

RATE = 48_000  # samples a second
FRAME = 960  # samples, 20 ms
PERIOD = 120  # samples: 400 Hz, and a whole number of periods in every frame

SILENT_FRAME = bytes(2 * FRAME)
SQUARE_WAVE = [8000] * (PERIOD // 2) + [-8000] * (PERIOD // 2)
TONE_FRAME = struct.pack(f"<{FRAME}h", *SQUARE_WAVE * (FRAME // PERIOD))


class Speaker(MediaStreamTrack):
    """The outgoing track: frames of digital silence, and a tone while `talking()`."""

    kind = "audio"

    def __init__(self, talking):
        super().__init__()
        self._talking = talking
        self._began = None
        self._sent = 0  # samples

    async def recv(self):
        if self.readyState != "live":
            raise MediaStreamError
        now = time.monotonic()
        self._began = self._began or now
        await asyncio.sleep(self._began + self._sent / RATE - now)
        frame = AudioFrame(format="s16", layout="mono", samples=FRAME)
        frame.planes[0].update(TONE_FRAME if self._talking() else SILENT_FRAME)
        frame.sample_rate, frame.time_base = RATE, Fraction(1, RATE)
        frame.pts = self._sent
        self._sent += FRAME
        return frame


def peak(frame):
    """Return how loud a received frame gets, of 32,768."""
    size = frame.samples * len(frame.layout.channels)
    samples = memoryview(bytes(frame.planes[0])).cast("h")[:size]
    return max(max(samples), -min(samples))


class Unplugged:
    """A datagram transport whose cable is out: it takes everything and sends nothing."""

    def __init__(self, transport):
        self.plugged = transport

    def sendto(self, data, address=None):
        pass

    def __getattr__(self, name):
        return getattr(self.plugged, name)


# ---- voice -------------------------------------------------------------------


@dataclass
class Spoken:
    """One thing the voice was to say, and how much of it was heard."""

    text: str
    source: str  # commentary, acknowledgement or assistant
    delegation_id: str | None = None
    event_id: str | None = None
    said: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    cut: bool = False


def words(text):
    """Split a text into fragments that keep their leading space."""
    return re.findall(r"\s*\S+", text.strip())


class Voice:
    """Says one thing at a time, at a steady pace; what comes next cuts it off."""

    def __init__(self, show):
        self._show = show  # called with each fragment of transcript
        self.spoken = []
        self._current = None
        self._fragments = []
        self._hold_ms = 0
        self._voiced = 0.0  # characters of the current text

    @property
    def busy(self):
        return self._current is not None

    @property
    def talking(self):
        return self.busy and self._current.started_at is not None

    def say(self, spoken, after_ms=0):
        self.hush()
        self.spoken.append(spoken)
        self._current, self._fragments = spoken, words(spoken.text)
        self._hold_ms, self._voiced = after_ms, 0.0

    def hush(self):
        """Fall silent, in the middle of a word if need be."""
        if self.busy:
            unsaid = "".join(self._fragments)
            self._utter(unsaid[: int(self._voiced) - len(self._current.said)])
            self._current.cut = True
            self._finish()

    def advance(self, milliseconds, rate):
        """Let the timeline move on, at `rate` characters a second."""
        if self._hold_ms > 0:
            self._hold_ms -= milliseconds
            return
        if not self.busy:
            return
        if not self.talking:
            self._current.started_at = time.monotonic()
        self._voiced += rate * milliseconds / 1000
        while self._fragments and self._voiced >= len(self._current.said + self._fragments[0]):
            self._utter(self._fragments.pop(0))
        if not self._fragments:
            self._finish()

    def _utter(self, fragment):
        if fragment.strip():
            self._show(fragment)
            self._current.said += fragment

    def _finish(self):
        self._current.ended_at = time.monotonic()
        self._current = None


# ---- session -----------------------------------------------------------------


@dataclass
class Message:
    """An event on the data channel, and when it passed."""

    event: dict
    at: float = field(default_factory=time.monotonic)

    @property
    def type(self):
        return self.event.get("type")


def from_test(method):
    """Let a test's thread call a method on the service's loop and wait for its result."""

    @functools.wraps(method)
    def call(self, *arguments, **options):
        async def run():
            result = method(self, *arguments, **options)
            return await result if inspect.isawaitable(result) else result

        return self._service.run(run())

    return call


class LiveSession:
    """One Live session: the far end of the call, and the script a test plays on it."""

    def __init__(self, service, config):
        self._service = service
        self.id = f"live_u1_{secrets.token_hex(8)}"
        self.config = config  # the `session` object of the request
        self.state = "created"  # then live, closing, closed
        self.closed_reason = None
        self.started_at = None
        self.received, self.sent, self.withheld = [], [], []  # of Message
        self.delegations = []  # ids
        self.muted = self.paused = False
        self.clock_ms = 0.0  # how far the timeline has moved
        self.sound_heard_at = None

        self._expires_at = int(time.time() + service.session_lifetime)
        self._voice = Voice(self._show_output)
        self._frame_at = self._first_frame_at = None
        self._unplugged = False
        self._waiters, self._numbers = [], itertools.count(1)
        self._event_ids = set()
        self._unplaced = []  # appends that wait for their place on the timeline
        self._contexts = 0  # commentary and thinking appends so far
        self._user_spoke = self._voice_spoke = False
        self._last_user_ms = 0
        self._busy_ms = 0.0  # when somebody last spoke, on the timeline
        self._paused_seconds, self._paused_at = 0.0, None
        self._close_sent, self._ending = False, None
        self._channel, self._tasks = None, set()
        delegation = config.get("delegation") or {}
        self._acknowledge_after = delegation.get("acknowledgement_delay_ms", 0)
        permissions = config.get("client", {}).get("data_channel", {})
        self._client_events = permissions.get("allowed_client_events", "all")
        self._server_events = permissions.get("allowed_server_events", "all")
        if self._server_events != "all":
            self._server_events = [selector["type"] for selector in self._server_events]

    # What a test sees and does.

    @property
    def spoken(self):
        return self._voice.spoken

    @property
    def talking(self):
        return self._voice.talking

    @property
    def microphone_silent(self):
        """Whether audio arrives but has long held no sound."""
        now = time.monotonic()
        if self._frame_at is None or now - self._frame_at > 0.5:
            return False
        return now - (self.sound_heard_at or self._first_frame_at) > self._service.silence_window

    def contents(self, kind):
        """Return the texts of the thinking, instructions or commentary appends so far."""
        kind = f"session.{kind}.append"
        return [each.event["content"] for each in self.received if each.type == kind]

    def wait_event(self, kind, timeout=PATIENCE, count=1):
        """Return this session's count-th client event of a type."""

        def nth():
            found = [each for each in self.received if each.type == kind]
            return len(found) >= count and found[count - 1]

        return self._service.wait_for(nth, timeout, about=f"{kind} number {count}")

    @from_test
    async def user_says(
        self,
        text,
        delegate=False,
        word_delay=0.06,
        delegate_before_last_words=False,
        duplicate_event=False,
        late_fragment=False,
        late_by=0.0,
        interrupt=False,
    ):
        """Let the user speak. Return the delegation's id, or None if there is none.

        Nothing is heard of a muted user. Speech wakes a paused session. `late_fragment`
        delivers a word from the middle last, or `late_by` seconds after the delegation;
        `interrupt` makes the voice fall silent.
        """
        if interrupt:
            self._voice.hush()
        if not self.muted:
            self._resume()
        fragments = words(text)
        late_index = len(fragments) // 2 if late_fragment else None
        early = max(1, len(fragments) - 2) if delegate and delegate_before_last_words else None
        late = delegation = None
        for index, fragment in enumerate(fragments):
            await self._pass(word_delay)
            if self.muted:
                continue
            if index == early:
                delegation = self._delegate()
            heard = self._hear_user(fragment)
            if index == late_index:
                late = heard
            else:
                event = self._emit("session.input_transcript.delta", **heard)
        if self.muted:
            return delegation
        if late and late_by:
            delegation = delegation or (self._delegate() if delegate else None)
            await self._pass(late_by)
        if late:
            event = self._emit("session.input_transcript.delta", **late)
        if duplicate_event:
            self._deliver(event)
        return self._delegate() if delegate and not delegation else delegation

    @from_test
    async def assistant_says(self, text, wait=True):
        """Let the model speak of its own accord. Return the record."""
        spoken = Spoken(text, "assistant")
        self._voice.say(spoken)
        while wait and spoken.ended_at is None:
            await self._pass(0.02)
        return spoken

    @from_test
    async def close(self, reason="close_requested"):
        """End the session from the service's side, with a session.closed."""
        assert reason in CLOSE_REASONS
        await self._finish(reason)

    @from_test
    def report(self, code, message="", about=None):
        """Report an error, of the session or about one of its events."""
        self._emit_error(Refusal(message or f"Something is wrong: {code}.", code), about or {})

    @from_test
    def lose_voice(self):
        """Send no more audio; the transcript goes on."""
        self._peer.getSenders()[0].replaceTrack(None)

    @from_test
    async def drop(self):
        """Lose the peer connection in the open: the channel closes, without a last word."""
        self._end("connection_lost")
        await self._peer.close()

    @from_test
    def die(self):
        """Lose the session in silence: nothing comes through any more, either way."""
        self._unplug()
        self._end("connection_lost")

    # The connection.

    async def _open(self, offer):
        """Answer the offer. The session starts when its data channel opens."""
        self._peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._peer.on("datachannel", self._channel_opened)
        self._peer.on("track", lambda track: self._spawn(self._listen(track)))
        self._peer.on("connectionstatechange", self._connection_changed)
        self._peer.addTrack(Speaker(lambda: self.talking))
        await self._peer.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        await self._peer.setLocalDescription(await self._peer.createAnswer())
        return self._peer.localDescription.sdp

    def _spawn(self, coroutine):
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _channel_opened(self, channel):
        if channel.label != "oai-events":
            self._service.violation(f"the data channel is called {channel.label!r}")
            return
        self._channel = channel
        channel.on("message", self._receive)
        channel.on("close", self._peer_gone)
        self._spawn(self._start())

    def _connection_changed(self):
        if self._peer.connectionState in ("closed", "failed"):
            self._peer_gone()

    def _peer_gone(self):
        if self._close_sent and self.state == "closing":
            self._service.violation("the peer connection closed before session.closed")
        self._end(self._ending or "connection_lost")

    async def _start(self):
        if self._client_events != "all" or self._server_events != "all":
            message = "The data channel has restricted event permissions."
            self._emit("info", code="data_channel_permissions", message=message)
        if self._service.start_delay is None:
            return
        await asyncio.sleep(self._service.start_delay)
        if self.state != "created":
            return
        self.state, self.started_at = "live", time.monotonic()
        self._emit("session.started", session=self._resource())
        for errand in (self._watch_track, self._report_usage, self._expire):
            self._spawn(errand())

    async def _listen(self, track):
        while True:
            try:
                self._hear(await track.recv())
            except MediaStreamError:
                return

    async def _watch_track(self):
        reported = False
        while True:
            await asyncio.sleep(0.1)
            last = max(self._frame_at or 0, self.started_at)
            limit = self._service.track_gap
            gap = time.monotonic() - last > limit and not self._unplugged
            if gap and not reported:
                self._service.violation(f"no audio from the client for {limit:g} s")
            reported = gap

    async def _report_usage(self):
        while True:
            await asyncio.sleep(self._service.usage_interval)
            # A made-up ratio that grows with the session, as the real one mostly does.
            ratio = min(1.0, round(self._seconds() / 7200, 4))
            window = {"usage_ratio": ratio}
            self._emit("session.usage.updated", usage=self._usage(), context_window=window)

    async def _expire(self):
        await asyncio.sleep(self._service.session_lifetime + self._service.session_overtime)
        await self._finish("expired")

    async def _finish(self, reason, cause=None):
        """Drain, say session.closed once, and part a little later."""
        if self.state in ("closing", "closed"):
            return
        self.state, self._ending = "closing", None if self._close_sent else reason
        await asyncio.sleep(self._service.drain_delay)
        if self.state == "closed":
            return
        for event in self._unplaced:
            message = "The session closed before the context was placed."
            self._emit_error(Refusal(message, "context_injection_incomplete"), event)
        final = {"session": self._resource(), "usage": self._usage()}
        self._emit("session.closed", cause, reason=reason, **final)
        self._end(reason)
        self._spawn(self._part())

    async def _part(self):
        await asyncio.sleep(LINGER)
        await self._peer.close()

    def _end(self, reason):
        if self.state == "closed":
            return
        self._voice.hush()
        self.state, self.closed_reason = "closed", reason
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        for *_, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(ConnectionError("the session is over"))
        self._service.notify()

    async def _release(self):
        """Leave nothing behind when the service stops."""
        self._end("connection_lost")
        await self._peer.close()

    def _protocols(self):
        # aioice has no public way to its sockets.
        return self._peer.sctp.transport.transport._connection._protocols

    def _unplug(self):
        """Pull the network cable; once it is plugged in again, the session goes on."""
        self._unplugged = True
        for protocol in self._protocols():
            protocol.datagram_received = lambda data, address: None
            protocol.transport = Unplugged(protocol.transport)

    def _plug_in(self):
        for protocol in self._protocols():
            del protocol.datagram_received
            protocol.transport = protocol.transport.plugged
        self._frame_at = time.monotonic()
        self._unplugged = False

    # The timeline: it moves while audio arrives, and everything said is placed on it.

    def _hear(self, frame):
        self._frame_at = time.monotonic()
        self._first_frame_at = self._first_frame_at or self._frame_at
        if peak(frame) > SILENCE_PEAK:
            self.sound_heard_at = self._frame_at
        if self.started_at and not self.paused:
            self._advance(1000 * frame.samples / frame.sample_rate)
        self._service.notify()

    def _advance(self, milliseconds):
        self.clock_ms += milliseconds
        while self._waiters and self._waiters[0][0] <= self.clock_ms:
            *_, waiter = heapq.heappop(self._waiters)
            if not waiter.done():
                waiter.set_result(None)
        self._voice.advance(milliseconds, self._service.speech_rate)
        if self._voice.busy:
            self._busy_ms = self.clock_ms
        idle_ms = 1000 * self.config.get("idle_timeout_s", 0)
        if idle_ms and "wake_policy" in self.config and self.clock_ms - self._busy_ms >= idle_ms:
            self._pause()

    async def _pass(self, seconds):
        """Wait until the timeline has moved on by so much."""
        if self.state == "closed":
            raise ConnectionError("the session is over")
        if seconds > 0:
            waiter = asyncio.get_running_loop().create_future()
            due = self.clock_ms + 1000 * seconds
            heapq.heappush(self._waiters, (due, next(self._numbers), waiter))
            await waiter

    def _span(self):
        start = int(self.clock_ms // GRID * GRID)
        return {"start_ms": start, "end_ms": start + GRID}

    def _pause(self):
        if self.state == "live" and not self.paused:
            self.paused, self._paused_at = True, time.monotonic()
            self._emit("session.paused")

    def _resume(self):
        if self.paused:
            self._paused_seconds += time.monotonic() - self._paused_at
            self.paused, self._busy_ms = False, self.clock_ms
            self._emit("session.resumed")

    def _hear_user(self, fragment):
        """Note a fragment of user speech. Return the fields of its transcript event."""
        space = " " if self._user_spoke and not fragment[0].isspace() else ""
        span = self._span()
        self._user_spoke, self._last_user_ms, self._busy_ms = True, span["start_ms"], self.clock_ms
        return {"delta": space + fragment, **span}

    def _show_output(self, fragment):
        space = " " if self._voice_spoke and not fragment[0].isspace() else ""
        self._voice_spoke = True
        self._emit("session.output_transcript.delta", delta=space + fragment, **self._span())

    def _delegate(self, id=None):
        """Delegate without a word; with an old id, deliver that delegation once more."""
        id = id or f"item_{secrets.token_hex(8)}"
        self.delegations.append(id)
        delegation = {"id": id, "type": "delegation", "target": "client"}
        offset = self._last_user_ms
        self._emit("session.delegation.created", offset_ms=offset, delegation=delegation)
        if self._service.auto_acknowledge:
            self._spawn(self._acknowledge())
        return id

    async def _acknowledge(self):
        """Say that it is being looked into, unless the client says something before that."""
        contexts = self._contexts
        await self._pass(self._acknowledge_after / 1000)
        if contexts == self._contexts and not self._voice.busy:
            self._voice.say(Spoken("Let me check.", "acknowledgement"))

    # Events from the client.

    def _receive(self, text):
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._service.violation(f"not an event: {text!r:.80}")
            return
        self.received.append(Message(event))
        try:
            self._admit(event)
        except Refusal as refusal:
            self._service.violation(f"{event.get('type')}: {refusal.message}")
            if self.state != "created":
                self._emit_error(refusal, event)
        else:
            self._obey(event)
        self._service.notify()

    def _admit(self, event):
        """Refuse an event that has no business here, and note what is merely careless."""
        kind = event.get("type")
        if self.state == "created":
            raise Refusal("sent before session.started")
        if self.state != "live":
            raise Refusal("sent after the session was closed", "session_closed")
        if self._client_events != "all" and kind not in self._client_events:
            raise Refusal("not permitted on this data channel", "permission_denied", "type")
        check_event(event)
        asleep = self.paused and time.monotonic() - self._paused_at > PAUSE_PASSES
        if asleep and kind not in WHILE_PAUSED:
            self._service.violation(f"{kind}: sent while the session was paused")
        if event.get("delegation_id") not in [None, *self.delegations]:
            raise Refusal("unknown delegation_id", param="delegation_id")
        if "content" in event and len(self._unplaced) >= UNPLACED_APPENDS:
            raise Refusal("too many pending appends", "rate_limit_exceeded")
        event_id = event.get("event_id")
        if not event_id:
            self._service.violation(f"{kind}: no event_id")
        elif event_id in self._event_ids:
            self._service.violation(f"{kind}: event_id {event_id!r} was used before")
        self._event_ids.add(event_id)
        size = len(event.get("content", "").encode())
        if size > APPEND_BYTES:
            self._service.violation(f"{kind}: {size} bytes of content, over {APPEND_BYTES}")

    def _obey(self, event):
        kind = event["type"]
        if kind.endswith(".append"):
            self._unplaced.append(event)
            self._contexts += kind != "session.instructions.append"
            self._spawn(self._place(event))
        elif kind == "session.update":
            changes = event["session"].get("delegation") or {}
            delay = changes.get("acknowledgement_delay_ms", self._acknowledge_after)
            self._acknowledge_after = delay
            self._emit("session.updated", event, session=self._resource())
        elif kind == "session.close":
            self._close_sent = True
            self._spawn(self._finish("close_requested", event))
        else:
            self.muted = kind == "session.input_audio.mute"
            self._emit(f"{kind}d", event)

    async def _place(self, event):
        """Put an append on the timeline; a commentary is spoken a moment later."""
        await self._pass(self._service.ack_delay)
        self._unplaced.remove(event)
        self._emit(f"{event['type']}ed", event, **self._span())
        delay = self._service.reply_delay
        if event["type"] == "session.commentary.append" and delay is not None:
            ids = event["delegation_id"], event.get("event_id")
            self._voice.say(Spoken(event["content"], "commentary", *ids), after_ms=1000 * delay)

    # Events to the client.

    def _emit(self, kind, cause=None, **fields):
        """Send an event if the client may see it. Return it in any case."""
        event = {"type": kind, "event_id": f"event_{next(self._numbers)}", **fields}
        if cause and cause.get("event_id") and self._service.echo_client_event_id:
            event["client_event_id"] = cause["event_id"]
        if self._server_events == "all" or kind in self._server_events:
            self._deliver(event)
        else:
            self.withheld.append(Message(event))
        return event

    def _emit_error(self, refusal, cause):
        error = {name: value for name, value in refusal.body().items() if value}
        if isinstance(cause.get("event_id"), str):
            error["client_event_id"] = cause["event_id"]
        self._emit("error", error=error)

    def _deliver(self, event):
        """Send an event as it is, past every filter."""
        if self._channel and self._channel.readyState == "open":
            self._channel.send(json.dumps(event))
            self.sent.append(Message(event))
            self._service.notify()

    def _resource(self):
        config = self.config
        delegation = {"type": "client", "acknowledgement_delay_ms": self._acknowledge_after}
        copied = {"client", "store", "safety_identifier"} & set(config)
        return {
            "id": self.id,
            "status": "active",
            "expires_at": self._expires_at,
            "model": config["model"],
            "instructions": config.get("instructions") or "You are a helpful voice.",
            "audio": {"output": {"voice": "marin", **config.get("audio", {}).get("output", {})}},
            "delegation": delegation,
            "input": config.get("input", []),
            **{name: config[name] for name in copied},
        }

    def _seconds(self):
        return time.monotonic() - self.started_at if self.started_at else 0.0

    def _usage(self):
        seconds, paused = int(self._seconds()), self._paused_seconds
        if "idle_timeout_s" not in self.config:
            return {"seconds": seconds}
        if self.paused:
            paused += time.monotonic() - self._paused_at
        active = seconds - int(paused)
        return {"seconds": seconds, "active_seconds": active, "paused_seconds": int(paused)}

    # The same, for a test's thread.

    delegate = from_test(_delegate)
    pause = from_test(_pause)
    resume = from_test(_resume)
    unplug = from_test(_unplug)
    plug_in = from_test(_plug_in)
    send_raw = from_test(_deliver)


# ---- service -----------------------------------------------------------------


@dataclass(eq=False)
class LiveService:
    """The service as a whole: its HTTP interface, its sessions and what went wrong.

    The fields up to `auto_acknowledge` are options; they may be changed at any time and hold
    from then on.
    """

    create_delay: float = 0.0  # seconds from the request to its answer
    start_delay: float | None = 0.3  # seconds from the channel to session.started; None: never
    ack_delay: float = 0.3  # seconds until an append is placed; the real one: 0.6 to 0.96
    reply_delay: float | None = 0.3  # seconds until a commentary is spoken; None: never
    speech_rate: float = 60  # characters a second; people speak about 15
    drain_delay: float = 0.2  # seconds from session.close to session.closed
    usage_interval: float = 15.0  # seconds between two usage events
    session_lifetime: float = 7200  # seconds, as the session's start tells
    session_overtime: float = 0  # seconds that it lives longer than that
    track_gap: float = 5.0  # seconds without audio after which the client's track is missed
    silence_window: float = 1.5  # seconds; a browser's fake microphone beeps more often
    echo_client_event_id: bool = True
    auto_acknowledge: bool = True  # a delegation makes the voice say "Let me check."

    url: str | None = field(default=None, init=False)
    creates: int = field(default=0, init=False)  # requests to open a session, refused or not

    def __post_init__(self):
        self.key = f"sk-test-{secrets.token_hex(12)}"
        self.sessions = []
        self.requests = []  # dicts of method, path and body
        self.hangups = []  # session ids
        self.followed = []  # requests of clients that obeyed a redirect
        self.violations, self.tolerated = [], []
        self._announced = []
        self._failures = {"create": [], "hangup": [], "attach": [], "models": []}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self.run(self._listen())
        return self

    def __exit__(self, *error):
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # What a test sees and does.

    def fail_next(self, name, on="create"):
        """Answer the next request to create, hangup, attach or models with this failure."""
        assert name in FAILURES or name in MISHAPS, name
        self._failures[on].append(name)

    def tolerate(self, *fragments):
        """Announce violations: those that contain a fragment go to `tolerated`."""
        self._announced.extend(fragments)

    @property
    def session(self):
        """The newest session."""
        return self.sessions[-1]

    @property
    def open_sessions(self):
        """Sessions that are still billed."""
        return [each for each in self.sessions if each.state != "closed"]

    def wait_for(self, wanted, timeout=PATIENCE, about=None):
        """Return the first true value of a predicate, or the first client event of a type."""
        predicate = wanted
        if isinstance(wanted, str):
            predicate = functools.partial(self._first_event, wanted)
        deadline = time.monotonic() + timeout
        while not (found := predicate()):
            if time.monotonic() > deadline:
                raise AssertionError(self._story(about or wanted, timeout))
            with self._changed:
                # Some predicates change with time alone, so look again before long.
                self._changed.wait(0.02)
        return found

    def wait_live(self, timeout=PATIENCE, count=1):
        """Return the newest session to have started, once it is the count-th."""

        def newest():
            started = [each for each in self.sessions if each.started_at]
            return len(started) >= count and started[-1]

        return self.wait_for(newest, timeout, about=f"the start of session {count}")

    def wait_spoken(self, fragment, timeout=PATIENCE):
        """Return the record of something the voice has said to its end."""

        def complete():
            spoken = itertools.chain(*(each.spoken for each in self.sessions))
            heard = (each for each in spoken if each.ended_at and not each.cut)
            return next((each for each in heard if fragment in each.text), None)

        return self.wait_for(complete, timeout, about=f"the words {fragment!r}")

    def run(self, coroutine, timeout=30):
        """Run a coroutine on the service's loop and return its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def violation(self, text):
        """Note that a client did something it should not."""
        announced = any(fragment in text for fragment in self._announced)
        (self.tolerated if announced else self.violations).append(text)
        self.notify()

    def notify(self):
        """Let whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    def _first_event(self, kind):
        received = itertools.chain(*(each.received for each in self.sessions))
        return next((each for each in received if each.type == kind), None)

    def _story(self, about, timeout):
        """Tell what happened instead of the thing that was waited for."""
        lines = [f"waited {timeout:g} s in vain for {about}", f"violations: {self.violations}"]
        for session in self.sessions:
            lines += [
                f"{session.id} is {session.state}, clock at {session.clock_ms:.0f} ms",
                f"  received: {[each.type for each in session.received[-20:]]}",
                f"  sent: {[each.type for each in session.sent[-20:]]}",
                f"  spoken: {session.spoken}",
            ]
        return "\n".join(lines)

    # HTTP.

    async def _listen(self):
        app = web.Application(middlewares=[self._guard])
        app.router.add_post("/v1/live/sessions", self._create)
        app.router.add_post("/v1/live/sessions/{id}/hangup", self._hangup)
        app.router.add_get("/v1/live/sessions/{id}/attach", self._attach)
        app.router.add_get("/v1/models/{model}", self._model)
        app.router.add_route("*", "/v1/elsewhere", self._elsewhere)
        self._stopping = asyncio.Event()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _stop(self):
        self._stopping.set()
        await asyncio.gather(*(each._release() for each in self.sessions))
        await self._runner.cleanup()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    @web.middleware
    async def _guard(self, request, handler):
        """Note the request, check who asks, and turn refusals into responses."""
        body = await request.text()
        self.requests.append({"method": request.method, "path": request.path_qs, "body": body})
        self.notify()
        if request.path == "/v1/elsewhere":
            return await handler(request)
        try:
            if request.headers.get("Authorization") != f"Bearer {self.key}":
                raise failure("invalid_api_key")
            if "OpenAI-Alpha" in request.headers:
                raise failure("live_api_access_denied")
            return await handler(request)
        except web.HTTPException as answer:
            refusal = Refusal("Invalid URL", "unknown_url", status=answer.status)
        except Refusal as error:
            refusal = error
        self.violation(f"{request.method} {request.path}: {refusal.message}")
        return refused(refusal)

    async def _mishap(self, request, on):
        """Fail as announced. Return the response, or None if nothing was announced."""
        if not self._failures[on]:
            return None
        name = self._failures[on].pop(0)
        if name in FAILURES:
            headers = {"Retry-After": str(RETRY_AFTER)} if name == "rate_limit" else {}
            return refused(failure(name), headers)
        if name == "nonsense":
            return web.Response(text="<html>It works!</html>", content_type="text/html")
        if name == "redirect":
            return web.Response(status=302, headers={"Location": "/v1/elsewhere"})
        if name == "reset":
            # Without lingering, closing the socket resets the connection.
            connection = request.transport.get_extra_info("socket")
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.transport.abort()
        else:
            await self._stopping.wait()
        return web.Response(status=503)

    async def _create(self, request):
        self.creates += 1
        if response := await self._mishap(request, "create"):
            return response
        for name in request.query:
            raise Refusal(f"Unknown parameter: '{name}'.", "unknown_parameter", name)
        if request.content_type != "application/json":
            raise Refusal("Content-Type must be application/json.", status=415)
        try:
            body = json.loads(await request.text())
        except ValueError:
            raise Refusal("The body is not valid JSON.", "invalid_json") from None
        check_create(body)
        await asyncio.sleep(self.create_delay)
        session = LiveSession(self, body["session"])
        try:
            answer = await session._open(body["transport"]["sdp"])
        except Exception as error:
            # aiortc has no error class of its own for an offer it cannot read.
            await session._release()
            message = f"Failed to parse offer: {error!r}"
            raise Refusal(message, "invalid_offer", "transport.sdp") from None
        self.sessions.append(session)
        self.notify()
        transport = {"type": "webrtc", "sdp": answer}
        return web.json_response({"session": {"id": session.id}, "transport": transport}, status=201)

    async def _hangup(self, request):
        id = request.match_info["id"]
        self.hangups.append(id)
        if response := await self._mishap(request, "hangup"):
            return response
        unknown = Refusal(f"No session '{id}'.", "session_not_found", status=404)
        session = next((each for each in self.sessions if each.id == id), None)
        if session is None:
            raise unknown
        if session.state == "closed":
            # Nobody's fault: it may have ended while the request was on its way.
            return refused(unknown)
        session._spawn(session._finish("close_requested"))
        return web.Response()

    async def _attach(self, request):
        """A server's own connection to a session: it sees what goes on and may close it."""
        if response := await self._mishap(request, "attach"):
            return response
        id = request.match_info["id"]
        session = next((each for each in self.sessions if each.id == id), None)
        if session is None or session.state == "closed":
            raise Refusal(f"No session '{id}'.", "session_not_found", status=404)
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        await channel.send_json({"type": "session.started", "session": session._resource()})
        await channel.ping()
        # The audio of both sides goes by as well, in frames of every length.
        for size in (10, 1000, 100_000):
            await channel.send_json({"type": "session.output_audio.delta", "delta": "A" * size})
        event = await channel.receive_json()
        try:
            check_event(event)
        except Refusal as refusal:
            self.violation(f"attached: {refusal.message}")
        if event.get("type") == "session.close":
            await session._finish("close_requested")
            final = {"session": session._resource(), "usage": session._usage()}
            await channel.send_json({"type": "session.closed", "reason": session.closed_reason, **final})
        await channel.close()
        return channel

    async def _model(self, request):
        if response := await self._mishap(request, "models"):
            return response
        name = request.match_info["model"]
        if name not in MODELS:
            message = FAILURES["model_not_found"][2]
            raise Refusal(message, "model_not_found", "model", status=404)
        card = {"id": name, "object": "model", "created": 1789000000, "owned_by": "system"}
        return web.json_response(card)

    async def _elsewhere(self, request):
        """Nobody should ask here: following a redirect carries the key away."""
        carried = "Authorization" in request.headers
        self.followed.append({"method": request.method, "authorization": carried})
        self.violation("followed a redirect" + (" with the key" if carried else ""))
        return web.json_response({})


def refused(refusal, headers=None):
    return web.json_response({"error": refusal.body()}, status=refusal.status, headers=headers)
