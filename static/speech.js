// What to say next, and when: one queue of pieces for the voice model. Pure.
//
//   piece      queued -> sent -> placed -> sounding -> quiet: said
//   send       when the voice and the user are quiet, since a commentary cuts the model off
//   said       when the voice has been heard and gone quiet, or a bound has passed: the
//              model may say nothing, and nothing on the wire marks an end
//
//   cut        the user talked over it and the voice gave way, or was told to be quiet: kept
//   kept       -> queued again when the user asks to go on
//   refused    too long for the model: sent once more as two halves, then given up
//   unheard    a result that never sounded, or that was told to be quiet before it began: it
//              is not said again in this session, but it was not told either
//
// What must stay true:
//
//   1. Each piece is sent once, unless the user asks to hear it again.
//   2. A question goes before results, results before progress, and while it is open both wait.
//      Newer progress and newer reminders replace older, results are never replaced.
//   3. What was cut off is said again only when the user asks for it.
//   4. No half ends within a character, joined emoji included.

/**
 * @typedef {{kind: "question" | "reminder" | "result" | "notice" | "progress", text: string,
 *   delegation: string | null, run: string | null, at: number, half?: boolean}} Piece
 *   `half`: it is one of a piece that was refused
 * @typedef {{id: string, piece: Piece, sentAt: number, placedAt: number | null, sounded: boolean,
 *   talkedOver: boolean, voiced: number}} Current
 *   `voiced`: so many characters of the voice's words came since it was placed
 * @typedef {{waiting: Piece[], current: Current | null, kept: Piece[], unheard: Piece[], last: Piece[],
 *   sounding: boolean, soundAt: number, userAt: number, freeAt: number}} Speech
 *   `kept`: results that were cut off; `last`: the newest answer that was begun, whole;
 *   `soundAt`: when the voice last began or ceased; `userAt`: when the user's words last
 *   came; `freeAt`: when the last piece was said
 */

// The meter calls the voice quiet after 400 ms.
const QUIET_MS = 300; // more of it, between two pieces
const BROKE_OFF_MS = 1500; // of it, when the voice stopped early
const USER_QUIET_MS = 800; // of the user, before the voice begins
const USER_PATIENCE_MS = 8000; // a noisy room must not hold an answer back for ever
const VOICE_PATIENCE_MS = 12000; // nor a voice that never stops
const PLACED_MS = 5000; // appends are placed within a second while audio flows
const SILENT_MS = 4000; // speech begins 1.0 to 1.5 s after its append is placed
const SLOWEST_MS_PER_CHAR = 120; // speech runs at 13 to 15 characters a second
const PIECES_KEPT = 100;
// The voice rewords a little: a piece of which so much was heard has been said.
const SAID_PART = 0.8;
const LONG_CHARS = 60; // nothing shorter is refused for its length

const ORDER = ["question", "reminder", "result", "notice", "progress"];
const REPLACED = ["reminder", "progress"];
const HELD = ["result", "progress"]; // while a question waits for its answer

/** @type {Speech} */
export const QUIET = {
  waiting: [], current: null, kept: [], unheard: [], last: [], sounding: false, soundAt: -1e9, userAt: -1e9, freeAt: -1e9,
};

/**
 * Put pieces into the queue.
 * @param {Speech} speech @param {Piece[]} pieces
 * @returns {Speech}
 */
export function enqueue(speech, pieces) {
  const newer = REPLACED.filter((kind) => pieces.some((piece) => piece.kind === kind));
  return { ...speech, waiting: ordered([...speech.waiting.filter((piece) => !newer.includes(piece.kind)), ...pieces]) };
}

/** @param {Piece[]} pieces */
function ordered(pieces) {
  return pieces.sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind)).slice(0, PIECES_KEPT);
}

/** Whether an answer more might push others out. @param {Speech} speech */
export function isFull(speech) {
  return speech.waiting.length > PIECES_KEPT / 2;
}

/** What is yet to be heard of an answer, and was not cut off. @param {Speech} speech @param {string} run @returns {Piece[]} */
export function leftOf({ current, waiting, unheard }, run) {
  return [...(current ? [current.piece] : []), ...waiting, ...unheard].filter((piece) => piece.kind === "result" && piece.run === run);
}

/** Forget waiting pieces. @param {Speech} speech @param {(piece: Piece) => boolean} unwanted @returns {Speech} */
export function forget(speech, unwanted) {
  return { ...speech, waiting: speech.waiting.filter((piece) => !unwanted(piece)) };
}

/** The voice began or ceased to sound. @param {Speech} speech @param {boolean} on @param {number} at @returns {Speech} */
export function sound(speech, on, at) {
  const current = speech.current && on ? { ...speech.current, sounded: true } : speech.current;
  return { ...speech, sounding: on, soundAt: at, current };
}

