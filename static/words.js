// What the user says and types, and where it goes: a request, an answer, or a command. Pure.
//
//   delegation  settling -> sent, captured (it answers a question) -> answered
//   command     all of the user's newest words, and then it is what the table says -> obeyed
//   answer      utterances that began when a question was the newest thing the voice had said,
//               once it is quiet
//   left        words that a question took and that are no answer: a request once it closes
//   late        words soon after a question closed: late.js asks the server
//   request     everything else that the model hands over, once it is complete
//   tail        words that go on with a request that was handed over in mid-sentence
//
// Words that nobody handed over stay, and go along with the next request.

import { lateAnswer } from "./late.js";
import { isOneOf } from "./phrases.js";
import { mayBeEcho, wordsOf } from "./echo.js";
import { answer, ask, isHeard, isLeft, releaseCaptured, typedAnswer, unclear } from "./questions.js";
import { delegate, stopRun } from "./runs.js";
import { close } from "./session.js";
import { areLate, dueAt, haveMarks } from "./settle.js";
import * as speech from "./speech.js";
import { answerable, assign, captured, chain, changed, each, keep, note, noteAll, notify, openQuestion, say, settling } from "./state.js";
import * as transcript from "./transcript.js";
import { giveWay, goOn, sayAgain } from "./voice.js";

/** @import { EventRule, Rule, State, Step } from "./state.js" */
/** @typedef {(state: State, ids: string[]) => Step} Command   `ids`: the delegations that came with it */

const UTTERANCE_MS = 1300; // of quiet after which an answer is complete
const AGAIN_MS = 10000; // in which a delegation without new words is about the words before
const REQUEST_WORDS = 3; // with fewer it is a remark, which goes along with the next request
const ECHO_MS = 3000; // words come up to 2 s after they were said
const DELEGATIONS_KEPT = 100;
const KEEP_MS = 1500; // of quiet, then what was said is kept by the server
const KEEP_AGAIN_MS = 5000;

// ---- they come

/** @type {EventRule} */
export function heard(state, event) {
  const words = /** @type {any} */ (event);
  const added = listen(state, transcript.add(state.transcript, words, state.attempt, state.now));
  const next = { ...state, transcript: added, heardAt: state.now, linesAt: state.now };
  if (event.speaker === "assistant") next.speech = speech.voiced(state.speech, words.text);
  else if (!transcript.isEchoing(added)) next.speech = speech.listened(state.speech, state.now, !transcript.isSound(words.text));
  return [next, []];
}

/** While the voice is heard, the microphone may hear it too. @param {State} state @param {transcript.Transcript} added */
function listen(state, added) {
  const isHeard = !state.silenced && (state.speech.sounding || state.now - state.speech.soundAt < ECHO_MS);
  return isHeard ? transcript.markEcho(added, state.attempt) : added;
}

/** The model wants work done. @type {EventRule} */
export function delegated(state, event) {
  if (state.delegations.some((known) => known.id === event.id)) return [state, []];
  const delegation = { id: event.id, attempt: state.attempt, at: state.now, placeMs: event.placeMs ?? null, state: /** @type {const} */ ("settling"), run: null };
  return [{ ...state, heardAt: state.now, delegations: [...state.delegations, delegation].slice(-DELEGATIONS_KEPT) }, []];
}

/** A typed message takes the same way as a spoken one. @type {EventRule} */
export function typed(state, event) {
  if (isOneOf(event.text, state.stopPhrases)) return typedStop(state, event.text);
  const asking = answerable(state);
  if (asking) return typedAnswer(state, asking, event.text);
  const added = transcript.addTyped(state.transcript, event.text, state.attempt, state.now);
  // It takes along what was said before it, and so answers the delegations of that.
  const ids = settling(state).map((d) => d.id);
  return chain(
    { ...state, transcript: added, heardAt: state.now, linesAt: state.now },
    (s) => note(s, `The user typed: ${event.text}`, null),
    (s) => delegate(s, `typed_${event.id}`, ids),
  );
}

