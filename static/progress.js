// What is said aloud of work that goes on, and when. Pure.
//
//   setting   first after   then after
//   off       never
//   quiet     60 s          never
//   normal    8 s           30 s, 60 s, 120 s and so on
//   chatty    5 s           15 s each
//
// What is said is what Hermes or the server has told, in the words for it; never more. Two
// sentences in a row are never the same.

/** @typedef {"off" | "quiet" | "normal" | "chatty"} Pace */

/** @type {Record<Pace, {firstMs: number, againMs: (times: number) => number}>} */
const PACES = {
  off: { firstMs: Infinity, againMs: () => Infinity },
  quiet: { firstMs: 60000, againMs: () => Infinity },
  normal: { firstMs: 8000, againMs: (times) => 15000 * 2 ** times },
  chatty: { firstMs: 5000, againMs: () => 15000 },
};

/** When something is to be said next. @param {Pace} pace @param {{since: number, saidAt: number, saidTimes: number}} run */
export function sayAt(pace, { since, saidAt, saidTimes }) {
  const { firstMs, againMs } = PACES[pace] ?? PACES.normal;
  return saidTimes ? saidAt + againMs(saidTimes) : since + firstMs;
}

/** @param {number} seconds */
function spokenTime(seconds) {
  if (seconds < 60) return `${seconds} seconds`;
  const minutes = Math.floor(seconds / 60);
  return minutes === 1 ? "over a minute" : `over ${minutes} minutes`;
}

/** @type {((doing: string, time: string) => string)[]} */
const PHRASES = [
  (doing, time) => `Hermes is still working on it${doing}. That is ${time} so far.`,
  (doing, time) => `It is not done yet${doing}. It has been ${time}.`,
  (doing, time) => `This takes a while: ${time} so far${doing}.`,
];

/** What to say of a run that works. @param {string} doing may be empty @param {number} seconds @param {number} times it was said before */
export function progressWords(doing, seconds, times) {
  return PHRASES[times % PHRASES.length](doing && `: ${doing.replace(/[.…\s]+$/, "")}`, spokenTime(seconds));
}

/** What to say of one that waits. @param {string} words the state it is in @param {number} seconds @param {number} times */
export function waitingWords(words, seconds, times) {
  const time = spokenTime(seconds);
  return times % 2 ? `After ${time}: ${words}` : `${words} That is ${time} so far.`;
}
