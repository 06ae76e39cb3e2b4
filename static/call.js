// The call: one reducer, `step(state, event) -> [state, effects]`. Pure.
//
// Events carry `at`, the time in milliseconds; those of a session carry its `attempt`, so
// that whatever comes late from an older one is recognised. Effects are plain objects that
// app.js carries out; their results come back as events.
//
//   phase       means                                  left by
//   idle        no session                             dial -> connecting
//   connecting  microphone, offer, answer under way    started -> live; failed, hangUp -> idle
//   live        session.started came                   hangUp, idle -> closing; lost -> idle
//     asleep      paused by the service                resumed
//     renewal     the next session is being opened     its start, or the end of this -> connecting
//   closing     session.close sent                     closed, or 5 s -> idle
//
//   delegation  settling -> sent, captured (it answers a question) -> answered
//   answer      due -> asked (the server is asked for the right to tell it) -> mine -> told
//   question    queued -> asked (its append is placed) -> answering -> closed; one at a time
//   late words  after a question closed -> the server says whether they answer one -> told as
//               late, or a request after all
//   command     all of the user's newest words: stop, go on, say that again -> obeyed
//
// What must stay true:
//
//   1. Nothing is sent before `started` or after `session.close`.
//   2. Every delegation gets one answer, with its own id, on the connection that made it.
//   3. A word is handed over once; words whose run never began count as not handed over.
//   4. Runs outlive sessions: an update is a rule in every phase.
//   5. A spoken answer to a question is an utterance that began after the voice began to ask.
//   6. A result is told by one page only: the one whose claim came first.
//   7. A session that connects after the user hung up is closed, not ignored.
//   8. To a line that is asleep, or about to be replaced, only mute and close are sent.
//   9. No session is opened but by the user, for a renewal, or after a planned hang-up.
//  10. What the user has asked for is handed over before the call ends.
//  11. Words that answer a question that is closed become no run.
//  12. A command becomes no run, whether the model hands it over or not.

import { mayRemind, questionWords, remindersDue, reminderWords } from "./asking.js";
import * as meter from "./meter.js";
import { isOneOf } from "./phrases.js";
import { progressWords, sayAt, waitingWords } from "./progress.js";
import { areLate, dueAt, haveMarks } from "./settle.js";
import * as speech from "./speech.js";
import * as transcript from "./transcript.js";
import * as watch from "./watch.js";
import { closeMessage, commentary, cut, fits, muteMessage, thinking } from "./wire.js";

/** @typedef {import("./wire.js").Event} Event */
/** @typedef {{do: string, [field: string]: any}} Effect */
/**
 * @typedef {{requestId: string, command: string, description: string, choices: string[],
 *   until: number, stage: "queued" | "asked" | "answering" | "closed", sentAs: string,
 *   askedAt: number | null, asked: number, afterMs: number, aloud: boolean, outcome: string, note: string,
 *   at: number, saidAt: number, reminded: number, closedAt: number}} Question
 *   `sentAs`: the id of its append that is under way; `askedAt`: when it was first placed in
 *   this session, `asked`: how often; `afterMs`: an answer begins after this, and `aloud`:
 *   the voice has said enough of it since; `at`: when it came; `saidAt`: when something of it was last said; `reminded`: so many reminders were due
 * @typedef {{key: string, runId: string | null, at: number, request: string, about: string, state: string,
 *   tools: {status: string, label: string, preview: string}[], progress: string,
 *   question: Question | null, result: {finish: string, show: string, error: string} | null,
 *   seq: number, batches: number[], lines: {speaker: string, text: string}[], since: number,
 *   stopAsked: boolean, retries: number, following: boolean, followAt: number,
 *   noted: string, notedAt: number, saidAt: number, saidTimes: number, attempt: number,
 *   owed: string[], claim: "" | "due" | "asked" | "mine" | "told", claimAt: number}} Run
 *   `about` is the request it began with, `request` the newest that it answers.
 *   `owed` is what is to be said of its end, `attempt` the call in which it was asked.
 *   `lines` are kept until the server has named the run, `batches` of words until Hermes
 *   has taken it.
 * @typedef {{id: string, attempt: number, at: number, placeMs: number | null, state: "settling" | "captured" | "sent" | "answered",
 *   run: string | null}} Delegation
 * @typedef {{key: number, level: "info" | "error", text: string, at: number, offersCall: boolean}} Notice
 * @typedef {{attempt: number, sessionId: string | null, at: number}} Renewal   the next session
 */

const UTTERANCE_MS = 1300; // of quiet after which an answer is complete
const START_MS = 25000; // from dialling until the session must have started
const CLOSE_MS = 5000; // from session.close until we stop waiting for session.closed
const GRACE_MS = 8000; // a broken connection may come back by itself
const METER_MS = 30000; // the sidecar hangs up a session it has not heard of for 3 min
const HELD_KEPT = 50; // notes for a line that is asleep
const NOTE_MS = 3000; // between two silent notes about one run
const NOTE_AGAIN_MS = 30000; // with nothing new to tell
const KNOWN_CHARS = 20; // of a question, until anyone can know what it is
const LATE_MS = 10000; // after a question closed, words may still be meant for it
const LATE_CHARS = 100; // the server takes no longer answer
const ASK_MOST = 3; // times one question is asked aloud
const AGAIN_MS = 10000; // in which a delegation without new words is about the words before
const ECHO_MS = 3000; // words come up to 2 s after they were said
const RUNS_KEPT = 100;
const TOOLS_KEPT = 50;
const NOTICES_KEPT = 30;
const DELEGATIONS_KEPT = 100;
const HISTORY_LINES = 24;
const RETRIES_MOST = 8;
const CLAIM_AGAIN_MS = 2000;
const KEEP_MS = 1500; // of quiet, then what was said is kept by the server
const KEEP_AGAIN_MS = 5000;
const KEEP_LINES = 100; // at once; the server takes 200
const TITLE_BYTES = 120; // of a request that an answer names

export const START = {
  phase: /** @type {"idle" | "connecting" | "live" | "closing"} */ ("idle"),
  attempt: 0, // which opening the session is from
  openings: 0,
  opening: /** @type {"dialled" | "renewed" | "reopened"} */ ("dialled"), // why the newest was made
  call: "", // the id of the call's first session, by which the server knows the call
  sessionId: /** @type {string | null} */ (null),
  dialledAt: 0,
  liveAt: 0,
  closingAt: 0,
  expiresAt: 0, // when the service ends the session
  renewal: /** @type {Renewal | null} */ (null),
  renewals: 0, // that failed in this session
  triedAt: 0, // when the last of them did
  reopens: false, // the call was hung up by plan, and starts again with the answer
  shakyAt: /** @type {number | null} */ (null), // since when the connection is broken
  asleepAt: /** @type {number | null} */ (null), // since when the service has paused it
  /** @type {object[]} */ held: [], // messages for when it is awake
  flow: watch.FLOWING,
  meter: meter.NOTHING,
  meterAt: 0, // when the sidecar is next told that the session is up
  terms: {
    greeting: "",
    /** @type {string[]} */ hangUpPhrases: [],
    onLongRun: "stay",
    longRunMs: 300000,
    prices: { active: 0.05, standby: 0.02, currency: "$" },
  },
  muted: false,
  silenced: false, // the user asked for quiet; the voice is not played until it has ended
  heardAt: 0, // when somebody last spoke or work last moved
  seconds: /** @type {number | null} */ (null), // of the session, by the vendor's count
  idleMs: 300000,
  /** @type {string[]} */ stopPhrases: [],
  /** @type {string[]} */ goOnPhrases: [],
  /** @type {string[]} */ repeatPhrases: [],
  progress: /** @type {import("./progress.js").Pace} */ ("normal"),
  voiceApprovals: true, // words may answer a question
  /** @type {{key: string, requestId: string, batch: number, ids: string[]} | null} */
  late: null, // words of which the server is asked whether they answer a closed question
  handed: 0, // the newest batch that was handed over
  placesHold: true, // a delegation's place has been where its words are
  actedAt: -1e9, // when words of the user last went where they belong
  page: "", // makes the keys of this page's lines its own
  linesAt: 0, // when a line last changed that the server does not have
  now: 0,
  counter: 0,
  transcript: transcript.EMPTY,
  speech: speech.QUIET,
  /** @type {Delegation[]} */ delegations: [],
  /** @type {Run[]} */ runs: [],
  /** @type {Notice[]} */ notices: [],
};

/** @typedef {typeof START} State */
/** @typedef {[State, Effect[]]} Step */

/** @type {Record<string, (state: State, event: any) => Step>} */
const ALWAYS = {
  configured,
  set: (state, e) => [{ ...state, progress: e.progress ?? state.progress }, []],
  agreed: (state, e) => [{ ...state, terms: e.terms }, []],
  recalled,
  claimed,
  leave: (state) => keep(state),
  notKept: (state) => [{ ...state, transcript: transcript.unsave(state.transcript), linesAt: state.now + KEEP_AGAIN_MS }, []],
  mute,
  typed,
  listed,
  update,
  streamEnded,
  approve,
  answered,
  stopRun,
  refused,
  tick,
  notice: (state, e) => [notify(state, e.level, e.text), []],
};

