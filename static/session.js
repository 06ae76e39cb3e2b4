// The session's life: dialled, live, asleep, renewed, and ended by whoever ends it. Pure.
//
//   microphone  asked for, as long as the user takes -> open <-> gone, until another one is chosen or
//               plugged in; each session has its own
//   connecting  25 s at most from the open microphone, then given up
//   live        ends when the cap is reached, when nobody speaks, by plan in a long run
//   broken      8 s to come back, then lost
//   asleep      until somebody speaks; what is not mute or close is held
//   renewal     at most 25 s; the next session takes over at its start or at this one's end,
//               whichever comes first; if it fails, this one goes on
//   troubled    the service reports an error: trouble.js says whether that is the end
//   closing     5 s at most
//   over        what was not said and not asked waits for the next session
//
// watch.js says when, from what is known; here is what happens then.

import * as meter from "./meter.js";
import { ask, requeued } from "./questions.js";
import { claimDue, givenBack, untold } from "./runs.js";
import * as speech from "./speech.js";
import { chain, doing, keep, notify, openQuestion, release, say, sendOrHold, unsay, whileLive } from "./state.js";
import * as transcript from "./transcript.js";
import { endOf, refusalOf, wordsOf } from "./trouble.js";
import { refused } from "./voice.js";
import * as watch from "./watch.js";
import { closeMessage, muteMessage } from "./wire.js";

/** @import { Effect, EventRule, Renewal, Rule, State, Step } from "./state.js" */

const START_MS = 25000; // from the open microphone until the session must have started
const CLOSE_MS = 5000; // from session.close until we stop waiting for session.closed
const GRACE_MS = 8000; // a broken connection may come back by itself
const METER_MS = 30000; // the sidecar hangs up a session it has not heard of for 3 min
const HISTORY_LINES = 24;
const CODES_KEPT = 20; // of errors that were told

// ---- it begins

/** @type {Rule} */
export function dial(state) {
  return openCall({ ...state, opening: "dialled", call: "", meter: meter.NOTHING });
}

/** @type {Rule} */
function openCall(state) {
  const next = /** @type {State} */ ({
    ...state,
    phase: "connecting",
    attempt: state.openings + 1,
    sessionId: null,
    microphone: "asked",
    dialledAt: state.now,
    reopens: false,
    left: false,
    shakyAt: null,
    silenced: false,
    seconds: null,
    speech: emptied(state.speech), // what came up in between is on the screen
  });
  return open(next);
}

/** Open another session. The server's lines are its history; this page's go along in case it has none. @type {Rule} */
function open(state) {
  const attempt = state.openings + 1;
  const effect = { do: "open", attempt, history: transcript.history(state.transcript, HISTORY_LINES) };
  return chain({ ...state, openings: attempt }, keep, doing(state.call ? { ...effect, call: state.call } : effect));
}

/** @type {EventRule} */
export function opened(state, event) {
  const next = { ...state, sessionId: event.sessionId, call: state.call || event.sessionId || "" };
  // The user may have muted before there was a microphone. No audio has left yet.
  return chain(next, (s) => allowed(s, event), doing({ do: "mute", on: state.muted }));
}

/** It connected after the user had hung up: it owns a microphone and bills. @type {EventRule} */
export function late(state, event) {
  return [state, [drop(event)]];
}

/** `reason`: the code of the error that ended it. @param {{attempt: number, sessionId: string | null} | import("./wire.js").Event} session @param {string} [reason] @returns {Effect} */
function drop({ attempt, sessionId }, reason) {
  return { do: "drop", attempt, sessionId, ...(reason ? { reason } : {}) };
}

/** @type {EventRule} */
export function started(state, event) {
  const live = {
    ...state,
    phase: /** @type {const} */ ("live"),
    liveAt: state.now,
    heardAt: state.now,
    expiresAt: state.now + watch.lifetime(event.expiresAt, event.wallMs),
    renewals: 0,
    flow: watch.FLOWING,
    meter: meter.begin(state.meter, state.now),
    meterAt: state.now + METER_MS,
    counter: state.counter + 1,
  };
  const greeting = state.opening === "dialled" && !state.runs.some(watch.isOwed) ? state.terms.greeting : "";
  const muted = { do: "send", message: muteMessage(`mute_${state.attempt}_${state.counter}`, true) };
  const asking = openQuestion(state);
  return chain(
    live,
    doing(...(state.muted ? [muted] : [])),
    (s) => (asking?.question?.stage === "queued" ? ask(s, asking.key, "") : [s, []]),
    claimDue,
    (s) => [greeting ? say(s, "notice", [greeting], null, null) : s, []],
  );
}

// ---- it is renewed

