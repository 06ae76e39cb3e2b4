// Words into lines, and which of them Hermes has not been given yet. Pure.
//
// The model's transcript has no turns and no ends, its fragments overlap between speakers
// and may come late or twice. A line is only a way to show them.

//
//   a fragment                        is
//   seen before, or a repeat          dropped, or what is new of it (repeat.js)
//   later than the words around it    put where it belongs; if what follows it has been handed
//                                     over, `into` says with what, and its sentence is handed
//                                     over once more, as a correction
//   the user's, not handed over       kept, whole, up to a request's length (isTooLong)
//
// A line's text holds nothing that could pass for another line, and no half of a character.

import { echoLength } from "./echo.js";
import { unrepeated } from "./repeat.js";

/**
 * @typedef {{text: string, startMs: number, endMs: number, batch: number, at: number, into: number}} Fragment
 *   `batch` is the number of the hand-over it went with, 0 if it has not been handed over,
 *   ECHO if the user did not say it;
 *   `at`: when it came; `into`: the hand-over that the word after it had gone with by then, or 0
 * @typedef {{key: number, speaker: "user" | "assistant", typed: boolean, session: number,
 *   fragments: Fragment[], at: number, saved: number}} Line
 *   `at`: when it began; `saved`: so many of its characters the server has
 * @typedef {{lines: Line[], seen: string[], next: number, batches: number}} Transcript
 */

const ECHO = -2;
export const LINES_KEPT = 400; // besides those of the user's that wait to be handed over
const SEEN_KEPT = 500;
const FRAGMENTS_KEPT = 400; // in one line; a longer speech goes on in the next
const LATE_KEPT = 50; // that come late into a line which is full
// The one limit of what the user says or types, the sidecar's too: an hour of speech. In UTF-8,
// three bytes each at most, it fits into the sidecar's bodies of 256 KiB.
export const REQUEST_CHARS = 64000;
const FRAME_CHARS = 36; // of a line in a body, besides its text
const HISTORY_CHARS = 3000; // of one line; the sidecar keeps no more of it for the voice
/** What stands before a sentence that is handed over once more. */
export const CORRECTION = "Correction: a word of this came late. What I said is: ";
// A pause of this length between two fragments of one speaker begins a new line.
const LINE_GAP_MS = 1500;
// A pause of this length between two words ends a sentence too.
export const PAUSE_MS = 700;
const ECHO_LINES = 4; // of the voice, and of each so many fragments, hold its last 8 s
const ECHO_FRAGMENTS = 60;
// A line that is only a sound of listening asks for nothing.
const SOUND = /^(?:h+m+|m+(?:h+m*)?|uh[ -]?huh|aha|ah|oh|uhm?|um|er|ähm?)[.,!…]*$/i;

/** @type {Transcript} */
export const EMPTY = { lines: [], seen: [], next: 1, batches: 0 };

/**
 * Add a fragment. One that came before, by its id, changes nothing.
 * @param {Transcript} transcript
 * @param {{speaker: "user" | "assistant", text: string, startMs: number, endMs: number, id: string | null}} heard
 * @param {number} session
 * @param {number} at
 * @returns {Transcript}
 */
export function add(transcript, heard, session, at) {
  // The ids of one session say nothing about another's.
  const id = heard.id && `${session} ${heard.id}`;
  if (id && transcript.seen.includes(id)) return transcript;
  const seen = id ? [...transcript.seen, id].slice(-SEEN_KEPT) : transcript.seen;
  const fragment = { text: heard.text, startMs: heard.startMs, endMs: heard.endMs, batch: 0, at, into: 0 };
  const open = lineOf(transcript, heard.speaker, session, fragment);
  // Not every service gives its fragments ids.
  const again = !heard.id && open?.fragments.some((f) => f.text === heard.text && f.startMs === heard.startMs && f.endMs === heard.endMs);
  if (again) return transcript;
  if (!open) return { ...newLine(transcript, heard.speaker, false, session, fragment, at), seen };
  const fragments = unrepeated(fragment, open.fragments).reduce(insert, open.fragments);
  const lines = transcript.lines.map((line) => (line === open ? { ...open, fragments } : line));
  return { ...transcript, lines, seen };
}

/**
 * The line that a fragment belongs to: in whose time it lies, or that it goes on with.
 * @param {Transcript} transcript @param {Line["speaker"]} speaker @param {number} session
 * @param {Fragment} fragment
 */