/** @type {Record<string, Record<string, (state: State, event: any) => Step>>} */
const TABLE = {
  idle: { ...ALWAYS, dial, opened: late },
  connecting: { ...ALWAYS, opened, started, failed, lost, closed: lost, hangUp: abandon },
  live: {
    ...ALWAYS, paused, resumed, allowed, media, hangUp: close, heard, delegated, placed, sound, trouble, usage, closed, lost, link,
    stopSpeaking, goOn: tellRest, sayAgain: tellAgain,
  },
  closing: { ...ALWAYS, heard, usage, closed, lost },
};

/** Of the session that is to replace the present one. @type {Record<string, (state: State, event: any) => Step>} */
const RENEWAL = { opened: renewalOpened, started: renewalStarted, failed: renewalFailed, lost: renewalFailed, closed: renewalFailed };

const OF_SESSION = new Set([
  "paused", "resumed", "allowed", "media",
  "opened", "started", "failed", "lost", "closed", "heard", "delegated", "placed", "trouble", "usage", "link", "sound",
]);

// After these there is no call in which words could settle.
const ENDS = ["hangUp", "closed", "lost", "leave"];

/**
 * One event. Returns the next state and what is to be done.
 * @param {State} state @param {Event} event
 * @returns {Step}
 */
export function step(state, event) {
  const rule = TABLE[state.phase][event.type];
  if (OF_SESSION.has(event.type) && event.attempt !== state.attempt) {
    const next = event.attempt === state.renewal?.attempt && RENEWAL[event.type];
    if (next) return pump(...next({ ...state, now: event.at ?? state.now }, event));
    return event.type === "opened" ? late(state, event) : [state, []];
  }
  if (!rule) return [state, []];
  const now = { ...state, now: event.at ?? state.now };
  const ends = state.phase === "live" && ENDS.includes(event.type);
  return pump(...(ends ? each(now, handOver, (s) => rule(s, event)) : rule(now, event)));
}

const CUT_OFF = "The user talked over you. The rest of that answer is kept: it comes when they ask to go on.";

/** Send what may be said at this moment. @param {State} state @param {Effect[]} effects @returns {Step} */
function pump(state, effects) {
  // Over a broken connection it might be lost, and nobody would know.
  if (state.phase !== "live" || state.shakyAt !== null || isHeld(state)) return [state, effects];
  const id = `say_${state.attempt}_${state.counter}`;
  const [next, piece] = speech.next(state.speech, id, state.now);
  const moved = next === state.speech ? state : { ...state, speech: next };
  const [after, notes] = next.kept === state.speech.kept ? [moved, []] : note(moved, CUT_OFF, null);
  if (!piece) return [after, [...effects, ...notes]];
  const unmuted = state.silenced ? [{ do: "silence", on: false }] : [];
  const send = { do: "send", message: commentary(id, piece.text, known(state, piece.delegation)) };
  const sent = { ...after, counter: after.counter + 1, silenced: false };
  const told = piece.kind === "question" ? questionChanged(sent, piece.run, { sentAs: id }) : sent;
  return [told, [...effects, ...notes, ...unmuted, send]];
}

/** Whether nothing may be sent to the session for a while. @param {State} state */
function isHeld(state) {
  return state.asleepAt !== null || state.renewal !== null;
}

/** Send a message, or keep it until one may be sent. @param {State} state @param {object} message @returns {Step} */
function sendOrHold(state, message) {
  if (!isHeld(state)) return [state, [{ do: "send", message }]];
  return [{ ...state, held: [...state.held, message].slice(-HELD_KEPT) }, []];
}

/** Send what was held. @param {State} state @returns {Step} */
function release(state) {
  if (isHeld(state)) return [state, []];
  return [{ ...state, held: [] }, state.held.map((message) => ({ do: "send", message }))];
}

/** A delegation's id, if it was made on this connection. @param {State} state @param {string | null} id */
function known(state, id) {
  return state.delegations.some((d) => d.id === id && d.attempt === state.attempt) ? id : null;
}

/** Tell the model silently. @param {State} state @param {string} text @param {string | null} delegation @returns {Step} */
function note(state, text, delegation) {
  if (state.phase !== "live") return [state, []];
  const message = thinking(`note_${state.attempt}_${state.counter}`, text, known(state, delegation));
  return sendOrHold({ ...state, counter: state.counter + 1 }, message);
}

/** The same for several delegations. @param {State} state @param {string} text @param {string[]} ids @returns {Step} */
function noteAll(state, text, ids) {
  return each(state, ...ids.map((id) => (/** @type {State} */ s) => note(s, text, id)));
}

/** @param {State} state @param {"info" | "error"} level @param {string} text @param {boolean} [offersCall] @returns {State} */
function notify(state, level, text, offersCall = false) {
  const notice = { key: state.counter, level, text, at: state.now, offersCall };
  return { ...state, counter: state.counter + 1, notices: [...state.notices, notice].slice(-NOTICES_KEPT) };
}

/**
 * @param {State} state @param {speech.Piece["kind"]} kind @param {string[]} texts
 * @param {string | null} delegation @param {string | null} run
 * @returns {State}
 */
function say(state, kind, texts, delegation, run) {
  const pieces = texts.map((text) => ({ kind, text, delegation, run, at: state.now }));
  return { ...state, speech: speech.enqueue(state.speech, pieces) };
}

/** Apply functions one after the other, collecting their effects. @param {State} state @param {((state: State) => Step)[]} parts @returns {Step} */
function each(state, ...parts) {
  /** @type {Effect[]} */
  let effects = [];
  for (const part of parts) {
    const [next, more] = part(state);
    state = next;
    effects = [...effects, ...more];
  }
  return [state, effects];
}

// ---- the session

/** @param {State} state @returns {Step} */
function dial(state) {
  return openCall({ ...state, opening: "dialled", call: "", meter: meter.NOTHING });
}

/** @param {State} state @returns {Step} */
function openCall(state) {
  const attempt = state.openings + 1;
  const next = {
    ...state,
    phase: /** @type {const} */ ("connecting"),
    attempt,
    openings: attempt,
    sessionId: null,
    dialledAt: state.now,
    reopens: false,
    shakyAt: null,
    silenced: false,
    seconds: null,
    speech: emptied(state.speech), // what came up in between is on the screen
  };
  return each(next, keep, (s) => [s, [opening(s, attempt)]]);
}

/** The server's lines are the history; this page's go along in case it has none. @param {State} state @param {number} attempt @returns {Effect} */
function opening(state, attempt) {
  const open = { do: "open", attempt, history: transcript.history(state.transcript, HISTORY_LINES) };
  return state.call ? { ...open, call: state.call } : open;
}

/** @param {State} state @param {Event} event @returns {Step} */
function opened(state, event) {
  const next = { ...state, sessionId: event.sessionId, call: state.call || event.sessionId || "" };
  // The user may have muted before there was a microphone. No audio has left yet.
  return [{ ...next, meter: meter.allow(state.meter, event.secondsLeft, state.now) }, [{ do: "mute", on: state.muted }]];
}

/** It connected after the user had hung up: it owns a microphone and bills. @param {State} state @param {Event} event @returns {Step} */
function late(state, event) {
  return [state, [{ do: "drop", attempt: event.attempt, sessionId: event.sessionId }]];
}

/** @param {State} state @param {Event} event @returns {Step} */
function started(state, event) {
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
  };
  const greeting = state.opening === "dialled" && !state.runs.some(watch.isOwed) ? state.terms.greeting : "";
  const muted = { do: "send", message: muteMessage(`mute_${state.attempt}_${state.counter}`, true) };
  const asking = openQuestion(state);
  return each(
    { ...live, counter: state.counter + 1 },
    (s) => [s, state.muted ? [muted] : []],
    (s) => (asking?.question?.stage === "queued" ? ask(s, asking.key, "") : [s, []]),
    claimDue,
    (s) => [greeting ? say(s, "notice", [greeting], null, null) : s, []],
  );
}

/** @param {State} state @param {Event} event @returns {Step} */
function failed(state, event) {
  return ended(notify(state, "error", event.message, state.opening !== "dialled"), true);
}

/** Hung up before it was live. @param {State} state @returns {Step} */
function abandon(state) {
  return ended(state, true);
}

/** @param {State} state @returns {Step} */
function close(state) {
  // The server is ending one of the two; it knows which are left.
  if (state.renewal) return ended(state, true);
  const next = { ...state, phase: /** @type {const} */ ("closing"), closingAt: state.now, counter: state.counter + 1 };
  return [next, [{ do: "send", message: closeMessage(`close_${state.attempt}_${state.counter}`) }]];
}

/** @type {Record<string, string>} */
const CLOSINGS = {
  expired: "The call reached the longest time OpenAI allows. Start a new one to go on.",
  content: "OpenAI ended the call because of its content rules. Your tasks go on. Start the call again and put it in other words.",
  connection_lost: "The connection was lost. Your tasks go on; start the call again to hear of them.",
  remote_hangup: "OpenAI hung up. Your tasks go on; start the call again to hear of them.",
  close_requested: "The call was ended from another page, or by the server.",
};

