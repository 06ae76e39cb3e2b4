// The questions that Hermes asks before it does something: asked aloud, answered, closed. Pure.
//
//   question    queued -> asked (its append is placed) -> answering -> closed; one at a time
//
// Which words are an answer is for words.js to say; what an answer means, for the server.

import { mayRemind, questionWords, remindersDue, reminderWords } from "./asking.js";
import { assign, chain, changed, delegationOf, doing, mayAnswer, note, noteAll, notify, openQuestion, questionChanged, say, unsay } from "./state.js";

/** @import { EventRule, Question, Rule, Run, State, Step } from "./state.js" */

const KNOWN_CHARS = 20; // of a question, until anyone can know what it is
const ASK_MOST = 3; // times one question is asked aloud
const SOON_MS = 500; // after a question came, a click or a key was on its way to something else

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
export function ask(state, key, before) {
  const run = state.runs.find((r) => r.key === key);
  if (!run?.question) return [state, []];
  const words = `${before}${questionWords(run.question, mayAnswer(state))}`;
  const fresh = unsay(questionChanged(state, key, { stage: "queued" }), (piece) => piece.kind === "question" && piece.run === key);
  return [openQuestion(fresh)?.key === key ? say(fresh, "question", [words], delegationOf(state, key), key) : fresh, []];
}

/** Its append, or a reminder's, has its place in the timeline. @param {State} state @param {string | undefined} id @param {number} endMs @returns {State} */
export function askedAloud(state, id, endMs) {
  const run = state.runs.find((r) => r.question && r.question.sentAs === id);
  if (!run?.question) return state;
  const { stage, asked, askedAt } = run.question;
  const place = { sentAs: "", asked: asked + 1, askedAt: askedAt ?? state.now, afterMs: endMs, aloud: false, saidAt: state.now };
  return questionChanged(state, run.key, { ...place, stage: stage === "queued" ? "asked" : stage });
}

/** The voice begins to ask: a "yes" to what it said before is no answer. @param {State} state @param {number} endMs @returns {State} */
export function beginToAsk(state, endMs) {
  const run = openQuestion(state);
  const question = run?.question;
  if (!run || question?.stage !== "asked" || question.aloud || endMs < question.afterMs) return state;
  return questionChanged(state, run.key, { aloud: (state.speech.current?.voiced ?? KNOWN_CHARS) >= KNOWN_CHARS, afterMs: endMs });
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
  return { ...run, question: { ...question, stage: "queued", sentAs: "", askedAt: null, asked: 0 } };
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

/** The server is told, and decides what it means. @param {State} state @param {Run} run @param {{choice?: string, heard?: string, typed?: string}} said @returns {Step} */
export function answer(state, run, said) {
  const next = questionChanged(state, run.key, { stage: "answering" });
  return [next, [{ do: "approve", key: run.key, runId: run.runId, requestId: run.question?.requestId, ...said }]];
}

/** While a question is open, a typed message answers it or comes back to be kept. @param {State} state @param {Run} run @param {string} text @returns {Step} */
export function typedAnswer(state, run, text) {
  const seen = run.question && isSeen(run.question, state.now);
  if (seen && run.question?.stage !== "answering") return answer(state, run, { heard: text, typed: text });
  const why = seen ? "Your answer is on its way to Hermes. Send this after it." : "Hermes has just asked something. Send this again if it is the answer.";
  return [notify(state, "info", why), [{ do: "draft", text }]];
}

/** What became of an answer: `choice` (null: not clear), or `message` if it failed. @type {EventRule} */
export function answered(state, event) {
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
  return chain(reopened, (s) => ask(s, run.key, "Sorry, that was not a clear yes or no. "), doing(...draft));
}

/** Let only later words answer. @param {State} state @param {string} key @returns {State} */
function moveOn(state, key) {
  const ends = state.transcript.lines.flatMap((line) => (line.session === state.attempt ? line.fragments.map((f) => f.endMs) : []));
  return questionChanged(state, key, { afterMs: Math.max(0, ...ends) });
}

// ---- closing

/** @type {Record<string, string>} */
const CLOSED_NOTES = {
  answered: "The user's answer reached Hermes; the task goes on.",
  timeout: "The question to the user ran out of time; Hermes did not do what it asked about.",
  run_ended: "The question is over, because the task has ended or is being stopped.",
};

/** How a question came to its end, as its card says it. @param {{reason: string, choice?: string}} closed */
export function outcomeOf({ reason, choice }) {
  if (reason !== "answered" || !choice) return reason;
  return choice === "deny" ? "denied" : "allowed";
}

/** A question is over. @param {State} state @param {Run} run @param {any} update @returns {Step} */
export function closes(state, run, update) {
  if (run.question?.requestId !== update.request_id) return [state, []];
  const reason = update.reason;
  const over = questionChanged(state, run.key, { stage: "closed", closedAt: state.now, outcome: run.question?.outcome || outcomeOf(update) });
  const quiet = unsay(over, (piece) => piece.kind === "question" && piece.run === run.key);
  const delegation = delegationOf(state, run.key);
  if (reason === "timeout") {
    const told = "Nobody answered Hermes's question in time, so it did not do that.";
    return releaseCaptured(say(quiet, "notice", [told], delegation, run.key));
  }
  return chain(quiet, (s) => note(s, CLOSED_NOTES[reason] ?? CLOSED_NOTES.run_ended, delegation), releaseCaptured);
}

/** The end of its run closes a question that is open. @param {Question | null} question @param {number} at @returns {Question | null} */
export function closedWithRun(question, at) {
  if (!question || question.stage === "closed") return question;
  return { ...question, stage: "closed", closedAt: at, outcome: question.outcome || "run_ended" };
}

/** Delegations that were captured by a question are answered by its end. @type {Rule} */
export function releaseCaptured(state) {
  const captured = state.delegations.filter((d) => d.state === "captured").map((d) => d.id);
  return noteAll(assign(state, captured, "answered", null), "The user's words were about Hermes's question.", captured);
}
