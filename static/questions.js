// The questions that Hermes asks before it does something: asked aloud, answered, closed. Pure.
//
//   question    queued -> asked (its append is placed) -> answering -> closed; one at a time
//   aloud       unasked -> placed -> heard: the newest thing the voice said is this question
//     void      the voice says anything else, or nothing, or an answer was not clear: unasked
//     unasked   asked anew, 3 times in all; then only a reminder asks
//
// What must stay true:
//
//   1. Spoken words answer a question only while it is heard; asking.js compares the words.
//   2. While a question is open, results and progress wait: they would come in between.
//   3. Words that are no answer stay the user's, and are handed over when the question closes.
//   4. An answer that was spoken and did not get through is told of aloud.
//
// Which words are an answer is for words.js to say; what an answer means, for the server.

import { isAsked, mayRemind, questionWords, remindersDue, reminderWords } from "./asking.js";
import { assign, captured, chain, changed, delegationOf, doing, mayAnswer, note, noteAll, notify, openQuestion, questionChanged, say, unsay } from "./state.js";
import * as transcript from "./transcript.js";

/** @import { EventRule, Question, Rule, Run, State, Step } from "./state.js" */

const ASK_MOST = 3; // times one question is asked aloud
const SOON_MS = 500; // after a question came, a click or a key was on its way to something else
const VOID_MS = 2500; // of quiet; words come up to 2 s after their sound
const UNCLEAR = "That was not a clear yes or no.";
const NOT_SENT = "Your answer did not reach Hermes. ";
const NO_AND_MORE = "You said more than yes or no, so Hermes was told no, and is given the rest of your words.";

// ---- asking