/** The model's service closed the session. @param {State} state @param {Event} event @returns {Step} */
function closed(state, event) {
  const seconds = event.seconds ?? null;
  const counted = { ...state, seconds: seconds ?? state.seconds, meter: meter.count(state.meter, seconds, event.pausedSeconds) };
  if (state.phase === "closing") return ended(counted, false);
  if (state.renewal) return takeOver(counted, state.renewal);
  const why = CLOSINGS[event.reason] ?? CLOSINGS.connection_lost;
  return ended(notify(counted, "info", why, true), false);
}

/** @param {State} state @returns {Step} */
function lost(state) {
  if (state.phase === "closing") return ended(state, true);
  if (state.renewal) return takeOver(state, state.renewal);
  return ended(notify(state, "error", CLOSINGS.connection_lost, true), true);
}

/** Back to idle; `drop`: the session may still live at the service. @param {State} state @param {boolean} drop @returns {Step} */
function ended(state, drop) {
  const effects = [{ do: drop ? "drop" : "release", attempt: state.attempt, sessionId: state.sessionId }];
  const { renewal } = state;
  if (renewal) effects.push({ do: "drop", attempt: renewal.attempt, sessionId: renewal.sessionId });
  return [over(state), effects];
}

/** The state after a session: what it had and did not bring to its end waits for the next. @param {State} state @returns {State} */
function over(state) {
  const queue = speech.ended(state.speech, state.now);
  return {
    ...state,
    phase: /** @type {const} */ ("idle"),
    sessionId: null,
    renewal: null,
    shakyAt: null,
    asleepAt: null,
    held: [],
    silenced: false,
    meter: meter.end(state.meter, state.now),
    delegations: [], // valid only on the connection that made them
    speech: emptied(queue),
    runs: state.runs.map((run) => untold(requeued(run), queue)),
  };
}

/** An open question must be asked anew in the next session. @param {Run} run @returns {Run} */
function requeued(run) {
  const question = run.question;
  if (!question || question.stage === "closed") return run;
  return { ...run, question: { ...question, stage: "queued", sentAs: "", askedAt: null, asked: 0 } };
}

/** What was not said of a result is told in the next session. @param {Run} run @param {speech.Speech} queue @returns {Run} */
function untold(run, queue) {
  const waiting = queue.waiting.filter((piece) => piece.kind === "result" && piece.run === run.key);
  // It may wait behind what leads to it, or as a half.
  const left = run.owed.filter((text) => waiting.some((piece) => piece.text.endsWith(text) || text.endsWith(piece.text)));
  return left.length ? { ...run, claim: "mine", owed: left } : run;
}

/** The queue of a session that is over. @param {speech.Speech} queue @returns {speech.Speech} */
function emptied(queue) {
  return { ...queue, waiting: [], current: null, sounding: false };
}

/** The peer connection broke, or healed. @param {State} state @param {Event} event @returns {Step} */
function link(state, event) {
  return [{ ...state, shakyAt: event.broken ? (state.shakyAt ?? state.now) : null }, []];
}

/** @param {State} state @param {Event} event @returns {Step} */
function usage(state, event) {
  return [{ ...state, seconds: event.seconds, meter: meter.count(state.meter, event.seconds, event.pausedSeconds) }, []];
}

/** Nobody spoke for long: the service has paused the session. @param {State} state @returns {Step} */
function paused(state) {
  const stale = (/** @type {speech.Piece} */ piece) => piece.kind === "progress";
  return [{ ...state, asleepAt: state.now, meter: meter.sleep(state.meter, true, state.now), speech: speech.forget(state.speech, stale) }, []];
}

/** Somebody spoke: it is awake. @param {State} state @returns {Step} */
function resumed(state) {
  // What waited for this waits for a pause of the user as if it were new.
  const queue = { ...state.speech, freeAt: state.now };
  return release({ ...state, asleepAt: null, heardAt: state.now, speech: queue, meter: meter.sleep(state.meter, false, state.now) });
}

/** The server says how long the call may go on. @param {State} state @param {Event} event @returns {Step} */
function allowed(state, event) {
  return [{ ...state, meter: meter.allow(state.meter, event.secondsLeft, state.now) }, []];
}

/** How much audio has passed so far. @param {State} state @param {any} event @returns {Step} */
function media(state, event) {
  const { sent, received } = event;
  return [{ ...state, flow: watch.measure(state.flow, { sent, received }, watch.voicedOf(state)) }, []];
}

/** Open the next session while this one is up. @param {State} state @returns {Step} */
function renew(state) {
  const attempt = state.openings + 1;
  const next = { ...state, openings: attempt, renewal: { attempt, sessionId: null, at: state.now } };
  return each(next, keep, (s) => [s, [opening(s, attempt)]]);
}

/** The server has opened it, and is hanging up the one so far. @param {State} state @param {Event} event @returns {Step} */
function renewalOpened(state, event) {
  const renewal = /** @type {Renewal} */ ({ attempt: event.attempt, sessionId: event.sessionId, at: state.now });
  return [{ ...state, renewal, meter: meter.allow(state.meter, event.secondsLeft, state.now) }, [{ do: "mute", on: state.muted }]];
}

/** @param {State} state @param {Event} event @returns {Step} */
function renewalStarted(state, event) {
  return each(state, (s) => takeOver(s, /** @type {Renewal} */ (s.renewal)), (s) => started(s, event));
}

/** The present session goes on for what it has left. @param {State} state @param {Event} event @returns {Step} */
function renewalFailed(state, event) {
  const { attempt, sessionId } = /** @type {Renewal} */ (state.renewal);
  const minutes = Math.max(1, Math.round((state.expiresAt - state.now) / 60000));
  const why = event.message ?? "The next session ended before it began.";
  const told = notify(state, "error", `The call could not be renewed, and ends in about ${minutes} min. ${why}`);
  return each(
    { ...told, renewal: null, renewals: state.renewals + 1, triedAt: state.now },
    (s) => [s, [{ do: "drop", attempt, sessionId }]],
    release,
  );
}

/** The next session takes the place of the present one, within the same call. @param {State} state @param {Renewal} renewal @returns {Step} */
function takeOver(state, renewal) {
  const { attempt, sessionId } = renewal;
  const rest = over(state);
  const next = /** @type {State} */ ({
    ...rest,
    phase: "connecting",
    opening: "renewed",
    attempt,
    sessionId,
    dialledAt: renewal.at,
    seconds: null,
    runs: rest.runs.map((run) => (run.attempt === state.attempt ? { ...run, attempt } : run)),
  });
  return [next, [{ do: "takeOver", attempt, over: state.attempt, sessionId: state.sessionId, seconds: state.seconds }]];
}

/** How this server is set up. @param {State} state @param {Event} event @returns {Step} */
function configured(state, event) {
  const { stopPhrases, goOnPhrases = [], repeatPhrases = [], progress = "normal", voiceApprovals = true, page } = event;
  return [{ ...state, idleMs: event.idleSeconds * 1000, stopPhrases, goOnPhrases, repeatPhrases, progress, voiceApprovals, page }, []];
}

/** @param {State} state @param {Event} event @returns {Step} */
function mute(state, event) {
  const next = { ...state, muted: event.on, counter: state.counter + 1 };
  const local = { do: "mute", on: event.on };
  if (state.phase !== "live") return [next, [local]];
  const message = muteMessage(`mute_${state.attempt}_${state.counter}`, event.on);
  return each(next, (s) => [s, [local]], (s) => (s.renewal ? sendOrHold(s, message) : [s, [{ do: "send", message }]]));
}

/** Silence at once; the work goes on. @param {State} state @returns {Step} */
function stopSpeaking(state) {
  const next = { ...state, silenced: true, speech: speech.hush(state.speech) };
  const [told, effects] = note(next, "The user wants you to be quiet until they speak again.", null);
  return [told, [{ do: "silence", on: true }, ...effects]];
}

/** Say the rest of what was cut off. @param {State} state @returns {Step} */
function tellRest(state) {
  const first = state.speech.kept[0];
  const run = state.runs.find((r) => r.key === first?.run);
  const title = run ? titleOf(state, run) : "";
  const lead = title && !first.text.startsWith(title) ? [{ ...first, text: title }] : [];
  return [{ ...state, speech: speech.goOn(state.speech, lead, state.now) }, []];
}

/** Say the last answer once more. @param {State} state @returns {Step} */
function tellAgain(state) {
  return [{ ...state, speech: speech.again(state.speech, state.now) }, []];
}

/** The voice began or ceased to sound. @param {State} state @param {Event} event @returns {Step} */
function sound(state, event) {
  const next = { ...state, speech: speech.sound(state.speech, event.on, state.now), heardAt: state.now };
  if (event.on || !state.silenced) return [next, []];
  return [{ ...next, silenced: false }, [{ do: "silence", on: false }]];
}

/** The model refused something we sent. @param {State} state @param {Event} event @returns {Step} */
function trouble(state, event) {
  const current = state.speech.current;
  if (!current || event.sent !== current.id) return [state, []];
  const [left, givenUp] = speech.refused(state.speech, event.code === "invalid_value");
  const next = { ...state, speech: left };
  return [givenUp ? notify(next, "error", "The voice could not say something. It is on the screen.") : next, []];
}

