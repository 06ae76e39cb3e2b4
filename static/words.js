// What the user says and types, and where it goes: a request, an answer, or a command. Pure.
//
//   delegation  settling -> sent, captured (it answers a question) -> answered
//   command     all of the user's newest words, and then it is what the table says -> obeyed
//   answer      utterances that began when a question was the newest thing the voice had said,
//               once it is quiet
//   left        words that a question took and that are no answer: a request once it closes
//   late        words soon after a question closed: late.js asks the server
//   talk        only thanks, or a command that means nothing at this time: answered, no request
//   request     everything else that the model hands over, once it is complete
//   correction  a word that came late into a request that was handed over: its whole sentence
//   tail        words that go on with a request that was handed over in mid-sentence
//
// Words that nobody handed over stay, and go along with the next request. What is more than one
// request may hold is refused as a whole, and the user is told.

import { lateAnswer } from "./late.js";
import { mayBeEcho, wordsOf } from "./echo.js";
import { isOneOf, isSmallTalk } from "./phrases.js";
import { answer, ask, isHeard, isLeft, releaseCaptured, typedAnswer, unclear } from "./questions.js";
import { delegate, isRetryable, ownKey, retried, stopRun } from "./runs.js";
import { close } from "./session.js";
import { areLate, dueAt, haveMarks } from "./settle.js";
import * as speech from "./speech.js";
import { answerable, assign, captured, chain, changed, each, keep, note, noteAll, notify, openQuestion, say, settling } from "./state.js";
import * as transcript from "./transcript.js";
import { giveWay, goOn, sayAgain, stopSpeaking } from "./voice.js";

/** @import { EventRule, Rule, Run, State, Step } from "./state.js" */
/** @typedef {(state: State, ids: string[]) => Step} Command   `ids`: the delegations that came with it */

const UTTERANCE_MS = 1300; // of quiet after which an answer is complete
const LATE_MS = 600; // of nothing, after a word that came late
const AGAIN_MS = 10000; // in which a delegation without new words is about the words before
const REQUEST_WORDS = 3; // with fewer it is a remark, which goes along with the next request
const ECHO_MS = 3000; // words come up to 2 s after they were said
const DELEGATIONS_KEPT = 100;
const KEEP_MS = 1500; // of quiet, then what was said is kept by the server
const KEEP_AGAIN_MS = 5000;

const MOST = `${transcript.REQUEST_CHARS.toLocaleString("en")} characters, more than Hermes can be given at once`;
const TOO_LONG = `What you said since your last request is longer than ${MOST}. None of it was sent. Say it in parts.`;
const TYPED_TOO_LONG = `Your message is longer than ${MOST}. It was not sent. Send it in parts.`;
const JUST_TALK = "Nothing was asked of Hermes with that, so no task was started. Answer it yourself.";
const BE_QUIET = "The user wants you to be quiet until they speak again. Hermes's work goes on.";

// ---- they come

/** @type {EventRule} */
export function heard(state, event) {
  const words = /** @type {any} */ (event);
  const added = listen(state, transcript.add(state.transcript, words, state.attempt, state.now));
  const next = { ...state, transcript: added, heardAt: state.now, linesAt: state.now };
  if (event.speaker === "assistant") next.speech = speech.voiced(state.speech, words.text);
  else if (!transcript.isEchoing(added)) next.speech = speech.listened(state.speech, state.now, !transcript.isSound(words.text));
  return event.speaker === "user" && transcript.isTooLong(added) ? refuseWords(next) : [next, []];
}

