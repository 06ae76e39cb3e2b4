// What Hermes works on: words handed over, what becomes of them, and the answer, told once. Pure.
//
//   run         starting -> queued, running, unreachable, stopping -> ended
//   stream      followed -> broken -> followed again, until it is hopeless: the end is unknown
//     silent    nothing comes through it: asked every second, until the stream brings a line after
//               all or the run has ended. Hermes may be slow to take a request: once the server knows
//               its run, that is followed instead, and begins at once where nothing holds it back
//
// A run lives at the server, whatever happens here; its updates count once, by their number.
//
//   answer   means                               left by
//   due      to be told in a call                in a call -> asked; the server never named the
//                                                run, so nobody else knows it -> mine
//   asked    the server is asked for the claim   granted -> mine; another page has it, or there is
//                                                no answer -> due, after 2 s; another page has told
//                                                it -> told
//   mine     in the queue, the claim is kept up  nothing is left to be heard -> heard; the session
//                                                is over or the page left -> due, the claim is given
//                                                back; another page has it -> due, or told
//   heard    the server is told that             it knows -> told; else it is told again
//   told     nothing is owed                     -
//
// What must stay true:
//
//   1. Nothing is said of an end but while the claim to it is this page's.
//   2. Sent is not heard: what never sounded, or not for the most part before the session was
//      lost, is left, and due in the next call of whichever page.
//   3. What the user cut off is told: they can ask this page to go on. What was told to be quiet
//      before it began is left.
//   4. The server is told what was heard until it knows, in a call or not.

import { progressWords, sayAt, waitingWords } from "./progress.js";
import { ask, asks, closedWithRun, closes, outcomeOf, releaseCaptured } from "./questions.js";
import * as speech from "./speech.js";
import { assign, chain, changed, delegationOf, delegationsOf, doing, each, isAsking, isHeld, note, noteAll, notify, placed, say, unsay } from "./state.js";
import { workingWords } from "./status.js";
import * as transcript from "./transcript.js";
import { cut, fits } from "./wire.js";

/** @import { Effect, EventRule, Question, Rule, Run, State, Step } from "./state.js" */
/** @typedef {(state: State, run: Run, update: any) => Step} UpdateRule */

const RUNS_KEPT = 100;
const TOOLS_KEPT = 50; // the server keeps as many
const QUESTIONS_KEPT = 50;
const NOTE_MS = 3000; // between two silent notes about one run
const NOTE_AGAIN_MS = 30000; // with nothing new to tell
const HELD_POLLS = 3; // answered without a line: a page that slept only has its lines to come
const POLL_MS = 1000; // between two looks at a run whose stream is held back
const RETRIES_MOST = 8;
const RETRY_MOST_MS = 15000; // between two of them
const CLAIM_AGAIN_MS = 2000; // after a claim that another page had, or that nobody answered
const KEEP_CLAIM_MS = 3000; // the server lets a claim lapse that nobody has kept up for 10 s
const TITLE_BYTES = 120; // of a request that an answer names

// ---- its beginning

/**
 * Hand over what was said, as one request; `ids` are the delegations it answers.
 * @param {State} state @param {string} key @param {string[]} ids
 * @param {(fragment: transcript.Fragment) => boolean} [wanted] or these words only
 * @returns {Step}
 */
export function delegate(state, key, ids, wanted) {
  const lines = transcript.request(state.transcript, wanted);
  const [handed, batch] = transcript.hand(state.transcript, wanted);
  const asked = lines.findLast((line) => line.speaker === "user")?.text ?? "";
  const request = asked.replace(transcript.CORRECTION, "");
  const run = { ...newRun(state, key, null, request), lines, batch, batches: [batch] };
  const next = { ...state, transcript: handed, heardAt: state.now, actedAt: state.now, handed: batch };
  return [assign(withRuns(next, [...state.runs, run]), ids, "sent", key), [{ do: "delegate", key, lines }]];
}

/** What was not done is handed over once more, as the user wishes. @type {EventRule} */
export function retry(state, event) {
  return retried(state, event.key, []);
}

/**
 * @param {State} state @param {string} key
 * @param {string[]} ids the delegations that came with the wish
 * @returns {Step}
 */
