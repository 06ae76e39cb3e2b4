// Words that the service sends twice: a fragment that repeats what came before. Pure.
//
//   the new fragment, against those whose time it shares          what is new of it
//   lies within their time, and its words are a row of theirs     nothing
//   covers their time, and has all of their words in order        what it has between and around them
//   anything else                                                 all of it
//
// What a person says twice takes its time twice, and counts twice.

import { WORD, wordsOf } from "./echo.js";

/** @typedef {import("./transcript.js").Fragment} Fragment */

/** What of a fragment is not a repeat of these. @param {Fragment} fragment @param {Fragment[]} known @returns {Fragment[]} */
export function unrepeated(fragment, known) {
  const shared = known.filter((other) => other.startMs < fragment.endMs && fragment.startMs < other.endMs);
  const before = wordsOf(shared);
  const words = [...fragment.text.matchAll(WORD)];
  if (!before.length || !words.length) return [fragment];
  const [begins, ends] = [Math.min(...shared.map((f) => f.startMs)), Math.max(...shared.map((f) => f.endMs))];
  if (fragment.startMs >= begins && fragment.endMs <= ends && isRow(words, before)) return [];
  return fragment.startMs <= begins && fragment.endMs >= ends ? around(fragment, words, before) : [fragment];
}

/** @param {RegExpMatchArray} match @param {{word: string}} known */
function isSame(match, known) {
  return match[0].toLowerCase() === known?.word;
}

/** Whether these words stand there one after the other. @param {RegExpMatchArray[]} words @param {{word: string}[]} before */
function isRow(words, before) {
  return before.some((_, from) => words.every((word, n) => isSame(word, before[from + n])));
}

/**
 * The parts of a fragment that are not the words known of it; all of it if it has not all of those.
 * @param {Fragment} fragment @param {RegExpMatchArray[]} words @param {import("./echo.js").Word[]} before
 */
function around(fragment, words, before) {
  /** @type {Fragment[]} */
  const parts = [];
  let [known, from, startMs] = [0, 0, fragment.startMs];
  for (const match of [...words, null]) {
    const next = before[known];
    if (match && !isSame(match, next)) continue;
    if (!match && next) return [fragment];
    // Nothing can come between two words of one fragment.
    const inside = known > 0 && next && next.startMs < before[known - 1].endMs;
    const until = match ? match.index ?? 0 : fragment.text.length;
    const text = fragment.text.slice(from, until);
    const isNew = [...text.matchAll(WORD)].length > 0;
    if (isNew && inside) return [fragment];
    if (isNew) parts.push({ ...fragment, text, startMs, endMs: next?.startMs ?? fragment.endMs });
    if (match) [known, from, startMs] = [known + 1, until + match[0].length, next.endMs];
  }
  return parts;
}
