// What is said of a question of Hermes's, and when, and whether the voice said it. Pure.
//
//   when                                    what
//   it is asked                             the question
//   a third and two thirds of its time on   a reminder, the second one more urgent
//   20 s before it runs out                 the last one
//
// A reminder that would come within 15 s of the question's last words is left out.
//
//   the voice's words since the append's place        the newest thing it said
//   end with words of the append, in their order      is the question, whole or so far
//   name Hermes, then end with "yes or no", in any    is the question, in other words or in
//   language, said once                               another language
//   none, or anything else                            is not the question

import { wordsInOrder, wordsOf } from "./echo.js";
import { isSound, PAUSE_MS } from "./transcript.js";
import { cut } from "./wire.js";

/** @typedef {import("./echo.js").Said} Said */

const LAST_MS = 20000;
const APART_MS = 15000;
const KNOWN_CHARS = 20; // of a question, until anyone can know what it is
const NEWEST_WORDS = 4; // of the voice; if they are the question's, nothing came after it
const LIKE = 0.75; // so many of the newest sentence's words are the question's
const DESCRIPTION_BYTES = 180; // with more, the append would be cut before "yes or no"

/** @typedef {{description: string, choices: string[], askedAt: number | null, until: number, saidAt: number, reminded: number}} Asked */

/** @param {{choices: string[]}} question @param {boolean} byVoice whether words may answer it */
function howTo({ choices }, byVoice) {
  if (!choices.includes("once")) return "It can only be denied, with the button on the screen.";
  return byVoice ? "Do you allow it, yes or no?" : "Please answer with the buttons on the screen.";
}

/** The question itself. @param {{description: string, choices: string[]}} question @param {boolean} byVoice */
export function questionWords(question, byVoice) {
  const { description } = question;
  const what = description ? ` It is about: ${cut(description, DESCRIPTION_BYTES)}.` : "";
  return `Hermes asks for permission to run a command.${what} The exact command is on the screen. ${howTo(question, byVoice)}`;
}

/** How many reminders were due up to a time. @param {Asked} question @param {number} at */
export function remindersDue({ askedAt, until }, at) {
  if (askedAt === null) return 0;
  const third = (until - askedAt) / 3;
  return [askedAt + third, askedAt + 2 * third, until - LAST_MS].filter((due) => due > askedAt && due <= at).length;
}

/** Whether a reminder may be said now. @param {Asked} question @param {number} at */
export function mayRemind(question, at) {
  return at < question.until && at - question.saidAt >= APART_MS;
}

/** @param {Asked} question @param {number} at @param {boolean} byVoice */
export function reminderWords(question, at, byVoice) {
  const seconds = Math.max(1, Math.round((question.until - at) / 1000));
  const due = remindersDue(question, at);
  if (question.until - at <= LAST_MS) return `Last call: in ${seconds} seconds Hermes gives up on its question. ${howTo(question, byVoice)}`;
  if (due > 1) return `Hermes still needs an answer, or it will not do it. ${seconds} seconds are left. ${howTo(question, byVoice)}`;
  return `Hermes is waiting for your answer to its question. ${howTo(question, byVoice)}`;
}

// ---- heard

const SENTENCE_END = ".!?…。！？؟।";
/** "Yes or no", as a question ends with it: first where words may be an answer without being configured. */
const YES_OR_NO = new RegExp(plain([
  "yes or no", "ja oder nein", "oui ou non", "sí o no", "sim ou não", "ja of nee", "tak czy nie",
  "evet (?:mi|veya|ya da|yoksa) hayır", "是(?:还是|還是|或)(?:不是|否)", "(?:可以|同意|允许|允許)(?:还是|還是)不",
  "はい、?(?:か|または|もしくは)?、?いいえ",
  "ja eller nei", "ja eller nej", "kyllä vai ei", "jah või ei", "jā vai nē", "taip ar ne", "ano (?:nebo|či) ne", "áno alebo nie",
  "igen vagy nem", "da sau nu", "da ili ne", "da ali ne", "ναι ή όχι", "да или нет", "так чи ні", "да или не", "نعم (?:أم|أو|ام|او) لا",
  "بله یا (?:نه|خیر)", "כן או לא", "हाँ या (?:नहीं|ना)", "হ্যাঁ (?:না|বা) না", "ใช่หรือไม่", "có hay không", "ya atau tidak", "oo o hindi",
  "(?:예|네)(?: 또는| 아니면|,)? 아니(?:요|오)",
].join("|")), "gu");
const HERMES = /hermes|ヘルメス|赫尔墨斯|赫爾墨斯/u;
const AFTER_CHARS = 25; // of the same sentence: "please", "でお答えください"

/** @param {string} text */
function plain(text) {
  return text.toLowerCase().replaceAll("ı", "i").normalize("NFD").replace(/[\u0300-\u036f]/g, "").normalize("NFC");
}

/**
 * Whether the newest thing that the voice said is what it was given to ask, or the beginning of that.
 * @param {Said[]} voiced its words since the append's place, up to the user's
 * @param {string} append
 */
export function isAsked(voiced, append) {
  const said = voiced.filter(({ text }) => !isSound(text));
  const text = said.map((each, n) => (n && each.startMs - said[n - 1].endMs >= PAUSE_MS ? `\n${each.text}` : each.text)).join("");
  return isSaidWordForWord(text, append) || isRendered(plain(text));
}

/** @param {string} text */
function spoken(text) {
  return wordsOf([{ text, startMs: 0, endMs: 0 }]);
}

/** @param {string} text @param {string} append */
function isSaidWordForWord(text, append) {
  const [words, asked] = [spoken(text), spoken(append)];
  const sentence = spoken(text.split(new RegExp(`[\n${SENTENCE_END}]`, "u")).findLast((part) => /[\p{L}\p{N}]/u.test(part)) ?? "");
  const newest = Math.min(NEWEST_WORDS, words.length);
  const matched = wordsInOrder(words, asked);
  const without = (/** @type {number} */ count) => matched - wordsInOrder(words.slice(0, words.length - count), asked);
  return text.trim().length >= KNOWN_CHARS && without(1) === 1 && without(newest) >= newest - 1
    && wordsInOrder(sentence, asked) >= LIKE * sentence.length;
}

/** @param {string} text */
function isRendered(text) {
  const from = text.search(HERMES);
  const pairs = from < 0 ? [] : [...text.slice(from).matchAll(YES_OR_NO)];
  const after = pairs.length === 1 ? text.slice(from + pairs[0].index + pairs[0][0].length) : "";
  return pairs.length === 1 && new RegExp(`^[^\n${SENTENCE_END}]{0,${AFTER_CHARS}}[^\\p{L}\\p{N}]*$`, "u").test(after);
}