function lineOf({ lines }, speaker, session, fragment) {
  /** @param {Line} line */
  const isTheirs = (line) => line.speaker === speaker && line.session === session && !line.typed;
  const late = lines.findLast((line) => isTheirs(line) && holds(line, fragment));
  return late ?? lines.slice(-2).find((line) => isTheirs(line) && near(line, fragment));
}

/** @param {Line} line */
function endOf(line) {
  return Math.max(...line.fragments.map((other) => other.endMs));
}

/** @param {Line} line @param {Fragment} fragment */
function holds(line, fragment) {
  if (line.fragments.length >= FRAGMENTS_KEPT + LATE_KEPT) return false;
  return fragment.endMs > line.fragments[0].startMs - LINE_GAP_MS && fragment.startMs < endOf(line);
}

/** @param {Line} line @param {Fragment} fragment */
function near(line, fragment) {
  return line.fragments.length < FRAGMENTS_KEPT && fragment.startMs - endOf(line) < LINE_GAP_MS;
}

/** @param {Fragment[]} fragments @param {Fragment} fragment */
function insert(fragments, fragment) {
  const later = fragments.findIndex(({ startMs, endMs }) => (startMs - fragment.startMs || endMs - fragment.endMs) > 0);
  const after = later < 0 ? [] : fragments.slice(later);
  const into = after.find((other) => other.batch > 0)?.batch ?? 0;
  return [...fragments.slice(0, fragments.length - after.length), { ...fragment, into }, ...after];
}

/**
 * Add a line the user typed.
 * @param {Transcript} transcript @param {string} text @param {number} session @param {number} at
 */
export function addTyped(transcript, text, session, at) {
  return newLine(transcript, "user", true, session, { text, startMs: 0, endMs: 0, batch: 0, at, into: 0 }, at);
}

/** The same, handed over already. @param {Transcript} transcript @param {string} text @param {number} session @param {number} at @returns {[Transcript, number]} and the batch's number */
export function addHanded(transcript, text, session, at) {
  const added = addTyped(transcript, text, session, at);
  return hand(added, (_, line) => line === added.lines.at(-1));
}

/**
 * @param {Transcript} transcript @param {"user" | "assistant"} speaker @param {boolean} typed
 * @param {number} session @param {Fragment} fragment @param {number} at
 * @returns {Transcript}
 */
function newLine(transcript, speaker, typed, session, fragment, at) {
  const line = { key: transcript.next, speaker, typed, session, fragments: [fragment], at, saved: 0 };
  return { ...transcript, lines: kept([...transcript.lines, line]), next: transcript.next + 1 };
}

/** The newest lines, and all with words of the user's that were not handed over. @param {Line[]} lines */
function kept(lines) {
  if (lines.length <= LINES_KEPT) return lines;
  const waits = (/** @type {Line} */ line) => line.speaker === "user" && line.fragments.some((f) => !f.batch);
  let over = lines.filter((line) => !waits(line)).length - LINES_KEPT;
  return over > 0 ? lines.filter((line) => waits(line) || over-- <= 0) : lines;
}

/** A line's whole text. @param {Line} line */
export function textOf(line) {
  return joined(line, line.fragments.filter((fragment) => fragment.batch !== ECHO));
}

/** Fragments of a line as one text. @param {Pick<Line, "typed">} line @param {Fragment[]} fragments */
function joined({ typed }, fragments) {
  const text = wellFormed(fragments.map((fragment) => fragment.text).join(""));
  return (typed ? inLines(text) : inOneLine(text)).trim();
}

/** Half a character is none, and no server takes it. @param {string} text */
function wellFormed(text) {
  return text.replace(/\p{Surrogate}/gu, "\ufffd");
}

/** What is said has no lines. @param {string} text */
function inOneLine(text) {
  return text.replace(/[\s\p{Cc}]+/gu, " ");
}

/** What is typed has, of one kind. @param {string} text */
function inLines(text) {
  return text.replace(/\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]/g, "\n").replace(/[^\P{Cc}\n\t]/gu, " ");
}

/** Mark what of the user's newest utterance is an echo of the voice. @param {Transcript} transcript @param {number} session @returns {Transcript} */
export function markEcho(transcript, session) {
  const ofSession = transcript.lines.filter((line) => line.session === session && !line.typed);
  const line = ofSession.findLast((l) => l.speaker === "user");
  if (!line) return transcript;
  const from = line.fragments.findLastIndex((f, n) => n > 0 && f.startMs - line.fragments[n - 1].endMs >= PAUSE_MS);
  const utterance = line.fragments.slice(Math.max(0, from));
  const voiced = ofSession.filter((l) => l.speaker === "assistant").slice(-ECHO_LINES).flatMap((l) => l.fragments.slice(-ECHO_FRAGMENTS));
  const late = ofSession.flatMap((l) => (l.speaker === "user" ? l.fragments.filter(isLate) : []));
  const lateEcho = late.filter((f) => echoLength([f], voiced));
  const echoed = [...utterance.slice(0, echoLength(utterance, voiced)), ...lateEcho];
  const said = [...utterance, ...late];
  return mark(transcript, (f) => (!said.includes(f) || f.batch > 0 ? f.batch : echoed.includes(f) ? ECHO : 0));
}