/** Hermes asks. @param {State} state @param {Run} run @param {any} update @returns {Step} */
export function asks(state, run, update) {
  const question = /** @type {Question} */ ({
    requestId: update.request_id,
    command: update.command,
    description: update.description,
    choices: update.choices,
    until: state.now + update.seconds_left * 1000,
    stage: "queued",
    sentAs: "",
    sentWords: "",
    append: "",
    placeMs: null,
    askedAt: null,
    asked: 0,
    heardIn: 0,
    left: [],
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
export function ask(state, key, before) {
  const run = state.runs.find((r) => r.key === key);
  if (!run?.question) return [state, []];
  const words = `${before}${questionWords(run.question, mayAnswer(state))}`;
  const fresh = unsay(questionChanged(state, key, { stage: "queued" }), (piece) => piece.kind === "question" && piece.run === key);
  return [openQuestion(fresh)?.key === key ? say(fresh, "question", [words], delegationOf(state, key), key) : fresh, []];
}

/** Its append, or a reminder's, has its place in the timeline. @param {State} state @param {string | undefined} id @param {number} endMs @returns {State} */
export function askedAloud(state, id, endMs) {
  const run = state.runs.find((r) => r.question?.sentAs && r.question.sentAs === id);
  if (!run?.question) return state;
  const { stage, asked, askedAt, sentWords } = run.question;
  const place = { sentAs: "", append: sentWords, placeMs: endMs, askedAt: askedAt ?? state.now, saidAt: state.now };
  const isReminder = stage !== "queued";
  return questionChanged(state, run.key, isReminder ? place : { ...place, stage: "asked", asked: asked + 1 });
}

/** Whether the newest thing that the voice said before a place is this question. @param {State} state @param {Question} question @param {number} [beforeMs] */
export function isHeard(state, { placeMs, append }, beforeMs = Infinity) {
  if (placeMs === null || state.silenced) return false;
  // Words that were begun by then may be something else; the question's count once they are over.
  const begun = transcript.voicedBetween(state.transcript, state.attempt, placeMs, beforeMs);
  return isAsked(begun, append) && isAsked(begun.filter(({ endMs }) => endMs <= beforeMs), append);
}

/** The voice was to ask, and said something else, or nothing. @type {Rule} */
export function askAnew(state) {
  const run = openQuestion(state);
  const { sounding, soundAt, userAt, current } = state.speech;
  const isSaying = sounding || state.now - Math.max(soundAt, userAt) < VOID_MS || current?.piece.run === run?.key;
  if (!mayAnswer(state) || run?.question?.stage !== "asked" || run.question.placeMs === null || isSaying) return [state, []];
  return isHeard(state, run.question) ? [state, []] : askAgain(state, run, "");
}

/** Until it has been asked anew, nothing that is said answers it. @param {State} state @param {Run} run @param {string} before @returns {Step} */
function askAgain(state, run, before) {
  const unasked = questionChanged(state, run.key, { placeMs: null });
  return (run.question?.asked ?? 0) < ASK_MOST ? ask(unasked, run.key, before) : [unasked, []];
}

/** One question at a time, and reminders of it. @type {Rule} */
export function remind(state) {
  const run = openQuestion(state);
  const question = run?.question;
  if (!run || !question) return [state, []];
  const isQueued = state.speech.waiting.some((piece) => piece.kind === "question" && piece.run === run.key);
  if (question.stage === "queued" && !question.sentAs) return isQueued ? [state, []] : ask(state, run.key, "");
  const due = remindersDue(question, state.now);
  if (question.stage !== "asked" || due <= question.reminded) return [state, []];
  if (!mayRemind(question, state.now)) return [questionChanged(state, run.key, { reminded: due }), []];
  const words = reminderWords(question, state.now, mayAnswer(state));
  const next = questionChanged(state, run.key, { reminded: due, saidAt: state.now });
  return [say(next, "reminder", [words], null, run.key), []];
}

/** In the next session an open question is asked anew. @param {Run} run @returns {Run} */
export function requeued(run) {
  const question = run.question;
  if (!question || question.stage === "closed") return run;
  return { ...run, question: { ...question, stage: "queued", sentAs: "", placeMs: null, askedAt: null, asked: 0 } };
}

// ---- answering

/** Whether a hand can have meant a question, and not what was there before it. @param {Question} question @param {number} at */
function isSeen(question, at) {
  return at - question.at >= SOON_MS;
}

/** Whether a click may answer it. @param {Question} question @param {number} at */
export function mayClick(question, at) {
  return question.stage !== "answering" && isSeen(question, at);
}

/** A click on a question's card. @type {EventRule} */
export function approve(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  if (!run?.question || run.question.stage === "closed" || run.question.requestId !== event.requestId) return [state, []];
  if (!mayClick(run.question, state.now)) return [state, []];
  return answer(state, run, { choice: event.choice });
}

/**
 * The server is told, and decides what it means.
 * @param {State} state @param {Run} run @param {{choice?: string, heard?: string, typed?: string}} said
 * @param {number} [heardIn] the batch of the spoken words
 * @returns {Step}
 */
export function answer(state, run, said, heardIn = 0) {
  const next = questionChanged(state, run.key, { stage: "answering", heardIn });
  return [next, [{ do: "approve", key: run.key, runId: run.runId, requestId: run.question?.requestId, ...said }]];
}

/** While a question is open, a typed message answers it or comes back to be kept. @param {State} state @param {Run} run @param {string} text @returns {Step} */
export function typedAnswer(state, run, text) {
  const seen = run.question && isSeen(run.question, state.now);
  if (seen && run.question?.stage !== "answering") return answer(state, run, { heard: text, typed: text });
  const why = seen ? "Your answer is on its way to Hermes. Send this after it." : "Hermes has just asked something. Send this again if it is the answer.";
  return [notify(state, "info", why), [{ do: "draft", text }]];
}

/** What became of an answer: `choice` (null: not clear; `more`: it was more than an answer), or `message` if it failed. @type {EventRule} */
export function answered(state, event) {
  const run = state.runs.find((r) => r.key === event.key);
  const question = run?.question;
  if (!run || !question || question.requestId !== event.requestId) return [state, []];
  if (event.choice) return [decided(state, run, question, event), []];
  const draft = doing(...(event.typed && event.code !== "too_late" ? [{ do: "draft", text: event.typed }] : []));
  // What is too long for an answer is none.
  const isFailed = event.message && event.code !== "too_large";
  return chain(state, (s) => (isFailed ? failed : unclear)(s, run, question, event), draft);
}

/** @param {State} state @param {Run} run @param {Question} question @param {import("./wire.js").Event} event @returns {State} */
function decided(state, run, question, { choice, more, typed }) {
  const next = questionChanged(state, run.key, { outcome: choice === "deny" ? "denied" : "allowed" });
  if (!more) return next;
  // What was typed as an answer is no line of the talk until it is a request as well.
  const [added, batch] = typed ? transcript.addHanded(state.transcript, typed, state.attempt, state.now) : [state.transcript, question.heardIn];
  const kept = questionChanged({ ...next, transcript: added }, run.key, { left: [...question.left, batch] });
  return say(kept, "notice", [NO_AND_MORE], null, run.key);
}

/** Words that are no clear answer stay the user's. The question is asked again, unless it was closed or the session is another one. @param {State} state @param {Run} run @param {Question} question @returns {Step} */
export function unclear(state, run, question) {
  const left = question.heardIn ? [...question.left, question.heardIn] : question.left;
  const next = questionChanged(state, run.key, { left, heardIn: 0 });
  if (question.stage !== "answering") return [next, []];
  return reopen(questionChanged(next, run.key, { note: UNCLEAR }), run, question, "Sorry, that was not a clear yes or no. ");
}

/** It takes answers again, and is asked again, unless a hand had answered. @param {State} state @param {Run} run @param {Question} question @param {string} before @returns {Step} */
function reopen(state, run, question, before) {
  const stage = question.asked ? /** @type {const} */ ("asked") : /** @type {const} */ ("queued");
  const open = questionChanged(state, run.key, { stage, heardIn: 0 });
  return before || !question.asked ? askAgain(open, run, before) : [open, []];
}

/** An answer did not get through. @param {State} state @param {Run} run @param {Question} question @param {import("./wire.js").Event} event @returns {Step} */
function failed(state, run, question, { code, message }) {
  const shown = notify(state, "error", message);
  const isOver = code === "too_late" || question.stage === "closed";
  // In another session it is asked anew in any case, and what is not known the server tells.
  if (code === "unconfirmed" || (!isOver && question.stage !== "answering")) return [shown, []];
  const isAskedAgain = !isOver && question.asked < ASK_MOST;
  const fresh = unsay(shown, (piece) => piece.kind === "notice" && piece.run === run.key);
  const told = question.heardIn && !isAskedAgain ? say(fresh, "notice", [`${NOT_SENT}${message}`], null, run.key) : shown;
  if (!isOver) return reopen(questionChanged(told, run.key, { note: message }), run, question, question.heardIn ? NOT_SENT : "");
  return question.stage === "closed" ? [told, []] : over(told, run, question, "late");
}

// ---- closing

/** Told silently, by reason. @type {Record<string, string>} */
const CLOSED_NOTES = {
  answered: "The user's answer reached Hermes; the task goes on.",
  run_ended: "The question is over, because the task has ended or is being stopped.",
};
/** Told aloud. @type {Record<string, string>} */
const SAID = {
  timeout: "Nobody answered Hermes's question in time, so it did not do that.",
  unknown: "It is not known whether your answer reached Hermes. Look at what it does before you allow it again.",
  lost: "hermes-voice was restarted, and Hermes's question cannot be answered any more. Hermes goes on without it in a while; you can also stop the task.",
};

/** How a question came to its end, as its card says it. @param {{reason: string, choice?: string}} closed */
export function outcomeOf({ reason, choice }) {
  if (reason !== "answered" || !choice) return reason;
  return choice === "deny" ? "denied" : "allowed";
}

/** Hermes does not wait for it any more. @param {State} state @param {Run} run @param {any} update @returns {Step} */
export function closes(state, run, { request_id: requestId, reason, choice }) {
  const question = run.question;
  if (!question || question.requestId !== requestId || question.stage === "closed") return [state, []];
  const delegation = delegationOf(state, run.key);
  const told = SAID[reason] ? say(state, "notice", [SAID[reason]], delegation, run.key) : state;
  const noted = SAID[reason] ? doing() : (/** @type {State} */ s) => note(s, CLOSED_NOTES[reason] ?? CLOSED_NOTES.run_ended, delegation);
  return chain(told, (s) => over(s, run, question, outcomeOf({ reason, choice })), noted, releaseCaptured);
}

/** @param {State} state @param {Run} run @param {Question} question @param {string} outcome @returns {Step} */
function over(state, run, question, outcome) {
  const closed = questionChanged(state, run.key, { stage: "closed", closedAt: state.now, outcome: question.outcome || outcome });
  return [unsay(closed, (piece) => piece.kind === "question" && piece.run === run.key), []];
}

/** The end of its run closes a question that is open. @param {Question | null} question @param {number} at @returns {Question | null} */
export function closedWithRun(question, at) {
  if (!question || question.stage === "closed") return question;
  return { ...question, stage: "closed", closedAt: at, outcome: question.outcome || "run_ended" };
}

/** Delegations that were captured by a question are answered by its end, unless words.js has something left to hand over. @type {Rule} */
export function releaseCaptured(state) {
  if (openQuestion(state) || isLeft(state)) return [state, []];
  const ids = captured(state);
  return noteAll(assign(state, ids, "answered", null), "The user's words were about Hermes's question.", ids);
}

/** Whether the user said something while a question was open that was no answer to it. @param {State} state */
export function isLeft(state) {
  const questions = state.runs.flatMap((run) => (run.question && !run.stopAsked ? [run.question] : []));
  if (questions.some((question) => question.left.length)) return true;
  if (!captured(state).length || !questions.length) return false;
  const since = Math.max(...questions.map((question) => question.at));
  const said = transcript.pending(state.transcript, (fragment) => fragment.at >= since);
  return said.some((line) => line.speaker === "user" && !transcript.isSound(line.text));
}