export function retried(state, key, ids) {
  const failed = state.runs.find((run) => run.key === key && isRetryable(run));
  if (!failed) return [state, []];
  const { lines, request, batches } = failed;
  const again = ownKey(state, "again");
  const next = { ...state, counter: state.counter + 1, heardAt: state.now };
  const once = changed(next, key, (run) => ({ ...run, lines: [] }));
  const run = { ...newRun(state, again, null, request), lines, batches };
  return chain(
    assign(withRuns(once, [...once.runs, run]), ids, "sent", again),
    (s) => note(s, `The user wants this to be tried again: ${request}`, null),
    doing({ do: "delegate", key: again, lines }),
  );
}

/** Whether a run was not done, and its words are there to be handed over again. @param {Run} run */
export function isRetryable(run) {
  return run.result?.finish === "failed" && run.lines.length > 0;
}

/**
 * A key for words that no delegation brought. No other page has the same.
 * @param {State} state @param {string} what
 */
export function ownKey(state, what) {
  return [what, state.page, state.attempt, state.counter].filter((part) => part !== "").join("_");
}

/** @param {State} state @param {Run[]} runs @returns {State} */
function withRuns(state, runs) {
  return { ...state, runs: runs.slice(-RUNS_KEPT) };
}

/** @param {State} state @param {string} key @param {string | null} runId @param {string} request @returns {Run} */
function newRun(state, key, runId, request) {
  return {
    key, runId, request, about: request, batch: 0, batches: [], lines: [], at: state.now, state: "starting", tools: [], progress: "", question: null, earlier: [],
    result: null, seq: 0, since: state.now, stopAsked: false, stopSaid: false, retries: 0, following: true, followAt: 0, held: false, pollAt: 0, polls: 0, noted: "",
    notedAt: 0, saidAt: 0, saidTimes: 0, attempt: state.attempt, owed: [], claim: "", claimAt: 0,
  };
}

/** The server's runs of this conversation, after a reload. @type {EventRule} */
export function listed(state, event) {
  const known = new Set(state.runs.map((run) => run.runId));
  /** @type {any[]} */
  const unknown = event.runs.filter((/** @type {any} */ run) => !known.has(run.run_id));
  // A clock that was set back may have put something into the future.
  const past = (/** @type {number} */ seconds) => Math.min(state.now, placed(event.origin, seconds));
  const runs = unknown.map((run) => ({
    ...newRun(state, run.run_id, run.run_id, run.request),
    ...questionsOf(state, run, past),
    at: past(run.ended_at ?? run.created),
    since: state.now - run.seconds * 1000,
    attempt: -1,
    state: run.state,
    tools: run.tools.map(toolOf),
    progress: run.progress,
    seq: run.seq,
    following: !run.result,
    lines: run.lines ?? [],
    result: run.result && resultOf(run.result),
    owed: run.result?.say ?? [],
    claim: run.result && !run.delivered && run.result.say?.length ? /** @type {const} */ ("due") : /** @type {const} */ (""),
  }));
  const follow = runs.filter((run) => run.following).map((run) => ({ do: "follow", key: run.key, runId: run.runId, after: run.seq }));
  return [withRuns(state, [...runs, ...state.runs]), follow];
}

/** A run's questions as the list has them: the newest, and those before it. @param {State} state @param {any} run @param {(seconds: number) => number} past @returns {Pick<Run, "question" | "earlier">} */
function questionsOf(state, run, past) {
  const empty = newRun(state, run.run_id, run.run_id, run.request);
  const questions = run.questions.map((/** @type {any} */ listed) => {
    const [asked] = asks({ ...state, runs: [empty] }, empty, listed);
    const question = /** @type {Question} */ (asked.runs[0].question);
    return listed.reason ? { ...question, stage: "closed", outcome: outcomeOf(listed), closedAt: past(listed.ended_at) } : question;
  });
  return { question: questions.at(-1) ?? null, earlier: questions.slice(0, -1) };
}

/** @param {any} done */
function resultOf(done) {
  return { finish: done.finish_reason, show: done.show ?? "", error: done.error?.message ?? "" };
}

// ---- its updates

/** @type {Record<string, UpdateRule>} */
const UPDATES = {
  run: ran,
  tool,
  approval: asked,
  approval_closed: closes,
  progress: (state, run, update) => [changed(state, run.key, (r) => ({ ...r, progress: update.text })), []],
  steered: (state, run) => note(state, "The user's words were handed to Hermes, which is still working.", delegationOf(state, run.key)),
  done,
  // Its stream ends after this.
  error: (state, run, update) => [changed(notify(state, "info", update.message), run.key, (r) => ({ ...r, retries: 1 })), []],
};