/** An append has its place in the timeline. @param {State} state @param {Event} event @returns {Step} */
function placed(state, event) {
  const id = event.sent ?? state.speech.current?.id;
  const next = { ...state, speech: speech.placed(state.speech, event.sent, state.now) };
  const run = state.runs.find((r) => r.question && r.question.sentAs === id);
  if (!run?.question) return [next, []];
  const { stage, asked, askedAt } = run.question;
  const place = { sentAs: "", asked: asked + 1, askedAt: askedAt ?? state.now, afterMs: event.endMs, aloud: false, saidAt: state.now };
  return [questionChanged(next, run.key, { ...place, stage: stage === "queued" ? "asked" : stage }), []];
}

// ---- what is said

/** @param {State} state @param {Event} event @returns {Step} */
function heard(state, event) {
  const words = /** @type {any} */ (event);
  const added = listen(state, transcript.add(state.transcript, words, state.attempt, state.now));
  const next = { ...state, transcript: added, heardAt: state.now, linesAt: state.now };
  if (event.speaker === "assistant") next.speech = speech.voiced(state.speech, words.text);
  else if (!transcript.isEchoing(added)) next.speech = speech.listened(state.speech, state.now, !transcript.isSound(words.text));
  return [event.speaker === "assistant" ? beginToAsk(next, words.endMs) : next, []];
}

/** The voice begins to ask: a "yes" to what it said before is no answer. @param {State} state @param {number} endMs @returns {State} */
function beginToAsk(state, endMs) {
  const run = openQuestion(state);
  const question = run?.question;
  if (!run || question?.stage !== "asked" || question.aloud || endMs < question.afterMs) return state;
  return questionChanged(state, run.key, { aloud: (state.speech.current?.voiced ?? KNOWN_CHARS) >= KNOWN_CHARS, afterMs: endMs });
}

/** While the voice is heard, the microphone may hear it too. @param {State} state @param {transcript.Transcript} added */
function listen(state, added) {
  const isHeard = !state.silenced && (state.speech.sounding || state.now - state.speech.soundAt < ECHO_MS);
  return isHeard ? transcript.markEcho(added, state.attempt) : added;
}

/** The model wants work done. @param {State} state @param {Event} event @returns {Step} */
function delegated(state, event) {
  if (state.delegations.some((known) => known.id === event.id)) return [state, []];
  const delegation = /** @type {Delegation} */ ({ id: event.id, attempt: state.attempt, at: state.now, placeMs: event.placeMs ?? null, state: "settling", run: null });
  return [{ ...state, heardAt: state.now, delegations: [...state.delegations, delegation].slice(-DELEGATIONS_KEPT) }, []];
}

/** A typed message takes the same way as a spoken one. @param {State} state @param {Event} event @returns {Step} */
function typed(state, event) {
  const asking = answerable(state);
  if (asking?.question) return typedAnswer(state, asking, event.text);
  const added = transcript.addTyped(state.transcript, event.text, state.attempt, state.now);
  // It takes along what was said before it, and so answers the delegations of that.
  const ids = state.delegations.filter((d) => d.state === "settling").map((d) => d.id);
  return each(
    { ...state, transcript: added, heardAt: state.now, linesAt: state.now },
    (s) => note(s, `The user typed: ${event.text}`, null),
    (s) => delegate(s, `typed_${event.id}`, ids),
  );
}

/** While a question is open, a typed message answers it or comes back to be kept. @param {State} state @param {Run} run @param {string} text @returns {Step} */
function typedAnswer(state, run, text) {
  if (run.question?.stage === "answering") {
    return [notify(state, "info", "Your answer is on its way to Hermes. Send this after it."), [{ do: "draft", text }]];
  }
  const asked = questionChanged(state, run.key, { stage: "answering" });
  const effect = { do: "approve", key: run.key, runId: run.runId, requestId: run.question?.requestId, heard: text, typed: text };
  return [asked, [effect]];
}

/** The run with an open question. @param {State} state */
function openQuestion(state) {
  return state.runs.find((run) => run.question && run.question.stage !== "closed" && !run.result && !run.stopAsked);
}

/** The same, if words may answer it. @param {State} state */
function answerable(state) {
  return state.voiceApprovals ? openQuestion(state) : undefined;
}

/**
 * Hand over what was said, as one request; `ids` are the delegations it answers.
 * @param {State} state @param {string} key @param {string[]} ids
 * @returns {Step}
 */
function delegate(state, key, ids) {
  const lines = transcript.request(state.transcript);
  const [handed, batch] = transcript.hand(state.transcript);
  const request = lines.findLast((line) => line.speaker === "user")?.text ?? "";
  const run = { ...newRun(state, key, null, request), lines, batches: [batch] };
  const next = {
    ...state,
    transcript: handed,
    heardAt: state.now,
    actedAt: state.now,
    handed: batch,
    runs: [...state.runs, run].slice(-RUNS_KEPT),
    delegations: assign(state.delegations, ids, "sent", key),
  };
  return [next, [{ do: "delegate", key, lines }]];
}

/** @param {Delegation[]} delegations @param {string[]} ids @param {Delegation["state"]} stage @param {string | null} run */
function assign(delegations, ids, stage, run) {
  return delegations.map((d) => (ids.includes(d.id) ? { ...d, state: stage, run } : d));
}

/** @param {State} state @param {string} key @param {string | null} runId @param {string} request @returns {Run} */
function newRun(state, key, runId, request) {
  return {
    key, runId, request, about: request, batches: [], lines: [], at: state.now, state: "starting", tools: [], progress: "", question: null,
    result: null, seq: 0, since: state.now, stopAsked: false, retries: 0, following: true, followAt: 0, noted: "",
    notedAt: 0, saidAt: 0, saidTimes: 0, attempt: state.attempt, owed: [], claim: "", claimAt: 0,
  };
}

/** @param {State} state @param {string | null} key @param {(run: Run) => Run} change @returns {State} */
function changed(state, key, change) {
  return { ...state, runs: state.runs.map((run) => (run.key === key ? change(run) : run)) };
}

/** @param {State} state @param {string | null} key @param {Partial<Question>} fields @returns {State} */
function questionChanged(state, key, fields) {
  const next = changed(state, key, (run) => ({ ...run, question: run.question && { ...run.question, ...fields } }));
  const isOver = fields.stage === "answering" || fields.stage === "closed";
  return isOver ? { ...next, speech: speech.forget(next.speech, (piece) => piece.kind === "reminder" && piece.run === key) } : next;
}

// ---- runs

/** The server's runs of this conversation, after a reload. @param {State} state @param {Event} event @returns {Step} */
function listed(state, event) {
  const known = new Set(state.runs.map((run) => run.runId));
  /** @type {any[]} */
  const unknown = event.runs.filter((/** @type {any} */ run) => !known.has(run.run_id));
  const runs = unknown.map((run) => ({
    ...newRun(state, run.run_id, run.run_id, run.request),
    at: state.now - run.seconds * 1000,
    attempt: -1,
    state: run.state,
    following: !run.result,
    result: run.result && resultOf(run.result),
    owed: run.result?.say ?? [],
    claim: run.result && !run.delivered && run.result.say?.length ? /** @type {const} */ ("due") : /** @type {const} */ (""),
  }));
  const follow = runs.filter((run) => run.following).map((run) => ({ do: "follow", key: run.key, runId: run.runId, after: 0 }));
  return [{ ...state, runs: [...runs, ...state.runs].slice(-RUNS_KEPT) }, follow];
}

/** @param {any} done */
function resultOf(done) {
  return { finish: done.finish_reason, show: done.show ?? "", error: done.error?.message ?? "" };
}

/** @type {Record<string, (state: State, run: Run, update: any) => Step>} */
const UPDATES = {
  run: ran,
  tool: tool,
  approval: asks,
  approval_closed: askedEnough,
  progress: (state, run, update) => [changed(state, run.key, (r) => ({ ...r, progress: update.text })), []],
  steered: (state, run) => note(state, "The user's words were handed to Hermes, which is still working.", delegationOf(state, run.key)),
  done,
  // Its stream ends after this.
  error: (state, run, update) => [changed(notify(state, "info", update.message), run.key, (r) => ({ ...r, retries: 1 })), []],
};

// They are about the stream, and carry the number of the update before.
const UNNUMBERED = ["run", "error"];

/** One update of a run's stream. @param {State} state @param {Event} event @returns {Step} */
function update(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  const rule = UPDATES[event.update.type];
  const repeated = !UNNUMBERED.includes(event.update.type) && event.update.seq <= (run?.seq ?? 0);
  if (!run || run.result || !rule || repeated) return [state, []];
  const numbered = changed(state, run.key, (r) => ({ ...r, seq: Math.max(r.seq, event.update.seq ?? 0), retries: 0 }));
  return rule({ ...numbered, heardAt: state.now }, run, event.update);
}

// In these states Hermes has the words.
const TAKEN = ["running", "stopping"];