/** Open the next session while this one is up. @type {Rule} */
function renew(state) {
  return open({ ...state, renewal: { attempt: state.openings + 1, sessionId: null, at: state.now, microphone: "asked" } });
}

/** The server has opened it, and is hanging up the one so far. @type {EventRule} */
export function renewalOpened(state, event) {
  const renewal = { .../** @type {Renewal} */ (state.renewal), attempt: event.attempt, sessionId: event.sessionId, at: state.now };
  return chain({ ...state, renewal }, (s) => allowed(s, event), doing({ do: "mute", on: state.muted }));
}

/** The next session's microphone was opened, or is gone. @type {EventRule} */
export function renewalMicrophone(state, event) {
  const renewal = /** @type {Renewal} */ (state.renewal);
  return [{ ...state, renewal: { ...renewal, microphone: event.type === "microphoneOpened" ? "open" : "gone" } }, []];
}

/** @type {EventRule} */
export function renewalStarted(state, event) {
  return chain(state, (s) => takeOver(s, /** @type {Renewal} */ (s.renewal)), (s) => started(s, event));
}

/** The present session goes on for what it has left. @type {EventRule} */
export function renewalFailed(state, event) {
  const renewal = /** @type {Renewal} */ (state.renewal);
  const minutes = Math.max(1, Math.round((state.expiresAt - state.now) / 60000));
  const why = event.message ?? "The next session ended before it began.";
  const told = notify(state, "error", `The call could not be renewed, and ends in about ${minutes} min. ${why}`);
  const gone = { ...told, renewal: null, renewals: state.renewals + 1, triedAt: state.now };
  return chain(gone, doing(drop(renewal, event.code)), release);
}

/** @type {EventRule} */
export function renewalTroubled(state, event) {
  return renewalFailed(state, { ...event, message: refusalOf(event.code) });
}

/** The next session takes the place of the present one, within the same call. @param {State} state @param {Renewal} renewal @param {string} [reason] @returns {Step} */
function takeOver(state, { attempt, sessionId, at, microphone }, reason) {
  const rest = over(state);
  const next = /** @type {State} */ ({
    ...rest,
    phase: "connecting",
    opening: "renewed",
    attempt,
    sessionId,
    microphone,
    dialledAt: at,
    seconds: null,
    runs: rest.runs.map((run) => (run.attempt === state.attempt ? { ...run, attempt } : run)),
  });
  const gone = { over: state.attempt, sessionId: state.sessionId, seconds: state.seconds };
  const taken = { do: "takeOver", attempt, ...gone, ...(reason ? { reason } : {}) };
  // The next voice comes out of the same loudspeaker.
  return [next, state.silenced ? [taken, { do: "silence", on: false }] : [taken]];
}

// ---- while it is up

const GONE = "Nobody hears you: the microphone is gone. Plug one in, or choose one in the settings.";

/** The user has allowed it, or another one took its place. @type {Rule} */
export function microphoneOpened(state) {
  const isBack = state.microphone === "gone";
  const opened = { ...state, microphone: /** @type {const} */ ("open") };
  if (isBack) return [notify(opened, "info", "The microphone is back."), []];
  return [state.phase === "connecting" ? { ...opened, dialledAt: state.now } : opened, []];
}

/** It was unplugged or taken away, and no other one opened. @type {Rule} */
export function microphoneEnded(state) {
  if (state.microphone === "gone") return [state, []];
  return [notify({ ...state, microphone: "gone" }, "error", GONE), []];
}

/** The peer connection broke, or healed. @type {EventRule} */
export function link(state, event) {
  return [{ ...state, shakyAt: event.broken ? (state.shakyAt ?? state.now) : null }, []];
}

/** What the service has counted. @type {EventRule} */
export function usage(state, event) {
  const { seconds = null, pausedSeconds } = event;
  return [{ ...state, seconds: seconds ?? state.seconds, meter: meter.count(state.meter, seconds, pausedSeconds) }, []];
}

/** Nobody spoke for long: the service has paused the session. @type {Rule} */
export function paused(state) {
  const asleep = { ...state, asleepAt: state.now, meter: meter.sleep(state.meter, true, state.now) };
  return [unsay(asleep, (piece) => piece.kind === "progress"), []];
}

/** Somebody spoke: it is awake. @type {Rule} */
export function resumed(state) {
  // What waited for this waits for a pause of the user as if it were new.
  const queue = { ...state.speech, freeAt: state.now };
  return release({ ...state, asleepAt: null, heardAt: state.now, speech: queue, meter: meter.sleep(state.meter, false, state.now) });
}