// They are about the stream, and carry the number of the update before.
const UNNUMBERED = ["run", "error"];

/** One update of a run's stream. @type {EventRule} */
export function update(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  const rule = UPDATES[event.update.type];
  if (run?.held && !event.polled) return update(changed(state, run.key, (r) => ({ ...r, held: false })), event);
  const repeated = !UNNUMBERED.includes(event.update.type) && event.update.seq <= (run?.seq ?? 0);
  if (!run || run.result || !rule || repeated) return [state, []];
  const numbered = changed(state, run.key, (r) => ({ ...r, seq: Math.max(r.seq, event.update.seq ?? 0), retries: 0 }));
  return rule({ ...numbered, heardAt: state.now }, run, event.update);
}

/** @type {UpdateRule} */
function ran(state, run, update) {
  const twin = state.runs.find((r) => r.runId === update.run_id && r.key !== run.key);
  if (twin) return joined(state, run, twin);
  const since = update.seconds === undefined ? run.since : state.now - update.seconds * 1000;
  const next = changed(state, run.key, (r) => ({
    ...r,
    runId: update.run_id,
    state: r.stopAsked ? "stopping" : update.state,
    since,
  }));
  const stop = run.stopAsked && !run.runId ? [{ do: "stop", key: run.key, runId: update.run_id }] : [];
  return [next, stop];
}

const TOGETHER = "This is answered together with the user's other words.";

/**
 * The server took these words into a run that was waiting: one run, one card.
 * @param {State} state @param {Run} run @param {Run} into
 * @returns {Step}
 */
function joined(state, run, into) {
  const request = run.request || into.request;
  const both = { request, batches: [...into.batches, ...run.batches], lines: [...into.lines, ...run.lines] };
  const others = state.runs.filter((r) => r.key !== run.key);
  const runs = others.map((r) => (r.key === into.key ? { ...r, ...both } : r));
  const ids = delegationsOf(state, run.key);
  return chain(
    assign({ ...state, runs }, ids, into.result ? "answered" : "sent", into.key),
    doing({ do: "unfollow", key: run.key }),
    (s) => (run.stopAsked && !into.stopAsked ? stopRun(s, { type: "stopRun", key: into.key }) : [s, []]),
    (s) => noteAll(s, TOGETHER, into.result ? ids : []),
  );
}

/** @param {any} update @returns {Run["tools"][number]} */
function toolOf({ status, label, preview = "" }) {
  return { status, label, preview };
}

/** Hermes asks. What it asked before stays on the card. @type {UpdateRule} */
function asked(state, run, update) {
  const before = run.question;
  if (!before || before.requestId === update.request_id) return asks(state, run, update);
  const closed = { ...before, stage: /** @type {const} */ ("closed"), outcome: before.outcome || "timeout" };
  const kept = changed(state, run.key, (r) => ({ ...r, earlier: [...r.earlier, closed].slice(1 - QUESTIONS_KEPT) }));
  return asks(kept, run, update);
}

/** @type {UpdateRule} */
function tool(state, run, update) {
  const entry = toolOf(update);
  const open = run.tools.findLastIndex((t) => t.status === "running" && t.label === entry.label);
  const tools = open >= 0 && entry.status !== "running"
    ? run.tools.map((t, n) => (n === open ? { ...entry, preview: entry.preview || t.preview } : t))
    : [...run.tools, entry].slice(-TOOLS_KEPT);
  return [changed(state, run.key, (r) => ({ ...r, tools })), []];
}

// ---- its end

const REPLACED = "This request was replaced by what the user said since. The answer to that comes later.";

/** A run has ended. @type {UpdateRule} */
function done(state, run, update) {
  // What was not done is repeated by the user only.
  const mayRetry = update.finish_reason === "failed" && !update.superseded_by;
  const over = changed(state, run.key, (r) => ({
    ...r,
    at: state.now, // its card moves to where the answer came
    state: "ended",
    following: false,
    result: resultOf(update),
    lines: mayRetry ? r.lines : [],
    question: closedWithRun(r.question, state.now),
  }));
  const quiet = unsay(over, (piece) => piece.run === run.key);
  if (update.continued_by) return goOn(quiet, run, update);
  const ids = delegationsOf(state, run.key);
  const answered = assign(quiet, ids, "answered", run.key);
  // One answer is told with the newest; the others get a word.
  const [told, text, silent] = update.superseded_by
    ? [answered, REPLACED, ids.length ? ids : [null]]
    : [owe(answered, run.key, update.say ?? []), TOGETHER, ids.slice(0, -1)];
  return chain(told, claimDue, (s) => noteAll(s, text, silent), releaseCaptured);
}