/** The model took a piece into its timeline. @param {Speech} speech @param {string | null} id @param {number} at @returns {Speech} */
export function placed(speech, id, at) {
  const current = speech.current;
  if (!current || current.placedAt !== null || (id !== null && id !== current.id)) return speech;
  // What the voice said before was its own.
  return { ...speech, current: { ...current, placedAt: at, sounded: speech.sounding } };
}

/** Words of the voice came. @param {Speech} speech @param {string} text @returns {Speech} */
export function voiced(speech, text) {
  const current = speech.current;
  if (!current || current.placedAt === null) return speech;
  return { ...speech, current: { ...current, voiced: current.voiced + text.length } };
}

/** Words of the user came. @param {Speech} speech @param {number} at @param {boolean} over they are more than a sound of listening @returns {Speech} */
export function listened(speech, at, over) {
  // Words come later than their sound: the voice may have given way before.
  const heard = speech.current?.sounded && (speech.sounding || speech.current.voiced > 0);
  const current = speech.current && heard && over ? { ...speech.current, talkedOver: true } : speech.current;
  return { ...speech, userAt: at, current };
}

/** Be quiet: what was to be said of results is kept, and a question still asked. @param {Speech} speech @returns {Speech} */
export function hush(speech) {
  const waiting = speech.waiting.filter((piece) => piece.kind === "question");
  return keep(miss({ ...speech, waiting, current: null }, unbegun(speech)), unsaid(speech, speech.waiting));
}

/** The results of which nothing was heard. @param {Speech} speech */
function unbegun({ current, waiting, last: [newest] }) {
  const silent = current && !current.sounded && current.piece.run === newest?.run && current.piece.text === newest.text;
  const results = [...(silent ? [current.piece] : []), ...waiting].filter((piece) => piece.kind === "result");
  return results.filter((piece) => silent || piece.run !== newest?.run);
}

/** These were not heard. @param {Speech} speech @param {Piece[]} pieces @returns {Speech} */
function miss(speech, pieces) {
  return { ...speech, unheard: [...speech.unheard, ...pieces].slice(-PIECES_KEPT) };
}

/** @param {Speech} speech @param {Piece[]} pieces @returns {Speech} */
function keep(speech, pieces) {
  const runs = new Set(pieces.map((piece) => piece.run));
  const earlier = speech.kept.filter((piece) => !runs.has(piece.run));
  return { ...speech, kept: [...pieces, ...earlier].slice(0, PIECES_KEPT) };
}

/** The results among these and before them the current piece, unless its answer waits to be said again as a whole. @param {Speech} speech @param {Piece[]} pieces */
function unsaid({ current, last }, pieces) {
  const results = pieces.filter((piece) => piece.kind === "result");
  const piece = current?.piece;
  const isWhole = results.some((other) => other.run === piece?.run && other.run === last[0]?.run && other.text === last[0].text);
  return piece?.kind === "result" && !isWhole ? [piece, ...results] : results;
}

/** Say what was kept last, after what leads to it. @param {Speech} speech @param {Piece[]} lead @param {number} at @returns {Speech} */
export function goOn(speech, lead, at) {
  const [first] = speech.kept;
  const newest = speech.kept.filter((piece) => piece.run === first?.run);
  return requeue({ ...speech, kept: speech.kept.filter((piece) => !newest.includes(piece)) }, [...lead, ...newest], at);
}

/** Say the last answer once more, from its beginning. @param {Speech} speech @param {number} at @returns {Speech} */
export function again(speech, at) {
  return requeue(without(speech, speech.last[0]?.run ?? null), speech.last, at);
}

/** Nothing of an answer waits, or is kept. @param {Speech} speech @param {string | null} run @returns {Speech} */
export function without(speech, run) {
  const others = (/** @type {Piece[]} */ pieces) => pieces.filter((piece) => piece.kind !== "result" || piece.run !== run);
  return { ...speech, kept: others(speech.kept), waiting: others(speech.waiting), unheard: others(speech.unheard) };
}

/** @param {Speech} speech @param {Piece[]} pieces @param {number} at @returns {Speech} */
function requeue(speech, pieces, at) {
  const asked = pieces.map((piece) => ({ ...piece, at }));
  const current = speech.current?.talkedOver ? null : speech.current;
  return { ...speech, current, waiting: ordered([...asked, ...speech.waiting]) };
}

/**
 * The model refused the current piece; if that may be for its length, its halves are sent.
 * @param {Speech} speech @param {boolean} long
 * @returns {[Speech, boolean]} and whether it is given up
 */
export function refused(speech, long) {
  const piece = speech.current?.piece;
  const texts = piece && long && !piece.half && piece.text.length >= LONG_CHARS ? halves(piece.text) : [];
  const free = { ...speech, current: null };
  // What is never taken is on the screen; after another fault it may be taken in the next session.
  if (!piece || texts.length < 2) return [piece?.kind === "result" && !long ? miss(free, [piece]) : free, true];
  const parts = texts.map((text) => ({ ...piece, text, half: true }));
  return [{ ...free, waiting: ordered([...parts, ...speech.waiting]) }, false];
}