/**
 * Whether a fragment came into words that had been handed over, and has not been itself.
 * @param {Fragment} fragment
 */
function isLate({ into, batch }) {
  return into > 0 && batch <= 0;
}

/** Whether a text holds a word, and not only a sound of listening. @param {string} text */
function saysSomething(text) {
  return /[\p{L}\p{N}]/u.test(text) && !isSound(text);
}

/** Whether the newest fragment of the user's is an echo. @param {Transcript} transcript */
export function isEchoing(transcript) {
  return transcript.lines.findLast((line) => line.speaker === "user")?.fragments.at(-1)?.batch === ECHO;
}

/** The user's newest line. @param {Transcript} transcript */
function newestOf(transcript) {
  return transcript.lines.findLast((line) => line.speaker === "user" && textOf(line));
}

/**
 * What has not been handed over, oldest first.
 * @param {Transcript} transcript
 * @param {(fragment: Fragment, line: Line) => boolean} [wanted]
 * @returns {{speaker: "user" | "assistant", text: string}[]}
 */
export function pending(transcript, wanted = () => true) {
  return transcript.lines
    .map((line) => ({
      speaker: line.speaker,
      text: joined(line, line.fragments.filter((fragment) => !fragment.batch && wanted(fragment, line))),
    }))
    .filter((line) => line.text);
}

/** Whether a text is only a sound of listening. @param {string} text */
export function isSound(text) {
  return SOUND.test(text.trim());
}

/** Whether the user has said something that has not been handed over. @param {Transcript} transcript */
export function isAsking(transcript) {
  return pending(transcript).some((line) => line.speaker === "user" && !isSound(line.text));
}

/**
 * What of a line is to be handed over: a sentence that a late word corrects, whole, and the rest.
 * @param {Line} line @param {(fragment: Fragment, line: Line) => boolean} wanted
 * @returns {{rest: Fragment[], sentence: Fragment[]}}
 */
function owed(line, wanted) {
  const left = line.fragments.filter((f) => !f.batch && wanted(f, line));
  const late = left.filter((f) => line.speaker === "user" && isLate(f) && saysSomething(f.text));
  const sentence = late.length ? sentenceAround(line, late) : [];
  return { rest: left.filter((f) => !sentence.includes(f)), sentence };
}

/**
 * A line's words around some of them, from the beginning of a sentence to the end of one.
 * @param {Line} line @param {Fragment[]} some in order
 */
function sentenceAround(line, some) {
  const said = line.fragments.filter((f) => f.batch !== ECHO);
  const ends = (/** @type {number} */ n) => endsSentence(joined(line, said.slice(0, n)));
  let [from, to] = [said.indexOf(some[0]), said.indexOf(some[some.length - 1]) + 1];
  while (from > 0 && !ends(from)) from -= 1;
  while (to < said.length && !ends(to)) to += 1;
  return said.slice(from, to);
}

/**
 * The newest sentence that a late word makes another, of those that went in one of these batches.
 * @param {Transcript} transcript @param {number[]} batches
 * @returns {Fragment[]}
 */
export function corrected(transcript, batches) {
  const late = transcript.lines.filter((line) => line.fragments.some(isLate));
  const sentences = late.map((line) => owed(line, () => true).sentence);
  return sentences.findLast((sentence) => sentence.some((f) => isLate(f) && batches.includes(f.into))) ?? [];
}

/**
 * What is pending as one request: all of the user's words, and of the voice's the newest that fit.
 * @param {Transcript} transcript
 * @param {(fragment: Fragment, line: Line) => boolean} [wanted]
 */
export function request(transcript, wanted = () => true) {
  const lines = transcript.lines.flatMap((line) => told(line, wanted)).filter((line) => line.text);
  let room = REQUEST_CHARS - cost(lines.filter((line) => line.speaker === "user"));
  const fits = (/** @type {{text: string}} */ line) => (room -= cost([line])) >= 0;
  const some = lines.reverse().filter((line) => line.speaker === "user" || fits(line)).reverse();
  return some.length > 1 ? some.map((line) => ({ ...line, text: inOneLine(line.text) })) : some;
}