/** Some of the words came too late for this run and are a run of their own. @param {State} state @param {Run} run @param {any} update @returns {Step} */
function goOn(state, run, update) {
  const known = state.runs.find((r) => r.runId === update.continued_by);
  const key = known?.key ?? update.continued_by;
  const moved = state.delegations.map((d) => (update.continued.includes(d.id) ? { ...d, run: key } : d));
  const after = newRun(state, key, key, transcript.lastAsked(state.transcript));
  const next = { ...(known ? state : withRuns(state, [...state.runs, after])), delegations: moved };
  const { continued_by: _, ...rest } = update;
  const ended = changed(next, run.key, (r) => ({ ...r, result: null, request: update.request ?? r.request }));
  return chain(ended, (s) => done(s, run, rest), doing(...(known ? [] : [{ do: "follow", key, runId: key, after: 0 }])));
}

/** What is to be said of a run's end, once it may. @param {State} state @param {string} key @param {string[]} say @returns {State} */
function owe(state, key, say) {
  return changed(state, key, (run) => ({ ...run, owed: say, claim: say.length ? "due" : "told", claimAt: 0 }));
}

/** @param {State} state @param {Run} run */
const isTime = (state, run) => state.now >= run.claimAt;

// An answer that is so far, at such a moment, needs this. The first that fits.
/** @type {[claim: string, when: (state: State, run: Run) => boolean, then: (state: State, run: Run) => Step][]} */
const TELLING = [
  ["heard", isTime, confirm],
  ["mine", (state, run) => state.phase === "live" && !left(run, state.speech).length, confirm],
  ["mine", (state, run) => state.phase === "live" && isTime(state, run), keepUp],
  ["due", (state, run) => state.phase === "live" && isTime(state, run), askFor],
];

/** Claim what is to be told, keep up what is being told, and confirm what was heard. @type {Rule} */
export function claimDue(state) {
  return each(state, state.runs, (s, run) => {
    const row = TELLING.find(([claim, when]) => run.claim === claim && when(s, run));
    return row ? row[2](s, run) : [s, []];
  });
}

/** @param {State} state @param {string} key @param {Run["claim"]} claim @param {number} at @returns {State} */
function claimIs(state, key, claim, at) {
  return changed(state, key, (run) => ({ ...run, claim, claimAt: at }));
}

/** @param {State} state @param {Run} run @returns {Step} */
function askFor(state, run) {
  const { key, runId } = run;
  if (!runId) return [tell(state, run), []];
  return [claimIs(state, key, "asked", Infinity), [{ do: "claim", key, runId }]];
}

/** @param {State} state @param {Run} run @returns {Step} */
function keepUp(state, { key, runId }) {
  return [claimIs(state, key, "mine", Infinity), runId ? [{ do: "claim", key, runId, again: true }] : []];
}

/** @param {State} state @param {Run} run @returns {Step} */
function confirm(state, { key, runId }) {
  return runId ? [claimIs(state, key, "heard", Infinity), [{ do: "told", key, runId }]] : [claimIs(state, key, "told", 0), []];
}

/** The answer to a claim: `mine` is null if there was none; another page has it, or has `told` it. @type {EventRule} */
export function claimed(state, event) {
  const run = state.runs.find((r) => r.key === event.key && ["asked", "mine"].includes(r.claim));
  if (!run) return [state, []];
  const again = state.now + CLAIM_AGAIN_MS;
  if (event.mine === null) return [claimIs(state, run.key, run.claim === "mine" ? "mine" : "due", again), []];
  if (event.mine) return granted(state, run);
  const quiet = { ...state, speech: speech.without(state.speech, run.key) };
  if (!event.told) return [claimIs(quiet, run.key, "due", again), []];
  return note(claimIs(quiet, run.key, "told", 0), "The answer to this was told by another page.", delegationOf(state, run.key));
}