/** The server says how long the call may go on. @type {EventRule} */
export function allowed(state, event) {
  return [{ ...state, meter: meter.allow(state.meter, event.secondsLeft, state.now) }, []];
}

/** How much audio has passed so far. @type {EventRule} */
export function media(state, event) {
  const measured = { sent: event.sent, received: event.received };
  return [{ ...state, flow: watch.measure(state.flow, measured, watch.voicedOf(state)) }, []];
}

/** Nobody hears the user; the call goes on. @type {EventRule} */
export function mute(state, event) {
  const next = { ...state, muted: event.on, counter: state.counter + 1 };
  const local = doing({ do: "mute", on: event.on });
  if (state.phase !== "live") return local(next);
  const message = muteMessage(`mute_${state.attempt}_${state.counter}`, event.on);
  return chain(next, local, (s) => (s.renewal ? sendOrHold(s, message) : doing({ do: "send", message })(s)));
}

// ---- it ends

/** The user hangs up, or the page by itself. @type {Rule} */
export function close(state) {
  // The server is ending one of the two; it knows which are left.
  if (state.renewal) return ended(state, true);
  const next = { ...state, phase: /** @type {const} */ ("closing"), closingAt: state.now, counter: state.counter + 1 };
  return [next, [{ do: "send", message: closeMessage(`close_${state.attempt}_${state.counter}`) }]];
}

/** Hung up before it was live. @type {Rule} */
export function abandon(state) {
  return ended(state, true);
}

/** It could not be opened. @type {EventRule} */
export function failed(state, event) {
  return ended(notify(state, "error", event.message, state.opening !== "dialled"), true);
}

/** The page is gone, or kept aside by the browser: the server ends the session, which hears nothing more from here. @type {Rule} */
export function leave(state) {
  const { phase, sessionId, seconds, renewal } = state;
  const goodbye = { do: "goodbye", sessionId, seconds };
  if (phase === "idle") return [state, []];
  const next = /** @type {State} */ ({ ...state, phase: "closing", closingAt: state.now, renewal: null, left: true });
  if (phase === "connecting") return abandon(next);
  // What came until here may have been heard, and nothing that comes now.
  const [parted, told] = claimDue(withoutSpeech(phase === "closing" ? state : next));
  return [parted, [...givenBack(state, parted), ...told, goodbye, ...(renewal ? [drop(renewal)] : [])]];
}

/** It is shown again as it was. @type {Rule} */
export function comeBack(state) {
  if (!state.left) return [state, []];
  const told = notify({ ...state, left: false }, "info", closing(state, "left"), true);
  return state.phase === "idle" ? [told, []] : ended(told, true);
}

/** @type {Record<string, string>} */
const CLOSINGS = {
  left: "The call was ended when you left the page.",
  expired: "The call reached the longest time OpenAI allows.",
  content: "OpenAI ended the call because of its content rules. Put it in other words.",
  connection_lost: "The connection was lost.",
  remote_hangup: "OpenAI hung up.",
  close_requested: "The call was ended from another page, or by the server.",
};

/** How the call ended, and what to do. @param {State} state @param {string | undefined} reason */
function closing(state, reason) {
  return whatNow(state, CLOSINGS[reason ?? ""] ?? CLOSINGS.connection_lost);
}

/** @param {State} state @param {string} why the call ended */
function whatNow(state, why) {
  if (state.runs.some((run) => !run.result)) return `${why} Your tasks go on; start the call again to hear of them.`;
  const isOwing = over(state).runs.some(watch.isOwed);
  return `${why} Start the call again ${isOwing ? "to hear the answer" : "whenever you like"}.`;
}

/** The model's service closed the session. @type {EventRule} */
export function closed(state, event) {
  const [counted] = usage(state, event);
  if (state.phase === "closing") return ended(counted, false);
  if (state.renewal) return takeOver(counted, state.renewal);
  return ended(notify(counted, "info", closing(counted, event.reason), true), false);
}

/** The connection is gone. @type {Rule} */
export function lost(state) {
  if (state.phase === "closing") return ended(state, true);
  if (state.renewal) return takeOver(state, state.renewal);
  return ended(notify(state, "error", closing(state, "connection_lost"), true), true);
}

/** The service reports an error: the end of the session, of one message, or of nothing. @type {EventRule} */
export function troubled(state, event) {
  const { sent, code } = event;
  const why = state.phase === "connecting" ? refusalOf(code) : endOf(code, sent === null);
  if (why && state.renewal) return takeOver(state, state.renewal, code);
  if (why) return ended(notify(state, "error", whatNow(state, why), true), true, code);
  const words = wordsOf(code);
  if (words && sent !== null) return refused(state, event);
  const { told } = state.flow;
  if (!words || told.includes(code)) return [state, []];
  return [notify({ ...state, flow: { ...state.flow, told: [...told, code].slice(-CODES_KEPT) } }, "error", words), []];
}

