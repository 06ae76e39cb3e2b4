// Which of the user's words are the voice's own, come back from the loudspeaker. Pure.
//
//   the first words of an utterance repeat the voice's       echo, if the utterance began
//   three or more                                            before the voice's last word was over
//                                                            (400 ms for the way back), or each
//                                                            comes within 1.2 s of its original
//   all of them, though fewer                                well before that, or while the voice
//                                                            goes on, within 2 s
//   not quite: four in five of at least five, in order       as three or more
//
// What a person repeats on purpose comes after the voice has ended, and counts.
//
// One word may be an echo and is not proven to be one: the voice ends with "yes or no?", and
// "no" comes before its way back is over. It is neither an echo nor an answer.

/** @typedef {{text: string, startMs: number, endMs: number}} Said */
/** @typedef {{word: string, startMs: number, endMs: number, to: number}} Word `to`: the fragment in which it ends */

const WINDOW_MS = 8000;
const WAY_BACK_MS = 400;
const LOCKED_MS = 1200;
const FEW_MS = 2000;
const GRID_MS = 200; // the steps in which times come: a quick answer may seem to begin too early
const GOES_ON_MS = 400; // a voice that is talked over stops
const MANY = 3;
const ONE_WORD_BACK_MS = 800; // seen with loudspeakers across a room
const ONE_WORD_CHARS = 4; // of a script that sets no words apart
const GARBLED_LEAST = 5;
const GARBLED_PART = 0.8;
const NO_SPACES = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]$/u;
// Where words are not set apart, characters serve.
export const WORD = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]|[\p{L}\p{M}\p{N}']+?(?=[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]|[^\p{L}\p{M}\p{N}']|$)/gu;

/** A text's words with their times, in lower case. @param {Said[]} fragments @returns {Word[]} */
export function wordsOf(fragments) {
  const ends = fragments.map((_, n) => fragments.slice(0, n + 1).reduce((sum, { text }) => sum + text.length, 0));
  const text = fragments.map((fragment) => fragment.text).join("");
  return [...text.matchAll(WORD)].map((match) => {
    const from = ends.findIndex((end) => end > match.index);
    const to = ends.findIndex((end) => end >= match.index + match[0].length);
    // Only now: some letters are longer in lower case.
    return { word: match[0].toLowerCase(), startMs: fragments[from].startMs, endMs: fragments[to].endMs, to };
  });
}

/**
 * How many fragments at the beginning of an utterance are an echo.
 * @param {Said[]} utterance
 * @param {Said[]} voiced what the voice said, up to and around it
 */
export function echoLength(utterance, voiced) {
  const words = wordsOf(utterance);
  if (!words.length) return 0;
  const begins = words[0].startMs;
  const said = wordsOf(voiced).filter(({ startMs }) => begins - startMs <= WINDOW_MS);
  const before = said.filter(({ startMs }) => startMs <= begins);
  if (!before.length) return 0;
  const over = begins - Math.max(...before.map(({ endMs }) => endMs));
  const goesOn = said.some(({ startMs }) => startMs - begins >= GOES_ON_MS);
  const repeated = Math.max(0, ...before.map((_, from) => matching(words, said, from, over, goesOn)));
  const whole = words.length >= GARBLED_LEAST && over <= WAY_BACK_MS && wordsInOrder(words, said) >= GARBLED_PART * words.length;
  const count = whole ? words.length : repeated;
  if (count === words.length) return utterance.length;
  return count ? words[count - 1].to + 1 - (words[count].to === words[count - 1].to ? 1 : 0) : 0;
}

/** So many words are those of the voice from one of its words on; 0 if that may be chance. @param {Word[]} words @param {Word[]} said @param {number} from @param {number} over @param {boolean} goesOn */
function matching(words, said, from, over, goesOn) {
  let count = 0;
  while (count < words.length && words[count].word === said[from + count]?.word) count += 1;
  const delays = words.slice(0, count).map((word, n) => word.startMs - said[from + n].startMs);
  const within = (/** @type {number} */ most) => delays.every((delay) => delay >= 0 && delay <= most);
  const many = count >= MANY && (over <= WAY_BACK_MS || within(LOCKED_MS));
  const few = count === words.length && (over < -GRID_MS || goesOn) && within(FEW_MS);
  return many || few ? count : 0;
}

/** The most words that both have in the same order. @param {Word[]} words @param {Word[]} said */
export function wordsInOrder(words, said) {
  let row = said.map(() => 0);
  for (const { word } of words) {
    let corner = 0;
    row = row.reduce((/** @type {number[]} */ next, above, n) => {
      next.push(word === said[n].word ? corner + 1 : Math.max(above, next[n - 1] ?? 0));
      corner = above;
      return next;
    }, []);
  }
  return row[row.length - 1] ?? 0;
}

/**
 * Whether an utterance is one word that the voice has just said, so soon that it may be its echo.
 * @param {Said[]} utterance
 * @param {Said[]} voiced
 */
export function mayBeEcho(utterance, voiced) {
  const words = wordsOf(utterance);
  const said = wordsOf(voiced);
  const isOne = words.length === 1 || (words.length <= ONE_WORD_CHARS && words.every(({ word }) => NO_SPACES.test(word)));
  return isOne && said.some((first, from) => {
    const last = said[from + words.length - 1];
    const isSame = words.every(({ word }, n) => bare(word) === bare(said[from + n]?.word ?? ""));
    return isSame && words[0].startMs >= first.startMs - GRID_MS && words[0].startMs <= last.endMs + ONE_WORD_BACK_MS;
  });
}

/** Accents are heard or not. @param {string} word */
function bare(word) {
  return word.replaceAll("ı", "i").normalize("NFD").replace(/[\u0300-\u036f]/g, "");
}