/** @param {State} state @param {Run} run @returns {Step} */
function granted(state, run) {
  if (run.claim === "mine") return [claimIs(state, run.key, "mine", state.now + KEEP_CLAIM_MS), []];
  if (state.phase === "live" && !speech.isFull(state.speech)) return [tell(state, run), []];
  return [claimIs(state, run.key, "due", state.now + CLAIM_AGAIN_MS), [{ do: "giveBack", key: run.key, runId: run.runId }]];
}

/** The server knows that a result was heard, or could not be told. @type {EventRule} */
export function confirmed(state, event) {
  const run = state.runs.find((r) => r.key === event.key && r.claim === "heard");
  if (!run) return [state, []];
  return [event.known ? claimIs(state, run.key, "told", 0) : claimIs(state, run.key, "heard", state.now + CLAIM_AGAIN_MS), []];
}

/** What leads to a result that is not about what was asked last. @param {State} state @param {Run} run */
export function titleOf(state, run) {
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
  // What the user asked to hear again of it comes with it.
  const queue = speech.without(state.speech, run.key);
  const told = claimIs({ ...state, speech: queue }, run.key, "mine", state.now + KEEP_CLAIM_MS);
  return say(told, "result", pieces, delegationOf(state, run.key), run.key);
}

/** What is left to be heard of a run's end. It may stand behind what leads to it, or in halves. @param {Run} run @param {speech.Speech} queue */
function left(run, queue) {
  const pieces = speech.leftOf(queue, run.key);
  return run.owed.filter((text) => pieces.some((piece) => piece.text.endsWith(text) || (piece.half && text.includes(piece.text))));
}

/** The session is over: what was not heard of a result is told in the next one. @param {Run} run @param {speech.Speech} queue @returns {Run} */
export function untold(run, queue) {
  const owed = left(run, queue);
  if (run.claim === "asked") return run;
  if (owed.length) return { ...run, claim: "due", claimAt: 0, owed };
  return run.claim === "mine" ? { ...run, claim: "heard", claimAt: 0 } : run;
}

/** The claims that a page has no more use for. @param {State} before @param {State} after @returns {Effect[]} */
export function givenBack(before, after) {
  const mine = new Set(before.runs.filter((run) => run.claim === "mine").map((run) => run.key));
  const due = after.runs.filter((run) => run.claim === "due" && run.runId && mine.has(run.key));
  return due.map(({ key, runId }) => ({ do: "giveBack", key, runId }));
}

// ---- its stream

const UNREACHED = "hermes-voice cannot be reached, so it is not known whether Hermes got this. Ask again when it is back.";

/** A stream broke, or could not be opened. @type {EventRule} */
export function streamEnded(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  if (!run || run.result) return [state, []];
  const hopeless = !run.runId && run.retries >= RETRIES_MOST;
  if (event.refused || hopeless) {
    const message = event.refused && event.message ? event.message : UNREACHED;
    const finish = event.refused && !run.runId ? "failed" : "unknown";
    return done(state, run, { finish_reason: finish, say: [message], show: message, error: { message } });
  }
  const wait = Math.min(1000 * 2 ** run.retries, RETRY_MOST_MS);
  const broken = run.retries ? state : notify(state, "info", "The connection to hermes-voice broke. Trying again.");
  return [changed(broken, run.key, (r) => ({ ...r, following: false, held: false, followAt: state.now + wait, retries: r.retries + 1 })), []];
}

const HELD =
  "Something between this page and hermes-voice holds its answers back, most likely a proxy. It must pass streams on" +
  " as they come; the README shows how. Until then this page asks every second.";

/** A stream brings nothing. It is slow, or held back on its way. @type {EventRule} */
export function silent(state, event) {
  return [changed(state, event.key, (run) => ({ ...run, held: !run.result, pollAt: state.now, polls: 0 })), []];
}

/** Ask for what is held back. @type {Rule} */
export function pollHeld(state) {
  const due = state.runs.filter((run) => run.held && run.following && !run.result && state.now >= run.pollAt);
  return each(state, due, (s, { key, runId, seq }) => [
    changed(s, key, (run) => ({ ...run, pollAt: Infinity })),
    [{ do: "poll", key, runId, after: seq }],
  ]);
}