/** @param {State} state @param {string} text @returns {Step} */
function typedStop(state, text) {
  const [handed] = transcript.addHanded(state.transcript, text, state.attempt, state.now);
  const next = { ...state, transcript: handed, heardAt: state.now, linesAt: state.now };
  const left = state.runs.filter((run) => !run.result);
  if (!left.length) return [notify(next, "info", "Nothing is running."), []];
  return each(next, left.filter((run) => !run.stopAsked), (s, { key }) => stopRun(s, { type: "stopRun", key }));
}

// ---- they are complete

/** Hand over what was said once it is complete. @type {Rule} */
export function settle(state) {
  const left = capture(state);
  const ids = settling(left).map((d) => d.id);
  if (!ids.length || left.now < settlesAt(left)) return [left, []];
  if (!transcript.isAsking(left.transcript)) return withoutWords(left, ids);
  // Places that were waited for in vain are not waited for again.
  const next = isWaiting(left) ? { ...left, placesHold: false } : left;
  return spokenCommand(next)?.(next, ids) ?? lateAnswer(next, ids) ?? delegate(next, ids[0], ids);
}

/** What was delegated after an open question was asked is about it; before, it is a request of its own. @param {State} state @returns {State} */
function capture(state) {
  const question = answerable(state)?.question;
  const askedAt = question?.askedAt ?? (question?.stage === "answering" ? question.at : Infinity);
  const ids = settling(state).filter((d) => d.at >= askedAt).map((d) => d.id);
  return ids.length ? assign(state, ids, "captured", null) : state;
}

/** When the words of the delegations that wait for them are complete. @param {State} state */
export function settlesAt(state) {
  const [first] = settling(state);
  if (!first) return Infinity;
  const marked = haveMarks(transcript.heardOf(state.transcript, state.attempt));
  return dueAt(transcript.asking(state.transcript), first.at, isWaiting(state), marked);
}

/** Whether the words of a delegation have not come. @param {State} state */
function isWaiting(state) {
  const words = transcript.heardOf(state.transcript, state.attempt);
  return state.placesHold && settling(state).some((d) => areLate(words, d.placeMs));
}

/** The session ends: what was delegated is not waited for any longer. An answer may be half a one, and its question is asked anew. @type {Rule} */
export function handOver(state) {
  const left = capture(state);
  const ids = settling(left).map((d) => d.id);
  if (!ids.length) return tail(left);
  if (!transcript.isAsking(left.transcript)) return [left, []];
  const command = spokenCommand(left);
  if (command === spokenHangUp) return [commanded(left, ids, null), []];
  return command ? command(left, ids) : delegate(left, ids[0], ids);
}

/** The user ends it: what was said last is whole. @type {Rule} */
export function handOverAll(state) {
  const [next, effects] = hearAnswer(state, 0);
  return effects.length ? [next, effects] : handOver(next);
}

/** Late words that go on with what was handed over in mid-sentence are handed over too. @type {Rule} */
export function handTail(state) {
  return settling(state).length || !isQuiet(state) ? [state, []] : tail(state);
}

/** @type {Rule} */
function tail(state) {
  if (answerable(state) || !transcript.goesOn(state.transcript, state.handed)) return [state, []];
  return delegate({ ...state, counter: state.counter + 1 }, `tail_${state.attempt}_${state.counter}`, []);
}

/** A delegation without words is no request, but it gets an answer. @type {Command} */
function withoutWords(state, ids) {
  const done = assign(state, ids, "answered", null);
  if (state.runs.some((run) => !run.result)) {
    return noteAll(done, "Nothing new was asked. Hermes is still working on what was asked before; its answer comes later.", ids);
  }
  // The model hands some requests over twice, the second time when they are answered.
  const acted = Math.max(state.actedAt, ...state.runs.map((run) => run.at));
  const asked = state.delegations.find((d) => d.id === ids[0])?.at ?? state.now;
  if (asked - acted < AGAIN_MS) return noteAll(done, "Nothing new was asked since the last answer.", ids);
  return reply(done, "Sorry, I did not catch what you want me to do. Could you say it again?", ids);
}

/** Whether the user has said all there is for now. @param {State} state */
function isQuiet(state) {
  return state.now - state.speech.userAt >= UTTERANCE_MS;
}

// ---- answers