/** What was said and not handed over is too much for a request. @type {Rule} */
function refuseWords(state) {
  const ids = settling(state).map((d) => d.id);
  const [handed] = transcript.hand(state.transcript);
  const next = assign({ ...state, transcript: handed, actedAt: state.now }, ids, "answered", null);
  return reply(notify(next, "error", TOO_LONG), TOO_LONG, ids);
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
  const command = TYPED.find(([phrases, means]) => means(state) && isOneOf(event.text, phrases(state)));
  if (command) return command[2](typedCommand(state, event.text));
  const asking = answerable(state);
  if (asking) return typedAnswer(state, asking, event.text);
  if (transcript.cost([{ text: event.text }]) > transcript.REQUEST_CHARS) {
    return [notify(state, "error", TYPED_TOO_LONG), [{ do: "draft", text: event.text }]];
  }
  const added = transcript.addTyped(state.transcript, event.text, state.attempt, state.now);
  // What was said before it goes first.
  if (transcript.isTooLong(added)) return chain(state, refuseWords, (s) => typed(s, event));
  // It takes along what was said before it, and so answers the delegations of that.
  const ids = settling(state).map((d) => d.id);
  return chain(
    { ...state, transcript: added, heardAt: state.now, linesAt: state.now },
    (s) => note(s, `The user typed: ${event.text}`, null),
    (s) => delegate(s, `typed_${event.id}`, ids),
  );
}

/** A typed command is shown, and is no request. @param {State} state @param {string} text @returns {State} */
function typedCommand(state, text) {
  const [handed] = transcript.addHanded(state.transcript, text, state.attempt, state.now);
  return { ...state, transcript: handed, heardAt: state.now, linesAt: state.now };
}

/** @type {Rule} */
function typedStop(state) {
  const left = state.runs.filter((run) => !run.result);
  if (!left.length) return [notify(state, "info", "Nothing is running."), []];
  return each(state, left.filter((run) => !run.stopAsked), (s, { key }) => stopRun(s, { type: "stopRun", key }));
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
  return spokenCommand(next)?.(next, ids) ?? lateAnswer(next, ids) ?? requested(next, ids);
}

/** What the model handed over is a request, unless it asks for nothing. @type {Command} */
function requested(state, ids) {
  if (isTalk(state)) return talk(state, ids);
  // Lines that were handed over give way to newer ones.
  const isLong = state.transcript.lines.length > transcript.LINES_KEPT;
  return chain(state, ...(isLong ? [keep] : []), (s) => delegate(s, ids[0], ids));
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
  if (!ids.length) return chain(left, (s) => corrected(s, 0), tail);
  if (!transcript.isAsking(left.transcript)) return [left, []];
  const command = spokenCommand(left);
  if (command === spokenHangUp) return [commanded(left, ids, null), []];
  return command ? command(left, ids) : requested(left, ids);
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
  const goesOn = transcript.goesOn(state.transcript, state.handed);
  if (answerable(state) || !goesOn || isTalk(state)) return [state, []];
  return delegate({ ...state, counter: state.counter + 1 }, ownKey(state, "tail"), []);
}

/**
 * A word that came late into what was handed over makes its sentence another: that is handed
 * over at once, whatever else goes on.
 * @type {Rule}
 */
export function correct(state) {
  return corrected(state, LATE_MS);
}

