// When the words of a delegation are complete, by their times and their punctuation. Pure.
//
//   what is known of the newest words                       quiet until they count
//   none came, or none as late as the delegation's place    none: 2.5 s at most
//   a hole between two of the last: a word may be late      600 ms
//   the end is open: a comma, "and", "um"                   600 ms
//   the end is a sentence's                                 250 ms
//   nothing more, where earlier words came without marks    1.5 times the longest pause between
//                                                           two arrivals, 300 to 600 ms
//   nothing more: a mark, or more words, may come           600 ms
//
// Whatever the words are, they are given 2.5 s from the delegation at most.

import { endsSentence, isSound } from "./transcript.js";

/** @typedef {import("./transcript.js").Fragment} Fragment */

const MOST_MS = 2500;
const OPEN_MS = 600;
const ENDED_MS = 250;
const LEAST_MS = 300;
const PACE = 1.5; // of the longest pause between arrivals so far
const HOLE_MS = 400; // of nothing between two fragments, which come in steps of 200 ms
const RECENT = 4; // fragments that a late one may still belong between

const OPEN = /(?:[,;:–—、،-]|(?<![\p{L}])(?:and|or|but|then|the|a|an|to|of|in|for|with|my|is|uh|um|er|und|oder|aber|dann|der|die|das|ein|eine|zu|mit|äh|ähm|et|ou|le|la|les|de|y|o|el))$/iu;

/** Whether the words that a delegation is about have not come. @param {Fragment[]} heard all of the user's, of its session @param {number | null} placeMs */
export function areLate(heard, placeMs) {
  return placeMs !== null && heard.every((fragment) => fragment.endMs <= placeMs);
}

/** Whether this speaker's sentences come with marks, as far as is known. @param {Fragment[]} heard */
export function haveMarks(heard) {
  return !heard.some((fragment) => fragment.batch > 0) || heard.some((fragment) => /[.!?…。！？؟।]/u.test(fragment.text));
}

/**
 * The time at which the words count as complete, if nothing else comes.
 * @param {Fragment[]} words the newest that were not handed over, oldest first
 * @param {number} at when they were delegated
 * @param {boolean} late
 * @param {boolean} marked sentences come with marks
 */
export function dueAt(words, at, late, marked) {
  // "Mhm" is no part of what is asked.
  const asking = words.filter(({ text }) => OPEN.test(text.trim()) || !isSound(text));
  if (!asking.length || late) return at + MOST_MS;
  const came = Math.max(at, ...asking.map((fragment) => fragment.at));
  return Math.min(at + MOST_MS, came + quietMs(asking, marked));
}

/** @param {Fragment[]} words @param {boolean} marked */
function quietMs(words, marked) {
  const text = words.map((fragment) => fragment.text).join("").trim();
  const recent = words.slice(-RECENT);
  const hole = recent.some((fragment, n) => n > 0 && fragment.startMs - recent[n - 1].endMs >= HOLE_MS);
  if (hole || OPEN.test(text)) return OPEN_MS;
  if (endsSentence(text)) return ENDED_MS;
  if (marked) return OPEN_MS;
  const arrivals = words.map((fragment) => fragment.at).sort((a, b) => a - b);
  const pauses = arrivals.slice(1).map((arrival, n) => arrival - arrivals[n]);
  return pauses.length ? Math.min(OPEN_MS, Math.max(LEAST_MS, PACE * Math.max(...pauses))) : OPEN_MS;
}