/** Words after a question, once complete, are its answer. @type {Rule} */
export function listenForAnswer(state) {
  return hearAnswer(state, UTTERANCE_MS);
}

/** @param {State} state @param {number} quietMs after which they are complete @returns {Step} */
function hearAnswer(state, quietMs) {
  const run = answerable(state);
  const question = run?.question;
  if (!run || question?.stage !== "asked" || question.placeMs === null) return [state, []];
  const begun = transcript.begunAfter(state.transcript, state.attempt, question.placeMs);
  const said = begun.map((utterance) => utterance.filter((f) => !f.batch)).filter((utterance) => utterance.length);
  if (!said.length || state.now - state.speech.userAt < quietMs) return [state, []];
  const command = spokenCommand(state);
  if (command) return command(state, []);
  const answers = said.filter(([first]) => isHeard(state, question, first.startMs));
  if (!answers.length) return [state, []];
  const voiced = transcript.voicedBetween(state.transcript, state.attempt, question.placeMs);
  const words = answers.filter((utterance) => !mayBeEcho(utterance, voiced));
  const [handed, batch] = transcript.hand(state.transcript, (f) => answers.flat().includes(f));
  const next = { ...state, transcript: handed };
  if (!words.length) return unclear(next, run, { ...question, stage: "answering" });
  return answer(next, run, { heard: words.map((utterance) => utterance.map(({ text }) => text).join("").trim()).join(" ") }, batch);
}

/** Words that a question took and that are no answer to it are a request, once it is closed. @type {Rule} */
export function handLeft(state) {
  return openQuestion(state) ? [state, []] : handLeftNow(state);
}

/** @type {Rule} */
export function handLeftNow(state) {
  if (!isLeft(state)) return releaseCaptured(state);
  const batches = state.runs.flatMap((run) => (run.stopAsked ? [] : (run.question?.left ?? [])));
  const ids = captured(state);
  const runs = state.runs.map((run) => (run.question ? { ...run, question: { ...run.question, left: [] } } : run));
  const words = transcript.wordsIn(state.transcript, batches);
  const next = { ...state, runs, transcript: transcript.takeBack(state.transcript, batches), counter: state.counter + 1 };
  // They settle as any others: what was said last may be an answer that came too late.
  if (ids.length) return [assign(next, ids, "settling", null), []];
  const isRequest = wordsOf([{ text: words, startMs: 0, endMs: 0 }]).length >= REQUEST_WORDS;
  return isRequest ? delegate(next, `left_${state.attempt}_${state.counter}`, []) : [next, []];
}

/** An answer that came late and was not handed over by the model. @type {Rule} */
export function listenForLate(state) {
  if (settling(state).length || answerable(state) || !isQuiet(state)) return [state, []];
  return lateAnswer(state, []) ?? [state, []];
}

// ---- commands

/** The runs that the user's newest words can be about. @param {State} state */
function stoppable(state) {
  return state.runs.filter((run) => !run.result && !run.stopAsked && run.at <= state.speech.userAt);
}

/** Whether there was something to go on with when the words were said. @param {State} state @param {speech.Piece[]} pieces */
function isSince(state, pieces) {
  return !openQuestion(state) && pieces.length > 0 && pieces[0].at <= state.speech.userAt;
}

/** @param {State} state */
function mayAskAgain(state) {
  const stage = openQuestion(state)?.question?.stage;
  return stage === "queued" || stage === "asked";
}

// One of these phrases, at a time when it means something, does this. The first that fits.
/** @type {[phrases: (state: State) => string[], means: (state: State) => boolean, obey: Command][]} */
const COMMANDS = [
  [(state) => state.terms.hangUpPhrases, () => true, spokenHangUp],
  [(state) => state.stopPhrases, (state) => stoppable(state).length > 0, spokenStop],
  [(state) => state.repeatPhrases, mayAskAgain, spokenAskAgain],
  [(state) => state.stopPhrases, (state) => state.runs.every((run) => run.result || run.stopAsked), spokenStopOfNothing],
  [(state) => state.goOnPhrases, (state) => isSince(state, state.speech.kept), spokenGoOn],
  [(state) => state.repeatPhrases, (state) => isSince(state, state.speech.last), spokenSayAgain],
];