/** @param {State} state @param {number} quietMs after the last late word @returns {Step} */
function corrected(state, quietMs) {
  const sentence = transcript.corrected(state.transcript, state.runs.flatMap((run) => run.batches));
  const late = sentence.filter((f) => f.into && !f.batch);
  if (!late.length || state.now - Math.max(...late.map((f) => f.at)) < quietMs) return [state, []];
  const run = /** @type {Run} */ (state.runs.findLast((r) => late.some((f) => r.batches.includes(f.into))));
  const isSaid = (/** @type {transcript.Fragment} */ f) => sentence.includes(f);
  if (!run.stopAsked && run.result?.finish !== "failed") {
    return delegate({ ...state, counter: state.counter + 1 }, ownKey(state, "tail"), [], isSaid);
  }
  // Nobody acts on them: if they are asked for once more, it goes along.
  const lines = run.lines.length ? [...run.lines, ...transcript.request(state.transcript, isSaid)] : [];
  const [handed, batch] = transcript.hand(state.transcript, isSaid);
  const batches = [...run.batches, batch];
  return [changed({ ...state, transcript: handed }, run.key, (r) => ({ ...r, lines, batches })), []];
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
  return isRequest ? delegate(next, ownKey(state, "left"), []) : [next, []];
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

/** The newest task, if it was not done. @param {State} state */
function failed(state) {
  const newest = state.runs.at(-1);
  return newest && isRetryable(newest) ? newest : null;
}

// One of these phrases, at a time when it means something, does this. The first that fits.
/** @type {[phrases: (state: State) => string[], means: (state: State) => boolean, obey: Command][]} */
const COMMANDS = [
  [(state) => state.terms.hangUpPhrases, () => true, spokenHangUp],
  [(state) => state.stopPhrases, (state) => stoppable(state).length > 0, spokenStop],
  [(state) => state.repeatPhrases, mayAskAgain, spokenAskAgain],
  [(state) => state.stopPhrases, (state) => state.runs.every((run) => run.result || run.stopAsked), spokenStopOfNothing],
  [(state) => state.stopSpeakingPhrases, () => true, spokenQuiet],
  [(state) => state.goOnPhrases, (state) => isSince(state, state.speech.kept), spokenGoOn],
  [(state) => state.repeatPhrases, (state) => isSince(state, state.speech.last), spokenSayAgain],
  [(state) => state.retryPhrases, (state) => (failed(state)?.at ?? Infinity) <= state.speech.userAt, spokenRetry],
];

// The same of what is typed.
/** @type {[phrases: (state: State) => string[], means: (state: State) => boolean, obey: Rule][]} */
const TYPED = [
  [(state) => state.stopPhrases, () => true, typedStop],
  [(state) => state.stopSpeakingPhrases, (state) => state.phase === "live", stopSpeaking],
  [(state) => state.goOnPhrases, (state) => mayTell(state, state.speech.kept), goOn],
  [(state) => state.repeatPhrases, (state) => mayTell(state, state.speech.last), sayAgain],
  [(state) => state.retryPhrases, (state) => !!failed(state), (state) => retried(state, failed(state)?.key ?? "", [])],
];

/**
 * Whether there is something for the voice to go on with.
 * @param {State} state @param {speech.Piece[]} pieces
 */
function mayTell(state, pieces) {
  return state.phase === "live" && !openQuestion(state) && pieces.length > 0;
}

/** What the user's newest words, all of them, ask of the call itself. @param {State} state @returns {Command | null} */
function spokenCommand(state) {
  const said = transcript.newestWords(state.transcript, state.attempt);
  const row = said && COMMANDS.find(([phrases, means]) => means(state) && isOneOf(said, phrases(state)));
  return row ? row[2] : null;
}

/** Whether nothing that the user said, and was not handed over, asks for anything. @param {State} state */
function isTalk(state) {
  const lines = transcript.pending(state.transcript).filter((line) => line.speaker === "user");
  const said = lines.filter((line) => !transcript.isSound(line.text));
  // To a question of Hermes's at the end of its answer, "go on" is an answer.
  const isAsked = /[?？؟]["'”’)\]」』]*$/u.test(state.speech.last.at(-1)?.text.trim() ?? "");
  const idle = isAsked ? state.repeatPhrases : [...state.goOnPhrases, ...state.repeatPhrases];
  const sentences = said.flatMap(({ text }) => text.split(/(?<=[.!?…。！？])/u)).filter((text) => text.trim());
  return sentences.length > 0 && sentences.every((text) => isSmallTalk(text) || isOneOf(text, idle));
}

/** The voice model handed over what is for itself. @type {Command} */
function talk(state, ids) {
  const [handed] = transcript.hand(state.transcript, (_, line) => line.speaker === "user");
  const next = { ...state, transcript: handed, actedAt: state.now };
  return noteAll(assign(next, ids, "answered", null), JUST_TALK, ids);
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
function spokenQuiet(state, ids) {
  return chain(commanded(state, ids, null), giveWay, (s) => noteAll(s, BE_QUIET, ids.length ? ids : [null]));
}

/** @type {Command} */
function spokenRetry(state, ids) {
  return retried(commanded(state, ids, null), failed(state)?.key ?? "", ids);
}

/** @type {Command} */
function spokenGoOn(state, ids) {
  return chain(commanded(state, ids, null), (s) => noteAll(s, "The rest of the answer follows.", ids), goOn);
}

/** The voice is told how it was put: it may be to be slower, too. @type {Command} */
function spokenSayAgain(state, ids) {
  const said = transcript.newestWords(state.transcript, state.attempt);
  return chain(
    commanded(state, ids, null),
    (s) => noteAll(s, `The user said “${said}” The last answer follows once more.`, ids.length ? ids : [null]),
    sayAgain,
  );
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