/** @param {Line} line @param {(fragment: Fragment, line: Line) => boolean} wanted */
function told(line, wanted) {
  const { rest, sentence } = owed(line, wanted);
  const whole = joined(line, sentence);
  return [
    { speaker: line.speaker, text: joined(line, rest) },
    { speaker: line.speaker, text: whole && `${CORRECTION}${whole}` },
  ];
}

/** So many characters lines take of what is sent. @param {{text: string}[]} lines */
export function cost(lines) {
  return lines.reduce((sum, { text }) => sum + text.length + FRAME_CHARS, 0);
}

/** Whether what waits to be handed over is more than a request may hold. @param {Transcript} transcript */
export function isTooLong(transcript) {
  const lines = transcript.lines.filter((line) => line.speaker === "user");
  const waiting = lines.map((line) => line.fragments.filter((f) => !f.batch)).filter((said) => said.length);
  return cost(waiting.map((said) => ({ text: said.map((f) => f.text).join("") }))) > REQUEST_CHARS;
}

/**
 * Mark what is pending as handed over, in a batch of its own.
 * @param {Transcript} transcript
 * @param {(fragment: Fragment, line: Line) => boolean} [wanted]
 * @returns {[Transcript, number]} and the batch's number
 */
export function hand(transcript, wanted = () => true) {
  const batch = transcript.batches + 1;
  const handed = new Set(transcript.lines.flatMap((line) => Object.values(owed(line, wanted)).flat()));
  const marked = mark(transcript, (f) => (handed.has(f) ? batch : f.batch));
  return [{ ...marked, batches: batch }, batch];
}

/** The words that went in these batches. @param {Transcript} transcript @param {number[]} batches */
export function wordsIn(transcript, batches) {
  const fragments = transcript.lines.flatMap((line) => line.fragments);
  return fragments.filter((fragment) => batches.includes(fragment.batch)).map(({ text }) => text).join(" ");
}

/** Take hand-overs back: they did not arrive. @param {Transcript} transcript @param {number[]} batches */
export function takeBack(transcript, batches) {
  return mark(transcript, (fragment) => (batches.includes(fragment.batch) ? 0 : fragment.batch));
}

/**
 * @param {Transcript} transcript @param {(fragment: Fragment, line: Line) => number} batchOf
 * @returns {Transcript}
 */
function mark(transcript, batchOf) {
  const lines = transcript.lines.map((line) => ({
    ...line,
    fragments: line.fragments.map((fragment) => ({ ...fragment, batch: batchOf(fragment, line) })),
  }));
  return { ...transcript, lines };
}

/**
 * The newest lines as the history of a new session.
 * @param {Transcript} transcript @param {number} most
 */
export function history(transcript, most) {
  const short = (/** @type {Line} */ line) => wellFormed(textOf(line).slice(0, HISTORY_CHARS));
  const lines = transcript.lines.map((line) => ({ speaker: line.speaker, text: short(line) }));
  return lines.filter((line) => line.text).slice(-most);
}

/** All of the user's fragments in a session. @param {Transcript} transcript @param {number} session */
export function heardOf(transcript, session) {
  return transcript.lines.filter((line) => line.speaker === "user" && line.session === session && !line.typed).flatMap((line) => line.fragments);
}

/** The user's utterances that began after a place, without sounds of listening and without the tail of one that began before it. @param {Transcript} transcript @param {number} session @param {number} ms @returns {Fragment[][]} */
export function begunAfter(transcript, session, ms) {
  /** @type {Fragment[][]} */
  const utterances = [];
  for (const fragment of heardOf(transcript, session).filter(({ batch }) => batch !== ECHO)) {
    const last = utterances.at(-1);
    if (last && fragment.startMs - last[last.length - 1].endMs < PAUSE_MS) last.push(fragment);
    else utterances.push([fragment]);
  }
  return utterances.filter((said) => said[0].startMs >= ms && !isSound(said.map(({ text }) => text).join("")));
}

/** The voice's words in a session that ended after a place and began before another. @param {Transcript} transcript @param {number} session @param {number} fromMs @param {number} toMs */
export function voicedBetween(transcript, session, fromMs, toMs = Infinity) {
  const lines = transcript.lines.filter((line) => line.speaker === "assistant" && line.session === session);
  const within = lines.flatMap((line) => line.fragments).filter((f) => f.endMs > fromMs && f.startMs < toMs);
  return within.sort((a, b) => a.startMs - b.startMs);
}