/** @param {State} state @param {Run} run @param {any} update @returns {Step} */
function ran(state, run, update) {
  const twin = state.runs.find((r) => r.runId === update.run_id && r.key !== run.key);
  if (twin) return joined(state, run, twin, update.state);
  const since = update.seconds === undefined ? run.since : state.now - update.seconds * 1000;
  const next = changed(state, run.key, (r) => ({
    ...r,
    runId: update.run_id,
    state: r.stopAsked ? "stopping" : update.state,
    since,
    batches: TAKEN.includes(update.state) ? [] : r.batches,
    lines: [],
  }));
  const stop = run.stopAsked && !run.runId ? [{ do: "stop", key: run.key, runId: update.run_id }] : [];
  return [next, stop];
}

const TOGETHER = "This is answered together with the user's other words.";

/** The server took these words into a run that was waiting: one run, one card. @param {State} state @param {Run} run @param {Run} into @param {string} reached @returns {Step} */
function joined(state, run, into, reached) {
  const batches = TAKEN.includes(reached) ? [] : [...into.batches, ...run.batches];
  const runs = state.runs
    .filter((r) => r.key !== run.key)
    .map((r) => (r.key === into.key ? { ...r, request: run.request || r.request, batches } : r));
  const ids = state.delegations.filter((d) => d.run === run.key).map((d) => d.id);
  const delegations = assign(state.delegations, ids, into.result ? "answered" : "sent", into.key);
  const late = into.result ? ids : [];
  const stop = { type: "stopRun", key: into.key };
  return each(
    { ...state, runs, delegations },
    (s) => [s, [{ do: "unfollow", key: run.key }]],
    (s) => (run.stopAsked && !into.stopAsked ? stopRun(s, stop) : [s, []]),
    ...late.map((id) => (/** @type {State} */ s) => note(s, TOGETHER, id)),
  );
}

/** @param {State} state @param {Run} run @param {any} update @returns {Step} */
function tool(state, run, update) {
  const entry = { status: update.status, label: update.label, preview: update.preview ?? "" };
  const open = run.tools.findLastIndex((t) => t.status === "running" && t.label === entry.label);
  const tools = open >= 0 && entry.status !== "running"
    ? run.tools.map((t, n) => (n === open ? { ...entry, preview: entry.preview || t.preview } : t))
    : [...run.tools, entry].slice(-TOOLS_KEPT);
  return [changed(state, run.key, (r) => ({ ...r, tools })), []];
}

/** @param {State} state @param {Run} run @param {any} update @returns {Step} */
function asks(state, run, update) {
  const question = /** @type {Question} */ ({
    requestId: update.request_id,
    command: update.command,
    description: update.description,
    choices: update.choices,
    until: state.now + update.seconds_left * 1000,
    stage: "queued",
    sentAs: "",
    askedAt: null,
    asked: 0,
    afterMs: 0,
    aloud: false,
    outcome: "",
    note: "",
    at: state.now,
    saidAt: state.now,
    reminded: 0,
    closedAt: 0,
  });
  return ask(changed(state, run.key, (r) => ({ ...r, question })), run.key, "");
}

/** Ask the run's question aloud, unless it is being stopped or another one is open. @param {State} state @param {string} key @param {string} before @returns {Step} */
function ask(state, key, before) {
  const run = state.runs.find((r) => r.key === key);
  if (!run?.question) return [state, []];
  const words = `${before}${questionWords(run.question, mayAnswer(state))}`;
  const asked = questionChanged(state, key, { stage: "queued" });
  const fresh = { ...asked, speech: speech.forget(asked.speech, (piece) => piece.kind === "question" && piece.run === key) };
  return [openQuestion(fresh)?.key !== key ? fresh : say(fresh, "question", [words], delegationOf(state, key), key), []];
}

/** Whether the voice may ask for a spoken answer. @param {State} state */
function mayAnswer(state) {
  return state.voiceApprovals && !state.muted;
}

/** The newest delegation that a run answers, for its appends. @param {State} state @param {string} key */
function delegationOf(state, key) {
  return state.delegations.findLast((d) => d.run === key)?.id ?? null;
}

/** @type {Record<string, string>} */
const CLOSED_NOTES = {
  answered: "The user's answer reached Hermes; the task goes on.",
  timeout: "The question to the user ran out of time; Hermes did not do what it asked about.",
  run_ended: "The question is over, because the task has ended or is being stopped.",
};

/** A question is over. @param {State} state @param {Run} run @param {any} update @returns {Step} */
function askedEnough(state, run, update) {
  if (run.question?.requestId !== update.request_id) return [state, []];
  const reason = update.reason;
  const over = questionChanged(state, run.key, { stage: "closed", closedAt: state.now, outcome: run.question?.outcome || reason });
  const quiet = { ...over, speech: speech.forget(over.speech, (piece) => piece.kind === "question" && piece.run === run.key) };
  if (reason === "timeout") {
    const told = "Nobody answered Hermes's question in time, so it did not do that.";
    return releaseCaptured(say(quiet, "notice", [told], delegationOf(state, run.key), run.key));
  }
  return each(quiet, (s) => note(s, CLOSED_NOTES[reason] ?? CLOSED_NOTES.run_ended, delegationOf(s, run.key)), releaseCaptured);
}

/** Delegations that were captured by a question are answered by its end. @param {State} state @returns {Step} */
function releaseCaptured(state) {
  const captured = state.delegations.filter((d) => d.state === "captured");
  const released = { ...state, delegations: assign(state.delegations, captured.map((d) => d.id), "answered", null) };
  return each(released, ...captured.map((d) => (/** @type {State} */ s) => note(s, "The user's words were about Hermes's question.", d.id)));
}

/** The end of its run closes a question that is open. @param {Question} question @param {number} at @returns {Question} */
function closedWith(question, at) {
  if (question.stage === "closed") return question;
  return { ...question, stage: "closed", closedAt: at, outcome: question.outcome || "run_ended" };
}

/** A run has ended. @param {State} state @param {Run} run @param {any} update @returns {Step} */
function done(state, run, update) {
  // Hermes never had these words, so the next request takes them along.
  const unheard = update.finish_reason === "failed" && !update.superseded_by;
  const unasked = unheard ? transcript.takeBack(state.transcript, run.batches) : state.transcript;
  const over = changed(state, run.key, (r) => ({
    ...r,
    at: state.now, // its card moves to where the answer came
    state: "ended",
    following: false,
    result: resultOf(update),
    question: r.question && closedWith(r.question, state.now),
  }));
  const quiet = { ...over, transcript: unasked, speech: speech.forget(over.speech, (piece) => piece.run === run.key) };
  if (update.continued_by) return goOn(quiet, run, update);
  const ids = state.delegations.filter((d) => d.run === run.key).map((d) => d.id);
  const newest = ids.pop() ?? null;
  const answered = { ...quiet, delegations: state.delegations.map((d) => (d.run === run.key ? { ...d, state: /** @type {const} */ ("answered") } : d)) };
  const told = update.superseded_by ? answered : owe(answered, run.key, update.say ?? []);
  const text = update.superseded_by
    ? "This request was replaced by what the user said since. The answer to that comes later."
    : TOGETHER;
  const silent = update.superseded_by ? [...ids, newest] : ids;
  return each(told, claimDue, ...silent.map((id) => (/** @type {State} */ s) => note(s, text, id)), releaseCaptured);
}

/** Some of the words came too late for this run and are a run of their own. @param {State} state @param {Run} run @param {any} update @returns {Step} */
function goOn(state, run, update) {
  const known = state.runs.find((r) => r.runId === update.continued_by);
  const key = known?.key ?? update.continued_by;
  const moved = state.delegations.map((d) => (update.continued.includes(d.id) ? { ...d, run: key } : d));
  const after = newRun(state, key, key, transcript.lastAsked(state.transcript));
  const next = { ...state, delegations: moved, runs: known ? state.runs : [...state.runs, after].slice(-RUNS_KEPT) };
  const { continued_by: _, ...rest } = update;
  const ended = changed(next, run.key, (r) => ({ ...r, result: null }));
  return each(ended, (s) => done(s, run, rest), (s) => [s, known ? [] : [{ do: "follow", key, runId: key, after: 0 }]]);
}

/** What is to be said of a run's end, once it may. @param {State} state @param {string} key @param {string[]} say @returns {State} */
function owe(state, key, say) {
  return changed(state, key, (run) => {
    // A run the server never named is known to this page only.
    const claim = !say.length ? /** @type {const} */ ("told") : run.runId ? /** @type {const} */ ("due") : /** @type {const} */ ("mine");
    return { ...run, owed: say, claim };
  });
}

/** In a call, claim what is to be told. @param {State} state @returns {Step} */
function claimDue(state) {
  if (state.phase !== "live") return [state, []];
  const mine = state.runs.filter((run) => run.claim === "mine").reduce(tell, state);
  const due = mine.runs.filter((run) => run.claim === "due" && state.now >= run.claimAt);
  const keys = new Set(due.map((run) => run.key));
  const runs = mine.runs.map((run) => (keys.has(run.key) ? { ...run, claim: /** @type {const} */ ("asked") } : run));
  return [{ ...mine, runs }, due.map((run) => ({ do: "claim", key: run.key, runId: run.runId }))];
}