// In this order: after a sentence, at a space, between two characters as people see them.
const SEAMS = [/(?<=[.!?…]["'”’)\]]*)\s+|(?<=[。！？؟])/gu, /\s+/gu];

/** A text in two, cut where it hurts least, near its middle. One character stays whole. @param {string} text @returns {string[]} */
export function halves(text) {
  const characters = [...new Intl.Segmenter().segment(text)].map(({ index }) => index).slice(1);
  const places = [...SEAMS.map((seam) => [...text.matchAll(seam)].map(({ index }) => index ?? 0)), characters];
  const far = (/** @type {number} */ at) => Math.abs(at - text.length / 2);
  for (const seams of places) {
    const at = seams.sort((a, b) => far(a) - far(b))[0];
    const parts = [text.slice(0, at).trim(), text.slice(at).trim()];
    // A cut in the last quarters would leave one half as long as the piece was.
    if (at !== undefined && (seams === characters || far(at) <= text.length / 4) && parts.every(Boolean)) return parts;
  }
  return [text];
}

/**
 * The piece to send at this moment, if there is one.
 * @param {Speech} speech @param {string} id for it @param {number} at
 * @param {boolean} [asking] a question waits for its answer
 * @returns {[Speech, Piece | null]}
 */
export function next(speech, id, at, asking = false) {
  if (speech.current && !isSaid(speech, speech.current, at)) return [speech, null];
  const free = finished(speech, at);
  const piece = free.waiting.find(({ kind }) => !asking || !HELD.includes(kind));
  if (!piece || !mayBegin(free, piece, at)) return [free, null];
  const waiting = free.waiting.filter((other) => other !== piece);
  const current = { id, piece, sentAt: at, placedAt: null, sounded: false, talkedOver: false, voiced: 0 };
  const begins = piece.kind === "result" && piece.run !== free.last[0]?.run;
  const last = begins ? [piece, ...waiting.filter((other) => isPart(other, piece))] : free.last;
  return [{ ...free, waiting, current, last }, piece];
}

/** @param {Piece} piece @param {Piece} other of the same answer? */
function isPart(piece, other) {
  return piece.kind === "result" && other.kind === "result" && piece.run === other.run;
}

/** The current piece is over: said, cut off, or never heard. @param {Speech} speech @param {number} at @returns {Speech} */
function finished(speech, at) {
  const { current, ...rest } = speech;
  if (!current) return speech;
  const free = { ...rest, current: null, freeAt: at };
  const { piece } = current;
  if (piece.kind !== "result") return free;
  const isVoiced = current.voiced >= SAID_PART * piece.text.length;
  // What sounds before its place in the timeline is something else.
  const sounded = current.sounded && current.placedAt !== null;
  if (!isVoiced && !sounded && !current.talkedOver) return miss(free, [piece]);
  const heard = { ...free, unheard: free.unheard.filter((other) => !isPart(other, piece) || other.text !== piece.text) };
  if (isVoiced || !current.talkedOver) return heard;
  const left = free.waiting.filter((other) => isPart(other, piece));
  return keep({ ...heard, waiting: free.waiting.filter((other) => !left.includes(other)) }, unsaid(speech, left));
}

/**
 * The session is over: what was sent and not heard waits again, unless the user talked over it.
 * @param {Speech} speech @param {number} at @param {boolean} asked it did not break off: a voice that had gone quiet had said it
 * @returns {Speech}
 */
export function ended(speech, at, asked) {
  const { current, sounding } = speech;
  const isHeard = !current || current.talkedOver || current.voiced >= SAID_PART * current.piece.text.length || (asked && current.sounded && !sounding);
  return isHeard ? finished(speech, at) : { ...speech, current: null, waiting: [current.piece, ...speech.waiting] };
}

/** @param {Speech} speech @param {Current} current @param {number} at */
function isSaid(speech, current, at) {
  if (current.placedAt === null) return at - current.sentAt > PLACED_MS;
  const since = at - current.placedAt;
  if (since > SILENT_MS + current.piece.text.length * SLOWEST_MS_PER_CHAR) return true;
  if (!current.sounded) return since > SILENT_MS;
  // A voice that broke off was interrupted, and the user's words come later than their sound.
  const brokeOff = current.voiced > 0 && !current.talkedOver && current.voiced < SAID_PART * current.piece.text.length;
  return !speech.sounding && at - speech.soundAt >= (brokeOff ? BROKE_OFF_MS : QUIET_MS);
}

/** @param {Speech} speech @param {Piece} piece @param {number} at */
function mayBegin(speech, piece, at) {
  const waited = at - Math.max(piece.at, speech.freeAt);
  const voiceQuiet = !speech.sounding && at - speech.soundAt >= QUIET_MS;
  const userQuiet = at - speech.userAt >= USER_QUIET_MS;
  return (voiceQuiet || waited > VOICE_PATIENCE_MS) && (userQuiet || waited > USER_PATIENCE_MS);
}