/** The server was asked; `found`: it knows the run, whose stream has still brought nothing; `named`: by the run's id. @type {EventRule} */
export function polled(state, event) {
  const run = state.runs.find((r) => r.key === event.key && r.held);
  if (!run) return [state, []];
  if (event.found && !event.named) {
    const again = [{ do: "unfollow", key: run.key }, { do: "follow", key: run.key, runId: run.runId, after: run.seq }];
    return [changed(state, run.key, (r) => ({ ...r, held: false })), again];
  }
  const polls = run.polls + Number(event.found);
  const next = changed(state, run.key, (r) => ({ ...r, pollAt: state.now + POLL_MS, polls }));
  return [polls >= HELD_POLLS && !state.heldTold ? notify({ ...next, heldTold: true }, "error", HELD) : next, []];
}

/** Take broken streams up again. @type {Rule} */
export function followAgain(state) {
  const due = state.runs.filter((run) => !run.result && !run.following && state.now >= run.followAt);
  return each(state, due, (s, { key, runId, seq, lines }) => [
    changed(s, key, (run) => ({ ...run, following: true })),
    [runId ? { do: "follow", key, runId, after: seq } : { do: "delegate", key, lines }],
  ]);
}

// ---- stopping it

/** @type {EventRule} */
export function stopRun(state, event) {
  const run = state.runs.find((r) => r.key === event.key && !r.result);
  if (!run) return [state, []];
  const dropped = run.question && { ...run.question, left: [] }; // words before a stop are taken back with it
  const next = changed(state, run.key, (r) => ({ ...r, stopAsked: true, state: "stopping", question: dropped }));
  const quiet = unsay(next, (piece) => piece.run === run.key);
  // Without an id yet, the stop goes out as soon as the server names one.
  return [quiet, run.runId ? [{ do: "stop", key: run.key, runId: run.runId }] : []];
}

/** The server refused something the user did. A stop that was said is told of aloud. @type {EventRule} */
export function refused(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  const told = notify(state, "error", event.message);
  const next = changed(told, run?.key ?? null, (r) => ({ ...r, stopAsked: false, stopSaid: false, state: r.result ? r.state : "running" }));
  const said = run?.stopSaid ? say(next, "notice", [`The task was not stopped. ${event.message}`], delegationOf(state, run.key), run.key) : next;
  // A question that the stop kept back is asked after all.
  return run?.question?.stage === "queued" && !run.question.sentAs ? ask(said, run.key, "") : [said, []];
}

// ---- while it works

/** Tell the model what goes on, silently and now and then aloud. @type {Rule} */
export function reportProgress(state) {
  if (isHeld(state)) return [state, []];
  const working = state.runs.filter((run) => !run.result && run.state !== "stopping" && !isAsking(run));
  return each(state, working, reportOn);
}

/** @param {State} state @param {Run} run @returns {Step} */
function reportOn(state, run) {
  const seconds = Math.round((state.now - run.since) / 1000);
  const works = run.state === "running" && !run.retries;
  const doing = works ? run.progress || run.tools.findLast((t) => t.status === "running")?.label || "" : "";
  return chain(state, (s) => noteProgress(s, run, doing, seconds), (s) => sayProgress(s, run, works, doing, seconds));
}

/** @param {State} state @param {Run} run @param {string} doing @param {number} seconds @returns {Step} */
function noteProgress(state, run, doing, seconds) {
  const due = run.notedAt + (doing === run.noted ? NOTE_AGAIN_MS : NOTE_MS);
  if (!doing || state.now < due) return [state, []];
  const text = `Hermes is still working, for ${seconds} seconds so far: ${doing}. It is not finished; there is no result yet.`;
  return note(changed(state, run.key, (r) => ({ ...r, noted: doing, notedAt: state.now })), text, delegationOf(state, run.key));
}

/** @param {State} state @param {Run} run @param {boolean} works @param {string} doing @param {number} seconds @returns {Step} */
function sayProgress(state, run, works, doing, seconds) {
  if (state.now < sayAt(state.progress, run)) return [state, []];
  const words = works ? progressWords(doing, seconds, run.saidTimes) : waitingWords(workingWords(run, seconds), seconds, run.saidTimes);
  const next = changed(state, run.key, (r) => ({ ...r, saidAt: state.now, saidTimes: r.saidTimes + 1 }));
  return [say(next, "progress", [words], delegationOf(state, run.key), run.key), []];
}