/** The answer to a claim; `mine` is null if there was none. @param {State} state @param {Event} event @returns {Step} */
function claimed(state, event) {
  const run = state.runs.find((r) => r.key === event.key && r.claim === "asked");
  if (!run) return [state, []];
  if (event.mine === null) return [changed(state, run.key, (r) => ({ ...r, claim: "due", claimAt: state.now + CLAIM_AGAIN_MS })), []];
  const next = changed(state, run.key, (r) => ({ ...r, claim: event.mine ? "mine" : "told" }));
  if (event.mine) return claimDue(next);
  return note(next, "The answer to this was told by another page.", delegationOf(state, run.key));
}

/** What leads to a result that is not about what was asked last. @param {State} state @param {Run} run */
function titleOf(state, run) {
  // Words that the server has not taken up yet may still join this run.
  const later = state.runs.slice(state.runs.findIndex((r) => r.key === run.key) + 1).some((other) => other.request && other.runId);
  const isEarlier = run.attempt !== state.attempt || (later && run.result?.finish !== "cancelled");
  return isEarlier && run.about ? `About what you asked before, “${cut(run.about, TITLE_BYTES)}”:` : "";
}

/** Say a run's end. @param {State} state @param {Run} run @returns {State} */
function tell(state, run) {
  const [first, ...others] = run.owed;
  const title = titleOf(state, run);
  const together = `${title} ${first}`.trim();
  const pieces = title && !fits(together) ? [title, ...run.owed] : [together, ...others];
  const told = changed(state, run.key, (r) => ({ ...r, claim: "told" }));
  return say(told, "result", pieces, delegationOf(state, run.key), run.key);
}

/** A stream broke, or could not be opened. @param {State} state @param {Event} event @returns {Step} */
function streamEnded(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  if (!run || run.result) return [state, []];
  const hopeless = !run.runId && run.retries >= RETRIES_MOST;
  if (event.refused || hopeless) {
    const message = event.refused && event.message ? event.message : "hermes-voice cannot be reached, so it is not known whether Hermes got this. Ask again when it is back.";
    const finish = event.refused && !run.runId ? "failed" : "unknown";
    return done(state, run, { finish_reason: finish, say: [message], show: message, error: { message } });
  }
  const wait = Math.min(1000 * 2 ** run.retries, 15000);
  const broken = run.retries ? state : notify(state, "info", "The connection to hermes-voice broke. Trying again.");
  return [changed(broken, run.key, (r) => ({ ...r, following: false, followAt: state.now + wait, retries: r.retries + 1 })), []];
}

/** @param {State} state @param {Event} event @returns {Step} */
function stopRun(state, event) {
  const run = state.runs.find((r) => r.key === event.key && !r.result);
  if (!run) return [state, []];
  const next = changed(state, run.key, (r) => ({ ...r, stopAsked: true, state: "stopping" }));
  const quiet = { ...next, speech: speech.forget(next.speech, (piece) => piece.run === run.key) };
  // Without an id yet, the stop goes out as soon as the server names one.
  return [quiet, run.runId ? [{ do: "stop", key: run.key, runId: run.runId }] : []];
}

/** The server refused something the user did. @param {State} state @param {Event} event @returns {Step} */
function refused(state, event) {
  const told = notify(state, "error", event.message);
  const next = changed(told, event.key ?? null, (r) => ({ ...r, stopAsked: false, state: r.result ? r.state : "running" }));
  // A question that the stop kept back is asked after all.
  const question = next.runs.find((r) => r.key === event.key)?.question;
  return question?.stage === "queued" && !question.sentAs ? ask(next, event.key, "") : [next, []];
}

/** A click on a question's card. @param {State} state @param {Event} event @returns {Step} */
function approve(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  const open = run?.question && ["queued", "asked"].includes(run.question.stage);
  if (!run || !open || run.question?.requestId !== event.requestId) return [state, []];
  const next = questionChanged(state, run.key, { stage: "answering" });
  return [next, [{ do: "approve", key: run.key, runId: run.runId, requestId: event.requestId, choice: event.choice }]];
}

/** Words that came soon after a question closed may be meant for it: the server knows. @param {State} state @param {string[]} ids @returns {Step | null} */
function lateAnswer(state, ids) {
  const heard = transcript.newestWords(state.transcript, state.attempt);
  const { userAt } = state.speech;
  const run = state.runs.findLast(({ runId, question: q }) => runId && q?.stage === "closed" && userAt >= q.at && userAt - q.closedAt < LATE_MS);
  if (!run?.question || !heard || heard.length > LATE_CHARS || state.late || !state.voiceApprovals) return null;
  const newest = transcript.newest(state.transcript, state.attempt);
  const [handed, batch] = transcript.hand(state.transcript, (f) => newest.includes(f));
  const { requestId } = run.question;
  const next = { ...state, transcript: handed, late: { key: run.key, requestId, batch, ids }, delegations: assign(state.delegations, ids, "captured", null) };
  return [next, [{ do: "approve", key: run.key, runId: run.runId, requestId, heard, late: true }]];
}

/** @param {State} state @param {Event} event @returns {Step} */
function answeredLate(state, event) {
  const late = state.late;
  if (!late || late.requestId !== event.requestId) return [state, []];
  const isAnswer = event.code === "too_late" || event.choice;
  const outcome = state.runs.find((r) => r.key === late.key)?.question?.outcome;
  // Once looked at, words after this question are what they are.
  const over = questionChanged({ ...state, late: null, actedAt: state.now }, late.key, { closedAt: -1e9 });
  if (!isAnswer) {
    const unasked = { ...over, transcript: transcript.takeBack(over.transcript, [late.batch]) };
    return [{ ...unasked, delegations: assign(over.delegations, late.ids, "settling", null) }, []];
  }
  const released = { ...over, delegations: assign(over.delegations, late.ids, "answered", null) };
  if (outcome === "timeout") {
    const fresh = { ...released, speech: speech.forget(released.speech, (piece) => piece.kind === "notice" && piece.run === late.key) };
    const last = late.ids.at(-1) ?? null;
    return noteAll(say(fresh, "notice", [TOO_LATE], last, late.key), "The user's answer came too late.", late.ids.slice(0, -1));
  }
  const told = outcome === "run_ended" ? "That answer came too late: the task has ended." : "Hermes's question was already answered.";
  return noteAll(notify(released, "info", told), told, late.ids);
}

const TOO_LATE = "That answer came too late: the question had run out of time, so Hermes did not do it. Ask for it again if you still want it.";

/** An answer that came late and was not handed over by the model. @param {State} state @returns {Step} */
function listenForLate(state) {
  const settling = state.delegations.some((d) => d.state === "settling");
  if (state.phase !== "live" || settling || answerable(state) || state.now - state.speech.userAt < UTTERANCE_MS) return [state, []];
  return lateAnswer(state, []) ?? [state, []];
}

/** One question at a time, and reminders of it. @param {State} state @returns {Step} */
function remind(state) {
  const run = openQuestion(state);
  const question = run?.question;
  if (state.phase !== "live" || !run || !question) return [state, []];
  const isQueued = state.speech.waiting.some((piece) => piece.kind === "question" && piece.run === run.key);
  if (question.stage === "queued" && !question.sentAs) return isQueued ? [state, []] : ask(state, run.key, "");
  const due = remindersDue(question, state.now);
  if (question.stage !== "asked" || due <= question.reminded) return [state, []];
  if (!mayRemind(question, state.now)) return [questionChanged(state, run.key, { reminded: due }), []];
  const words = reminderWords(question, state.now, mayAnswer(state));
  const next = questionChanged(state, run.key, { reminded: due, saidAt: state.now });
  return [say(next, "reminder", [words], null, run.key), []];
}

/** What became of an answer: `choice` (null: not clear), or `message` if it failed. @param {State} state @param {Event} event @returns {Step} */
function answered(state, event) {
  if (event.late) return answeredLate(state, event);
  const run = state.runs.find((r) => r.key === event.key);
  const question = run?.question;
  if (!run || !question || question.requestId !== event.requestId) return [state, []];
  if (event.choice) return [questionChanged(state, run.key, { outcome: event.choice === "deny" ? "denied" : "allowed" }), []];
  const draft = event.typed ? [{ do: "draft", text: event.typed }] : [];
  // Meanwhile it was closed, or is to be asked anew in another session.
  if (question.stage !== "answering") return [event.message ? notify(state, "error", event.message) : state, draft];
  const help = event.message ?? "That was not a clear yes or no.";
  const reopened = questionChanged(state, run.key, { stage: question.asked ? "asked" : "queued", note: help });
  if (event.message || question.asked >= ASK_MOST) return [moveOn(reopened, run.key), draft];
  const [asked, effects] = ask(reopened, run.key, "Sorry, that was not a clear yes or no. ");
  return [asked, [...effects, ...draft]];
}

/** Let only later words answer. @param {State} state @param {string} key @returns {State} */
function moveOn(state, key) {
  const ends = state.transcript.lines.flatMap((line) => (line.session === state.attempt ? line.fragments.map((f) => f.endMs) : []));
  return questionChanged(state, key, { afterMs: Math.max(0, ...ends) });
}