/** What the user's newest words, all of them, ask of the call itself. @param {State} state @returns {Command | null} */
function spokenCommand(state) {
  const said = transcript.newestWords(state.transcript, state.attempt);
  const row = COMMANDS.find(([phrases, means]) => isOneOf(said, phrases(state)) && means(state));
  return row ? row[2] : null;
}

/** A command that the model did not hand over. @type {Rule} */
export function listenForCommand(state) {
  if (settling(state).length || !isQuiet(state)) return [state, []];
  return spokenCommand(state)?.(state, []) ?? [state, []];
}

/** The user's newest words are a command; `ids` are the delegations that came with it. @param {State} state @param {string[]} ids @param {string | null} run @returns {State} */
function commanded(state, ids, run) {
  const newest = transcript.newest(state.transcript, state.attempt);
  const [handed] = transcript.hand(state.transcript, (f) => newest.includes(f));
  return assign({ ...state, transcript: handed, actedAt: state.now }, ids, run ? "sent" : "answered", run);
}

/** @type {Command} */
function spokenHangUp(state, ids) {
  return close(commanded(state, ids, null));
}

/** @type {Command} */
function spokenStop(state, ids) {
  const running = stoppable(state);
  const key = running[running.length - 1].key;
  return chain(
    commanded(state, ids, key),
    (s) => each(s, running, (next, run) => stopRun(changed(next, run.key, (r) => ({ ...r, stopSaid: true })), { type: "stopRun", key: run.key })),
    (s) => [say(s, "notice", ["I am asking Hermes to stop."], ids[0] ?? null, key), []],
  );
}

/** No task runs, and none begins: whatever was said before and not handed over is taken back with it. @type {Command} */
function spokenStopOfNothing(state, ids) {
  const [handed] = transcript.hand(state.transcript, (_, line) => line.speaker === "user");
  const next = assign({ ...state, transcript: handed, actedAt: state.now }, ids, "answered", null);
  const { sounding, soundAt, userAt } = state.speech;
  if (state.runs.some((run) => !run.result)) return noteAll(next, "Hermes has been asked to stop already.", ids);
  // Then it is the voice that was to stop, or it has answered by itself.
  if (sounding || userAt - soundAt < ECHO_MS) return chain(next, giveWay, (s) => noteAll(s, "No task is running. The user wants you to be quiet.", ids));
  return reply(next, "Nothing is running.", ids);
}

/** One answer to all of these: said with the newest. @param {State} state @param {string} text @param {string[]} ids @returns {Step} */
function reply(state, text, ids) {
  return noteAll(say(state, "notice", [text], ids.at(-1) ?? null, null), text, ids.slice(0, -1));
}

/** @type {Command} */
function spokenAskAgain(state, ids) {
  const key = openQuestion(state)?.key ?? "";
  return chain(commanded(state, ids, null), (s) => noteAll(s, "The question follows once more.", ids), (s) => ask(s, key, ""));
}

/** @type {Command} */
function spokenGoOn(state, ids) {
  return chain(commanded(state, ids, null), (s) => noteAll(s, "The rest of the answer follows.", ids), goOn);
}

/** @type {Command} */
function spokenSayAgain(state, ids) {
  return chain(commanded(state, ids, null), (s) => noteAll(s, "The last answer follows once more.", ids), sayAgain);
}

// ---- they are kept

/** Keep what was said, once it is quiet. @type {Rule} */
export function keepLines(state) {
  return state.linesAt && state.now - state.linesAt >= KEEP_MS ? keep(state) : [state, []];
}

/** The server did not take it. @type {Rule} */
export function notKept(state) {
  return [{ ...state, transcript: transcript.unsave(state.transcript), linesAt: state.now + KEEP_AGAIN_MS }, []];
}

/** The lines of an earlier page. @type {EventRule} */
export function recalled(state, event) {
  // A page that was let in again has them, and its own.
  if (transcript.isRecalled(state.transcript)) return [state, []];
  const earlier = event.lines.filter((/** @type {any} */ line) => !line.key.startsWith(`${state.page}_`));
  return [{ ...state, transcript: transcript.recall(state.transcript, earlier, state.now) }, []];
}
