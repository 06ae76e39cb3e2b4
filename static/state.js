// What is known of a call, and the small steps that its rules are made of. Pure.
//
// A rule takes the state (and an event) and returns the next state and what is to be done.

import * as meter from "./meter.js";
import * as speech from "./speech.js";
import * as transcript from "./transcript.js";
import * as watch from "./watch.js";
import { thinking } from "./wire.js";

/** @typedef {import("./wire.js").Event} Event */
/** @typedef {{do: string, [field: string]: any}} Effect */
/** @typedef {typeof START} State */
/** @typedef {[State, Effect[]]} Step */
/** @typedef {(state: State) => Step} Rule */
/** @typedef {(state: State, event: Event) => Step} EventRule */
/**
 * @typedef {{requestId: string, command: string, description: string, choices: string[],
 *   until: number, stage: "queued" | "asked" | "answering" | "closed", sentAs: string,
 *   sentWords: string, append: string, placeMs: number | null, askedAt: number | null, asked: number, heardIn: number,
 *   left: number[], outcome: string, note: string, at: number, saidAt: number, reminded: number,
 *   closedAt: number}} Question
 *   `sentAs`, `sentWords`: the append that asks it and is under way; `append`: the words of the one
 *   that was placed last, `placeMs`: its place in the timeline, null while nothing asks; `askedAt`: when it was first
 *   placed in this session, `asked`: how often, without reminders; `heardIn`: the batch of the
 *   spoken words that are being judged; `left`: batches that were no answer; `at`: when it came;
 *   `saidAt`: when something of it was last said; `reminded`: so many reminders were due
 * @typedef {{key: string, runId: string | null, at: number, request: string, about: string, state: string,
 *   tools: {status: string, label: string, preview: string}[], progress: string,
 *   question: Question | null, earlier: Question[], result: {finish: string, show: string, error: string} | null,
 *   seq: number, batch: number, batches: number[], lines: {speaker: string, text: string}[], since: number,
 *   stopAsked: boolean, stopSaid: boolean, retries: number, following: boolean, followAt: number,
 *   held: boolean, pollAt: number, polls: number,
 *   noted: string, notedAt: number, saidAt: number, saidTimes: number, attempt: number,
 *   owed: string[], claim: "" | "due" | "asked" | "mine" | "heard" | "told", claimAt: number}} Run
 *   `at`: where its card stands, at first when it began and then when it ended.
 *   `earlier`: the questions before the newest, all of them closed.
 *   `batch`: of the words it began with.
 *   `about` is the request it began with, `request` the newest that it answers.
 *   `owed` is what is to be said of its end, `claim` how far that is, `claimAt` when the server
 *   is asked again about it, `attempt` the call in which it was asked.
 *   `stopSaid`: the user asked for the stop aloud. `held`: its stream brings nothing, and the
 *   server is asked instead, next at `pollAt`; it has answered `polls` times since.
 *   `lines` are what was handed over, kept while it may have to be handed over again;
 *   `batches` are those of its words.
 * @typedef {{id: string, attempt: number, at: number, placeMs: number | null, state: "settling" | "captured" | "sent" | "answered",
 *   run: string | null}} Delegation
 * @typedef {{key: number, level: "info" | "error", text: string, at: number, offersCall: boolean}} Notice
 * @typedef {{attempt: number, sessionId: string | null, at: number, microphone: "asked" | "open" | "gone"}} Renewal   the next session
 */

const HELD_KEPT = 50; // notes for a line that is asleep
const NOTICES_KEPT = 30;
const KEEP_LINES = 100; // at once