// ---- time

/** @param {State} state @returns {Step} */
function tick(state) {
  return each(state, watchSession, settle, listenForAnswer, listenForCommand, listenForLate, handTail, remind, reportProgress, followAgain, claimDue, keepLines);
}

/** @param {State} state @returns {Step} */
function watchSession(state) {
  if (state.phase === "connecting" && state.now - state.dialledAt > START_MS) {
    return ended(notify(state, "error", "The call did not start in time. Check your network and try again.", true), true);
  }
  if (state.phase === "closing" && state.now - state.closingAt > CLOSE_MS) return ended(state, true);
  if (state.phase === "idle") return reopen(state);
  if (state.phase !== "live") return [state, []];
  if (state.shakyAt !== null && state.now - state.shakyAt > GRACE_MS) return lost(state);
  return each(state, ...[endInTime, watchRenewal, warnOfCap, watchSound, reportMeter].map(whileLive));
}

/** A rule for a live session only. @param {(state: State) => Step} rule @returns {(state: State) => Step} */
function whileLive(rule) {
  return (state) => (state.phase === "live" ? rule(state) : [state, []]);
}

/** After a planned hang-up, call again when there is something to hear. @param {State} state @returns {Step} */
function reopen(state) {
  if (!state.reopens) return [state, []];
  if (state.runs.some(watch.isOwed)) return openCall({ ...state, opening: "reopened" });
  return [{ ...state, reopens: state.runs.some((run) => !run.result) }, []];
}

/** @param {State} state @returns {Step} */
function endInTime(state) {
  const end = (/** @type {string} */ why, offersCall = false) => close(notify(state, "info", why, offersCall));
  if (meter.isUsedUp(state.meter, state.now)) return end("The time that hermes-voice allows for calls is used up, so the call was ended. Your tasks go on, and you can type.");
  if (watch.isIdle(state)) return end("The call was ended because nobody spoke. Start it again whenever you like.");
  if (!watch.isLongRun(state)) return [state, []];
  const [next, effects] = end("Hermes is still working. The call was ended to save money, and starts again by itself when there is something to hear.");
  return [{ ...next, reopens: true }, effects];
}

/** @param {State} state @returns {Step} */
function watchRenewal(state) {
  if (!state.renewal) return watch.mustRenew(state) ? renew(state) : [state, []];
  if (state.now - state.renewal.at <= START_MS) return [state, []];
  return renewalFailed(state, { type: "failed", message: "The next session did not start in time." });
}

/** @param {State} state @returns {Step} */
function warnOfCap(state) {
  const [told, time] = meter.warn(state.meter, state.now);
  if (!time) return [state, []];
  const text = `The call ends in ${time}, because the time that hermes-voice allows for calls is nearly used up.`;
  return [say(notify({ ...state, meter: told }, "info", text), "notice", [text], null, null), []];
}

/** @param {State} state @returns {Step} */
function watchSound(state) {
  const [flow, trouble] = watch.troubleOf(state);
  return [trouble ? notify({ ...state, flow }, "error", trouble) : { ...state, flow }, []];
}

/** @param {State} state @returns {Step} */
function reportMeter(state) {
  if (!state.sessionId || state.now < state.meterAt) return [state, []];
  const effect = { do: "meter", attempt: state.attempt, sessionId: state.sessionId, seconds: state.seconds };
  return [{ ...state, meterAt: state.now + METER_MS }, [effect]];
}

/** Hand over what was said once it is complete. @param {State} state @returns {Step} */
function settle(state) {
  if (state.phase !== "live") return [state, []];
  // What was delegated before the question was asked is a request of its own.
  const question = answerable(state)?.question;
  const askedAt = question?.askedAt ?? (question?.stage === "answering" ? question.at : Infinity);
  const settling = state.delegations.filter((d) => d.state === "settling");
  const answers = settling.filter((d) => d.at >= askedAt).map((d) => d.id);
  if (answers.length) return settle({ ...state, delegations: assign(state.delegations, answers, "captured", null) });
  if (!settling.length) return [state, []];
  if (state.now < settlesAt(state)) return [state, []];
  const ids = settling.map((d) => d.id);
  if (!transcript.isAsking(state.transcript)) return withoutWords(state, ids);
  // Places that were waited for in vain are not waited for again.
  return settled(isWaiting(state, settling) ? { ...state, placesHold: false } : state, ids);
}

/** The user's words are complete. @param {State} state @param {string[]} ids @returns {Step} */
function settled(state, ids) {
  const command = spokenCommand(state);
  return command ? command(state, ids) : (lateAnswer(state, ids) ?? delegate(state, ids[0], ids));
}

/** The call ends: what was delegated or answered is not waited for any longer. @param {State} state @returns {Step} */
function handOver(state) {
  const [next, effects] = hearAnswer(state, 0);
  const ids = next.delegations.filter((d) => d.state === "settling").map((d) => d.id);
  if (effects.length || !ids.length || !transcript.isAsking(next.transcript)) return [next, effects];
  const command = spokenCommand(next);
  if (command === spokenHangUp) return [commanded(next, ids, null), []];
  return command ? command(next, ids) : delegate(next, ids[0], ids);
}

/** When the words of the delegations that wait for them are complete. @param {State} state */
export function settlesAt(state) {
  const settling = state.delegations.filter((d) => d.state === "settling");
  if (!settling.length) return Infinity;
  const marked = haveMarks(transcript.heardOf(state.transcript, state.attempt));
  return dueAt(transcript.asking(state.transcript), settling[0].at, isWaiting(state, settling), marked);
}

/** @param {State} state @param {Delegation[]} settling */
function isWaiting(state, settling) {
  const heard = transcript.heardOf(state.transcript, state.attempt);
  return state.placesHold && settling.some((d) => areLate(heard, d.placeMs));
}

/** Late words that go on with what was handed over in mid-sentence are handed over too. @param {State} state @returns {Step} */
function handTail(state) {
  const settling = state.delegations.some((d) => d.state === "settling");
  const quiet = state.now - state.speech.userAt >= UTTERANCE_MS;
  if (state.phase !== "live" || settling || !quiet || answerable(state) || !transcript.goesOn(state.transcript, state.handed)) return [state, []];
  return delegate({ ...state, counter: state.counter + 1 }, `tail_${state.attempt}_${state.counter}`, []);
}

/** A delegation without words is no request, but it gets an answer. @param {State} state @param {string[]} ids @returns {Step} */
function withoutWords(state, ids) {
  const done = { ...state, delegations: assign(state.delegations, ids, "answered", null) };
  if (state.runs.some((run) => !run.result)) {
    return noteAll(done, "Nothing new was asked. Hermes is still working on what was asked before; its answer comes later.", ids);
  }
  // The model hands some requests over twice, the second time when they are answered.
  const acted = Math.max(state.actedAt, ...state.runs.map((run) => run.at));
  const asked = state.delegations.find((d) => d.id === ids[0])?.at ?? state.now;
  if (asked - acted < AGAIN_MS) return noteAll(done, "Nothing new was asked since the last answer.", ids);
  return [say(done, "notice", ["Sorry, I did not catch what you want me to do. Could you say it again?"], ids[ids.length - 1], null), []];
}

/** Words after a question, once complete, are its answer. @param {State} state @returns {Step} */
function listenForAnswer(state) {
  return hearAnswer(state, UTTERANCE_MS);
}

/** @param {State} state @param {number} quietMs after which they are complete @returns {Step} */
function hearAnswer(state, quietMs) {
  const run = answerable(state);
  const question = run?.question;
  if (state.phase !== "live" || !run || question?.stage !== "asked") return [state, []];
  const begun = transcript.begunAfter(state.transcript, state.attempt, question.afterMs);
  const after = (/** @type {transcript.Fragment} */ f) => begun.includes(f);
  const words = transcript.pending(state.transcript, after);
  if (!words.length || state.now - state.speech.userAt < quietMs) return [state, []];
  const command = spokenCommand(state);
  if (command) return command(state, []);
  const [handed] = transcript.hand(state.transcript, after);
  const next = questionChanged(state, run.key, { stage: "answering" });
  const text = words.map((line) => line.text).join(" ");
  return [{ ...next, transcript: handed }, [{ do: "approve", key: run.key, runId: run.runId, requestId: question.requestId, heard: text }]];
}

/** The runs that the user's newest words can be about. @param {State} state */
function stoppable(state) {
  return state.runs.filter((run) => !run.result && !run.stopAsked && run.at <= state.speech.userAt);
}

/** What the user's newest words, all of them, ask of the call itself. @param {State} state @returns {((state: State, ids: string[]) => Step) | null} */
function spokenCommand(state) {
  const said = transcript.newestWords(state.transcript, state.attempt);
  // What was said before there was anything to go on with is about something else.
  const since = (/** @type {speech.Piece[]} */ pieces) => pieces.length > 0 && pieces[0].at <= state.speech.userAt;
  if (isOneOf(said, state.terms.hangUpPhrases)) return spokenHangUp;
  if (stoppable(state).length && isOneOf(said, state.stopPhrases)) return spokenStop;
  // Into an answer, it is about the answer.
  const isTelling = state.speech.sounding || state.speech.userAt - state.speech.soundAt < ECHO_MS;
  if (isTelling && since(state.speech.last) && isOneOf(said, state.stopPhrases)) return spokenHush;
  const stage = openQuestion(state)?.question?.stage;
  if (stage) return stage !== "answering" && isOneOf(said, state.repeatPhrases) ? spokenAskAgain : null;
  if (since(state.speech.kept) && isOneOf(said, state.goOnPhrases)) return spokenGoOn;
  if (since(state.speech.last) && isOneOf(said, state.repeatPhrases)) return spokenSayAgain;
  return null;
}