/** Back to idle; `still`: the session may still live at the service; `reason`: the error that ended it. @param {State} state @param {boolean} still @param {string} [reason] @returns {Step} */
function ended(state, still, reason) {
  const gone = drop(state, reason);
  const next = state.renewal ? [drop(state.renewal)] : [];
  const [after, told] = claimDue(over(state));
  return [after, [still ? gone : { ...gone, do: "release" }, ...next, ...givenBack(state, after), ...told]];
}

/** The state after a session: what it had and did not bring to its end waits for the next. @param {State} state @returns {State} */
function over(state) {
  return {
    ...withoutSpeech(state),
    phase: /** @type {const} */ ("idle"),
    sessionId: null,
    renewal: null,
    shakyAt: null,
    asleepAt: null,
    held: [],
    silenced: false,
    meter: meter.end(state.meter, state.now),
    delegations: [], // valid only on the connection that made them
  };
}

/** Nothing more is said. What was not heard, and not asked, waits. @param {State} state @returns {State} */
function withoutSpeech(state) {
  const queue = speech.ended(state.speech, state.now, state.phase === "closing");
  return { ...state, speech: emptied(queue), runs: state.runs.map((run) => untold(requeued(run), queue)) };
}

/** The queue of a session that is over. @param {speech.Speech} queue @returns {speech.Speech} */
function emptied(queue) {
  return { ...queue, waiting: [], unheard: [], current: null, sounding: false };
}

// ---- as time goes by

/** @type {Rule} */
export function watchSession(state) {
  const { phase, now } = state;
  if (phase === "connecting" && state.microphone !== "asked" && now - state.dialledAt > START_MS) {
    return ended(notify(state, "error", "The call did not start in time. Check your network and try again.", true), true);
  }
  if (phase === "closing" && now - state.closingAt > CLOSE_MS) return ended(state, true);
  if (phase === "idle") return reopen(state);
  if (phase !== "live") return [state, []];
  if (state.shakyAt !== null && now - state.shakyAt > GRACE_MS) return lost(state);
  return chain(state, ...[endInTime, watchRenewal, warnOfCap, watchSound, reportMeter].map(whileLive));
}

/** After a planned hang-up, call again when there is something to hear. @type {Rule} */
function reopen(state) {
  if (!state.reopens) return [state, []];
  if (state.runs.some(watch.isOwed)) return openCall({ ...state, opening: "reopened" });
  return [{ ...state, reopens: state.runs.some((run) => !run.result) }, []];
}

const USED_UP = "The time that hermes-voice allows for calls is used up, so the call was ended. Tasks go on, and you can type.";
const NOBODY = "The call was ended because nobody spoke. Start it again whenever you like.";
const LONG_RUN = "Hermes is still working. The call was ended for the time being, and starts again by itself when there is something to hear.";

/** @type {Rule} */
function endInTime(state) {
  const why = meter.isUsedUp(state.meter, state.now) ? USED_UP : watch.isIdle(state) ? NOBODY : watch.isLongRun(state) ? LONG_RUN : "";
  return why ? close({ ...notify(state, "info", why), reopens: why === LONG_RUN }) : [state, []];
}

/** @type {Rule} */
function watchRenewal(state) {
  if (!state.renewal) return watch.mustRenew(state) ? renew(state) : [state, []];
  if (state.now - state.renewal.at <= START_MS) return [state, []];
  // Here time does run out: what is to be said waits meanwhile.
  const message = state.renewal.microphone === "asked" ? "The browser did not give the microphone in time." : "The next session did not start in time.";
  return renewalFailed(state, { type: "failed", message });
}

/** @type {Rule} */
function warnOfCap(state) {
  const [told, time] = meter.warn(state.meter, state.now);
  if (!time) return [state, []];
  const text = `The call ends in ${time}, because the time that hermes-voice allows for calls is nearly used up.`;
  return [say(notify({ ...state, meter: told }, "info", text), "notice", [text], null, null), []];
}

/** @type {Rule} */
function watchSound(state) {
  const [flow, trouble] = watch.troubleOf(state);
  return [trouble ? notify({ ...state, flow }, "error", trouble) : { ...state, flow }, []];
}

/** @type {Rule} */
function reportMeter(state) {
  const { sessionId, meterAt, now, attempt, seconds } = state;
  if (!sessionId || now < meterAt) return [state, []];
  return [{ ...state, meterAt: now + METER_MS }, [{ do: "meter", attempt, sessionId, seconds }]];
}