export const START = {
  // the session
  phase: /** @type {"idle" | "connecting" | "live" | "closing"} */ ("idle"),
  attempt: 0, // which opening the session is from
  openings: 0,
  opening: /** @type {"dialled" | "renewed" | "reopened"} */ ("dialled"), // why the newest was made
  call: "", // the id of the call's first session, by which the server knows the call
  sessionId: /** @type {string | null} */ (null),
  microphone: /** @type {"asked" | "open" | "gone"} */ ("asked"), // the session's
  dialledAt: 0, // or when its microphone was opened
  liveAt: 0,
  closingAt: 0,
  expiresAt: 0, // when the service ends the session
  renewal: /** @type {Renewal | null} */ (null),
  renewals: 0, // that failed in this session
  triedAt: 0, // when the last of them did
  reopens: false, // the call was hung up by plan, and starts again with the answer
  left: false, // the page was left during the call, which the server is ending
  shakyAt: /** @type {number | null} */ (null), // since when the connection is broken
  asleepAt: /** @type {number | null} */ (null), // since when the service has paused it
  /** @type {object[]} */ held: [], // messages for when it is awake
  flow: watch.FLOWING,
  meter: meter.NOTHING,
  meterAt: 0, // when the sidecar is next told that the session is up
  muted: false,
  silenced: false, // the user asked for quiet; the voice is not played until it has ended
  heardAt: 0, // when somebody last spoke or work last moved
  seconds: /** @type {number | null} */ (null), // of the session, by the vendor's count
  // what the server and the user have set
  terms: {
    greeting: "",
    /** @type {string[]} */ hangUpPhrases: [],
    onLongRun: "stay",
    longRunMs: 300000,
    prices: { active: 0.05, standby: 0.02, currency: "$" },
  },
  idleMs: 300000,
  /** @type {string[]} */ stopPhrases: [],
  /** @type {string[]} */ stopSpeakingPhrases: [],
  /** @type {string[]} */ goOnPhrases: [],
  /** @type {string[]} */ repeatPhrases: [],
  /** @type {string[]} */ retryPhrases: [],
  progress: /** @type {import("./progress.js").Pace} */ ("normal"),
  voiceApprovals: true, // words may answer a question
  heldTold: false, // that something on the way holds streams back
  page: "", // makes the keys of this page's lines its own
  // words and work
  /** @type {{key: string, requestId: string, batch: number, ids: string[]} | null} */
  late: null, // words of which the server is asked whether they answer a closed question
  handed: 0, // the newest batch that was handed over
  placesHold: true, // a delegation's place has been where its words are
  actedAt: -1e9, // when words of the user last went where they belong
  linesAt: 0, // when a line last changed that the server does not have
  now: 0,
  counter: 0,
  transcript: transcript.EMPTY,
  speech: speech.QUIET,
  /** @type {Delegation[]} */ delegations: [],
  /** @type {Run[]} */ runs: [],
  /** @type {Notice[]} */ notices: [],
};

// ---- rules made of rules

/** Rules one after the other. @param {State} state @param {Rule[]} rules @returns {Step} */
export function chain(state, ...rules) {
  return each(state, rules, (s, rule) => rule(s));
}

/** A rule for each of these. @template T @param {State} state @param {T[]} items @param {(state: State, item: T) => Step} rule @returns {Step} */
export function each(state, items, rule) {
  /** @type {Effect[]} */
  const effects = [];
  for (const item of items) {
    const [next, more] = rule(state, item);
    state = next;
    effects.push(...more);
  }
  return [state, effects];
}

/** Just this is to be done. @param {Effect[]} effects @returns {Rule} */
export function doing(...effects) {
  return (state) => [state, effects];
}

/** A rule for a live session only. @param {Rule} rule @returns {Rule} */
export function whileLive(rule) {
  return (state) => (state.phase === "live" ? rule(state) : [state, []]);
}

// ---- to the session

/** Whether nothing may be sent to the session for a while. @param {State} state */
export function isHeld(state) {
  return state.asleepAt !== null || state.renewal !== null;
}

/** Send a message, or keep it until one may be sent. @param {State} state @param {object} message @returns {Step} */
export function sendOrHold(state, message) {
  if (!isHeld(state)) return [state, [{ do: "send", message }]];
  return [{ ...state, held: [...state.held, message].slice(-HELD_KEPT) }, []];
}

/** Send what was held. @type {Rule} */
export function release(state) {
  if (isHeld(state)) return [state, []];
  return [{ ...state, held: [] }, state.held.map((message) => ({ do: "send", message }))];
}

/** Tell the model silently. @param {State} state @param {string} text @param {string | null} delegation @returns {Step} */
export function note(state, text, delegation) {
  if (state.phase !== "live") return [state, []];
  const message = thinking(`note_${state.attempt}_${state.counter}`, text, known(state, delegation));
  return sendOrHold({ ...state, counter: state.counter + 1 }, message);
}

/** The same for several delegations. @param {State} state @param {string} text @param {(string | null)[]} ids @returns {Step} */
export function noteAll(state, text, ids) {
  return each(state, ids, (s, id) => note(s, text, id));
}

/**
 * Let the model say something, when it may.
 * @param {State} state @param {speech.Piece["kind"]} kind @param {string[]} texts
 * @param {string | null} delegation @param {string | null} run
 * @returns {State}
 */
export function say(state, kind, texts, delegation, run) {
  const pieces = texts.map((text) => ({ kind, text, delegation, run, at: state.now }));
  return { ...state, speech: speech.enqueue(state.speech, pieces) };
}

/** Do not say what waits to be said. @param {State} state @param {(piece: speech.Piece) => boolean} unwanted @returns {State} */
export function unsay(state, unwanted) {
  return { ...state, speech: speech.forget(state.speech, unwanted) };
}

// ---- to the screen and the server

/** @param {State} state @param {"info" | "error"} level @param {string} text @param {boolean} [offersCall] @returns {State} */
export function notify(state, level, text, offersCall = false) {
  const notice = { key: state.counter, level, text, at: state.now, offersCall };
  return { ...state, counter: state.counter + 1, notices: [...state.notices, notice].slice(-NOTICES_KEPT) };
}