/** A command that the model did not hand over. @param {State} state @returns {Step} */
function listenForCommand(state) {
  const settling = state.delegations.some((d) => d.state === "settling");
  if (state.phase !== "live" || settling || state.now - state.speech.userAt < UTTERANCE_MS) return [state, []];
  return spokenCommand(state)?.(state, []) ?? [state, []];
}

/** The user's newest words are a command; `ids` are the delegations that came with it. @param {State} state @param {string[]} ids @param {string | null} run @returns {State} */
function commanded(state, ids, run) {
  const newest = transcript.newest(state.transcript, state.attempt);
  const [handed] = transcript.hand(state.transcript, (f) => newest.includes(f));
  return { ...state, transcript: handed, actedAt: state.now, delegations: assign(state.delegations, ids, run ? "sent" : "answered", run) };
}

/** @param {State} state @param {string[]} ids @returns {Step} */
function spokenHangUp(state, ids) {
  return close(commanded(state, ids, null));
}

/** @param {State} state @param {string[]} ids @returns {Step} */
function spokenHush(state, ids) {
  const told = (/** @type {State} */ s) => noteAll(s, "The user wants to hear no more of this answer. No task was running.", ids);
  return each(commanded(state, ids, null), told, (s) => (s.speech.sounding ? stopSpeaking(s) : [{ ...s, speech: speech.hush(s.speech) }, []]));
}

/** @param {State} state @param {string[]} ids @returns {Step} */
function spokenGoOn(state, ids) {
  return each(commanded(state, ids, null), (s) => noteAll(s, "The rest of the answer follows.", ids), tellRest);
}

/** @param {State} state @param {string[]} ids @returns {Step} */
function spokenSayAgain(state, ids) {
  return each(commanded(state, ids, null), (s) => noteAll(s, "The last answer follows once more.", ids), tellAgain);
}

/** @param {State} state @param {string[]} ids @returns {Step} */
function spokenAskAgain(state, ids) {
  const key = openQuestion(state)?.key ?? "";
  return each(commanded(state, ids, null), (s) => noteAll(s, "The question follows once more.", ids), (s) => ask(s, key, ""));
}

/** @param {State} state @param {string[]} ids @returns {Step} */
function spokenStop(state, ids) {
  const running = stoppable(state);
  const key = running[running.length - 1].key;
  return each(
    commanded(state, ids, key),
    ...running.map((run) => (/** @type {State} */ s) => stopRun(s, { type: "stopRun", key: run.key })),
    (s) => [say(s, "notice", ["I am asking Hermes to stop."], ids[0] ?? null, key), []],
  );
}

/** Keep what was said, once it is quiet. @param {State} state @returns {Step} */
function keepLines(state) {
  return state.linesAt && state.now - state.linesAt >= KEEP_MS ? keep(state) : [state, []];
}

/** Keep what the server does not have yet. @param {State} state @returns {Step} */
function keep(state) {
  const lines = transcript.unsaved(state.transcript).map((line) => ({
    key: `${state.page}_${line.key}`,
    speaker: line.speaker,
    text: transcript.textOf(line),
  }));
  const saved = { ...state, linesAt: 0, transcript: transcript.save(state.transcript) };
  const starts = lines.map((_, n) => n).filter((n) => n % KEEP_LINES === 0);
  return [saved, starts.map((n) => ({ do: "keep", lines: lines.slice(n, n + KEEP_LINES) }))];
}

/** The lines of an earlier page. @param {State} state @param {Event} event @returns {Step} */
function recalled(state, event) {
  // A page that was let in again has them, and its own.
  if (transcript.isRecalled(state.transcript)) return [state, []];
  const earlier = event.lines.filter((/** @type {any} */ line) => !line.key.startsWith(`${state.page}_`));
  return [{ ...state, transcript: transcript.recall(state.transcript, earlier, state.now) }, []];
}

/** Tell the model what goes on, silently and now and then aloud. @param {State} state @returns {Step} */
function reportProgress(state) {
  if (state.phase !== "live" || isHeld(state)) return [state, []];
  const isOpen = (/** @type {Run} */ run) => run.question && run.question.stage !== "closed";
  const working = state.runs.filter((run) => !run.result && run.state !== "stopping" && !isOpen(run));
  return each(state, ...working.map((run) => (/** @type {State} */ s) => reportOn(s, run)));
}

/** @param {State} state @param {Run} run @returns {Step} */
function reportOn(state, run) {
  const seconds = Math.round((state.now - run.since) / 1000);
  const works = run.state === "running" && !run.retries;
  const doing = works ? run.progress || run.tools.findLast((t) => t.status === "running")?.label || "" : "";
  const delegation = delegationOf(state, run.key);
  let effects = /** @type {Effect[]} */ ([]);
  let next = state;
  const noteDue = run.notedAt + (doing === run.noted ? NOTE_AGAIN_MS : NOTE_MS);
  if (doing && state.now >= noteDue) {
    const text = `Hermes is still working, for ${seconds} seconds so far: ${doing}. It is not finished; there is no result yet.`;
    [next, effects] = note(next, text, delegation);
    next = changed(next, run.key, (r) => ({ ...r, noted: doing, notedAt: state.now }));
  }
  if (state.now >= sayAt(state.progress, run)) {
    const words = works ? progressWords(doing, seconds, run.saidTimes) : waitingWords(workingWords(run, seconds), seconds, run.saidTimes);
    next = say(next, "progress", [words], delegation, run.key);
    next = changed(next, run.key, (r) => ({ ...r, saidAt: state.now, saidTimes: r.saidTimes + 1 }));
  }
  return [next, effects];
}

/** Take broken streams up again. @param {State} state @returns {Step} */
function followAgain(state) {
  const due = state.runs.filter((run) => !run.result && !run.following && state.now >= run.followAt);
  const effects = due.map((run) =>
    run.runId
      ? { do: "follow", key: run.key, runId: run.runId, after: run.seq }
      : { do: "delegate", key: run.key, lines: run.lines },
  );
  const keys = new Set(due.map((run) => run.key));
  return [{ ...state, runs: state.runs.map((run) => (keys.has(run.key) ? { ...run, following: true } : run)) }, effects];
}

// ---- what the page shows of it

/**
 * Why it is quiet, in words for the status line.
 * @param {State} state
 * @returns {string}
 */
export function statusOf(state) {
  const question = openQuestion(state);
  const working = state.runs.findLast((run) => !run.result);
  const seconds = working ? Math.max(0, Math.round((state.now - working.since) / 1000)) : 0;
  const doing = working && workingWords(working, seconds);
  if (state.phase === "connecting") return OPENING_WORDS[state.opening];
  if (state.phase === "closing") return "Hanging up…";
  if (state.phase === "live" && state.shakyAt !== null) return "The connection is shaky. Waiting for it to come back…";
  if (state.asleepAt !== null) return pausedWords(state);
  if (question) return `Hermes is waiting for your approval${state.muted && state.phase === "live" ? ". You are muted" : ""}`;
  if (state.phase === "idle") return doing || "Off";
  if (state.speech.sounding && !state.silenced) return state.muted ? "Speaking. You are muted" : "Speaking";
  if (state.delegations.some((d) => d.state === "settling")) return "Thinking…";
  if (doing) return state.muted ? `${doing}. You are muted` : doing;
  return state.muted ? "Muted: nobody hears you, the call still costs" : "Listening";
}

const OPENING_WORDS = { dialled: "Connecting…", renewed: "Renewing the call…", reopened: "Starting the call again…" };

/** @param {State} state */
function pausedWords(state) {
  if (state.speech.userAt > (state.asleepAt ?? 0)) return "Waking up…";
  const doing = state.muted ? "unmute and say something" : "say something";
  if (openQuestion(state)) return `Paused, and Hermes is waiting for your approval: answer here, or ${doing}`;
  const waits = state.speech.waiting.some((piece) => piece.kind === "result") || state.runs.some((run) => ["asked", "mine"].includes(run.claim));
  return waits ? `Paused, and there is an answer: ${doing} to hear it` : `Paused to save money: ${doing} to go on`;
}

/** @param {Run} run @param {number} seconds */
function workingWords(run, seconds) {
  if (run.state === "stopping") return "Stopping the task…";
  if (run.retries) return "hermes-voice cannot be reached at the moment. Still trying…";
  if (run.state === "starting") return "Passing the request on to Hermes…";
  if (run.state === "queued") return "Waiting for the task before to stop…";
  if (run.state === "unreachable") return "Hermes cannot be reached at the moment. Still trying…";
  return `Hermes is working, ${seconds} s`;
}