/** The newest of the user's words that ask for something and were not handed over. @param {Transcript} transcript @returns {Fragment[]} */
export function asking(transcript) {
  const left = transcript.lines.filter((line) => line.speaker === "user").map((line) => line.fragments.filter((f) => !f.batch));
  return left.findLast((fragments) => fragments.some((f) => f.text.trim() && !isSound(f.text))) ?? [];
}

/** Whether words came that go on with what went in a batch. @param {Transcript} transcript @param {number} batch */
export function goesOn(transcript, batch) {
  const line = transcript.lines.findLast((l) => l.speaker === "user" && l.fragments.some((f) => f.batch === batch));
  const from = line?.fragments.findLastIndex((f) => f.batch) ?? -1;
  if (!batch || line?.fragments[from].batch !== batch) return false;
  const before = textOf({ ...line, fragments: line.fragments.slice(0, from + 1) });
  return !endsSentence(before) && line.fragments.slice(from + 1).some((f) => f.text.trim() && !isSound(f.text));
}

const ENDED = /[.!?…。！？؟।]["'”’)\]」』]*$/u;
// A short form before the mark goes on.
const SHORT = /(?<!\p{L})(?:e\.g|i\.e|z\.\s?b|d\.\s?h|p\.\s?ex|dr|mr|mrs|ms|st|vs|approx)\.$/iu;

/** Whether a text ends as a sentence does. @param {string} text */
export function endsSentence(text) {
  return ENDED.test(text) && !SHORT.test(text);
}

/**
 * What the user said last in a session and was not handed over, from its beginning after a
 * sentence and a pause; nothing if it goes on with a sentence whose beginning was handed over.
 * @param {Transcript} transcript @param {number} session
 * @returns {Fragment[]}
 */
export function newest(transcript, session) {
  const line = newestOf(transcript);
  if (!line || line.session !== session) return [];
  const said = line.fragments.filter((fragment) => fragment.batch !== ECHO);
  const from = said.findLastIndex((fragment) => fragment.batch) + 1;
  const before = (/** @type {number} */ n) => joined(line, said.slice(0, n));
  const isPaused = (/** @type {number} */ n) => n > 0 && said[n].startMs - said[n - 1].endMs >= PAUSE_MS;
  const begins = said.findLastIndex((_, n) => n > from && isPaused(n) && endsSentence(before(n)));
  if (begins > 0) return said.slice(begins);
  return from < said.length && (!before(from) || isPaused(from) || endsSentence(before(from))) ? said.slice(from) : [];
}

/** The same as text. @param {Transcript} transcript @param {number} session */
export function newestWords(transcript, session) {
  return joined({ typed: false }, newest(transcript, session));
}

/** What the user asked last. @param {Transcript} transcript */
export function lastAsked(transcript) {
  const last = newestOf(transcript);
  return last ? textOf(last) : "";
}

/** The lines that the server does not have as they are. @param {Transcript} transcript */
export function unsaved(transcript) {
  return transcript.lines.filter((line) => textOf(line) && textOf(line).length !== line.saved);
}

/** All lines are with the server. @param {Transcript} transcript @returns {Transcript} */
export function save(transcript) {
  return { ...transcript, lines: transcript.lines.map((line) => ({ ...line, saved: textOf(line).length })) };
}

/** They are not: this page's lines are to be sent again. @param {Transcript} transcript @returns {Transcript} */
export function unsave(transcript) {
  return { ...transcript, lines: transcript.lines.map((line) => (line.session < 0 ? line : { ...line, saved: 0 })) };
}

/** Whether it has lines of an earlier page. @param {Transcript} transcript */
export function isRecalled(transcript) {
  return transcript.lines.some((line) => line.session < 0);
}

/**
 * Lines of an earlier page: shown and taken along as history, but handed over long ago.
 * @param {Transcript} transcript
 * @param {{speaker: "user" | "assistant", text: string, at: number}[]} lines `at`: when they began
 * @param {number} at
 * @returns {Transcript}
 */
export function recall(transcript, lines, at) {
  const earlier = lines.map((line, n) => ({
    key: transcript.next + n,
    speaker: line.speaker,
    typed: true,
    session: -1,
    fragments: [{ text: line.text, startMs: 0, endMs: 0, batch: -1, at, into: 0 }],
    at: Math.min(at, line.at), // by the server's clock, which may have been set back
    saved: line.text.trim().length,
  }));
  const all = kept([...earlier, ...transcript.lines]);
  return { ...transcript, lines: all, next: transcript.next + lines.length };
}