/**
 * What the log shows, in the order it happened: lines where they began, cards where their task
 * began and, once it has ended, where it ended. Where the clock cannot tell, words stand before
 * the task that they became.
 * @param {State} state
 */
export function inOrder({ transcript: { lines }, runs, notices }) {
  const shown = [
    ...lines.filter(transcript.textOf).map((line) => ({ kind: /** @type {const} */ ("line"), at: line.at, line })),
    ...runs.map((run) => ({ kind: /** @type {const} */ ("run"), at: run.at, run })),
    ...notices.map((notice) => ({ kind: /** @type {const} */ ("notice"), at: notice.at, notice })),
  ];
  return shown.sort((a, b) => a.at - b.at);
}

/**
 * A moment of the server's on this page's clock. What has one time there has one time here,
 * by the same `origin`: when the server's clock stood at 0.
 * @param {number} origin @param {number} seconds
 */
export function placed(origin, seconds) {
  return origin + seconds * 1000;
}

/** Keep what the server does not have yet. @type {Rule} */
export function keep(state) {
  const lines = transcript.unsaved(state.transcript).map((line) => ({
    key: `${state.page}_${line.key}`,
    speaker: line.speaker,
    text: transcript.textOf(line),
    age_seconds: Math.round(state.now - line.at) / 1000,
    ...handedWith(state, line),
  }));
  const saved = { ...state, linesAt: 0, transcript: transcript.save(state.transcript) };
  return [saved, batched(lines).map((batch) => ({ do: "keep", lines: batch }))];
}

/**
 * Lines in batches that the server takes at once.
 * @template {{text: string}} L @param {L[]} lines
 * @returns {L[][]}
 */
function batched(lines) {
  /** @type {L[][]} */
  const batches = [];
  for (const line of lines) {
    const last = batches.at(-1);
    const isFull = !last || last.length === KEEP_LINES || transcript.cost([...last, line]) > transcript.REQUEST_CHARS;
    if (!isFull) last.push(line);
    else batches.push([line]);
  }
  return batches;
}

/** The request that took a line's words: the server's clock may not tell which of the two came first. @param {State} state @param {transcript.Line} line */
function handedWith(state, line) {
  const run = state.runs.find(({ batch }) => batch && line.fragments.some((fragment) => fragment.batch === batch));
  return run ? { delegation: run.key } : {};
}

// ---- delegations, runs and questions

/** Delegations whose words are not complete. @param {State} state */
export function settling(state) {
  return state.delegations.filter((d) => d.state === "settling");
}

/** Delegations made while a question was open, which are about it or wait for its end. @param {State} state */
export function captured(state) {
  const judged = state.late?.ids ?? [];
  return state.delegations.filter((d) => d.state === "captured" && !judged.includes(d.id)).map((d) => d.id);
}

/** A delegation's id, if it was made on this connection. @param {State} state @param {string | null} id */
export function known(state, id) {
  return state.delegations.some((d) => d.id === id && d.attempt === state.attempt) ? id : null;
}

/** @param {State} state @param {string[]} ids @param {Delegation["state"]} stage @param {string | null} run @returns {State} */
export function assign(state, ids, stage, run) {
  return { ...state, delegations: state.delegations.map((d) => (ids.includes(d.id) ? { ...d, state: stage, run } : d)) };
}

/** The delegations that a run answers, oldest first. @param {State} state @param {string} key */
export function delegationsOf(state, key) {
  return state.delegations.filter((d) => d.run === key).map((d) => d.id);
}

/** The newest of them, for its appends. @param {State} state @param {string} key */
export function delegationOf(state, key) {
  return delegationsOf(state, key).at(-1) ?? null;
}

/** @param {State} state @param {string | null} key @param {(run: Run) => Run} change @returns {State} */
export function changed(state, key, change) {
  return { ...state, runs: state.runs.map((run) => (run.key === key ? change(run) : run)) };
}

/** @param {State} state @param {string | null} key @param {Partial<Question>} fields @returns {State} */
export function questionChanged(state, key, fields) {
  const next = changed(state, key, (run) => ({ ...run, question: run.question && { ...run.question, ...fields } }));
  const isOver = fields.stage === "answering" || fields.stage === "closed";
  return isOver ? unsay(next, (piece) => piece.kind === "reminder" && piece.run === key) : next;
}

/** Whether a run's question waits for its answer. @param {Run} run */
export function isAsking(run) {
  return !!run.question && run.question.stage !== "closed" && !run.result;
}

/** The run with an open question. @param {State} state */
export function openQuestion(state) {
  return state.runs.find((run) => isAsking(run) && !run.stopAsked);
}

/** Whether the voice may ask for a spoken answer. @param {State} state */
export function mayAnswer(state) {
  return state.voiceApprovals && !state.muted && state.microphone !== "gone";
}

/** The same, if words may answer it. @param {State} state */
export function answerable(state) {
  return state.voiceApprovals ? openQuestion(state) : undefined;
}
