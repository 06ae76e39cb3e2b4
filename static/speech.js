// What to say next, and when: one queue of pieces for the voice model. Pure.
//
//   piece      queued -> sent -> placed -> sounding -> quiet: said
//   send       when the voice and the user are quiet, since a commentary cuts the model off
//   said       when the voice has been heard and gone quiet, or a bound has passed: the
//              model may say nothing, and nothing on the wire marks an end
//
// Each piece is sent once. A question goes before results, results before progress. Newer
// progress replaces older, results are never replaced.

/**
 * @typedef {{kind: "question" | "result" | "notice" | "progress", text: string,
 *   delegation: string | null, run: string | null, at: number}} Piece
 * @typedef {{id: string, piece: Piece, sentAt: number, placedAt: number | null, sounded: boolean}} Current
 * @typedef {{waiting: Piece[], current: Current | null, sounding: boolean, soundAt: number,
 *   userAt: number, freeAt: number}} Speech   `soundAt`: when the voice last began or ceased;
 *   `userAt`: when the user's words last came; `freeAt`: when the last piece was said
 */

// The meter calls the voice quiet after 400 ms.
const QUIET_MS = 300; // more of it, between two pieces
const USER_QUIET_MS = 800; // of the user, before the voice begins
const USER_PATIENCE_MS = 8000; // a noisy room must not hold an answer back for ever
const VOICE_PATIENCE_MS = 12000; // nor a voice that never stops
const PLACED_MS = 5000; // appends are placed within a second while audio flows
const SILENT_MS = 4000; // speech begins 1.0 to 1.5 s after its append is placed
const SLOWEST_MS_PER_CHAR = 120; // speech runs at 13 to 15 characters a second
const PIECES_KEPT = 100;

const ORDER = ["question", "result", "notice", "progress"];

/** @type {Speech} */
export const QUIET = { waiting: [], current: null, sounding: false, soundAt: -1e9, userAt: -1e9, freeAt: -1e9 };

/**
 * Put pieces into the queue.
 * @param {Speech} speech @param {Piece[]} pieces
 * @returns {Speech}
 */
export function enqueue(speech, pieces) {
  const newer = pieces.some((piece) => piece.kind === "progress");
  const kept = newer ? speech.waiting.filter((piece) => piece.kind !== "progress") : speech.waiting;
  const waiting = [...kept, ...pieces].sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind));
  return { ...speech, waiting: waiting.slice(0, PIECES_KEPT) };
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

/**
 * The piece to send at this moment, if there is one.
 * @param {Speech} speech @param {string} id for it @param {number} at
 * @returns {[Speech, Piece | null]}
 */
export function next(speech, id, at) {
  if (speech.current && !isSaid(speech, speech.current, at)) return [speech, null];
  const free = { ...speech, current: null, freeAt: speech.current ? at : speech.freeAt };
  const [piece, ...waiting] = speech.waiting;
  if (!piece || !mayBegin(free, piece, at)) return [free, null];
  const current = { id, piece, sentAt: at, placedAt: null, sounded: false };
  return [{ ...free, waiting, current }, piece];
}

/** @param {Speech} speech @param {Current} current @param {number} at */
function isSaid(speech, current, at) {
  if (current.placedAt === null) return at - current.sentAt > PLACED_MS;
  const since = at - current.placedAt;
  if (since > SILENT_MS + current.piece.text.length * SLOWEST_MS_PER_CHAR) return true;
  if (!current.sounded) return since > SILENT_MS;
  return !speech.sounding && at - speech.soundAt >= QUIET_MS;
}

/** @param {Speech} speech @param {Piece} piece @param {number} at */
function mayBegin(speech, piece, at) {
  const waited = at - Math.max(piece.at, speech.freeAt);
  const voiceQuiet = !speech.sounding && at - speech.soundAt >= QUIET_MS;
  const userQuiet = at - speech.userAt >= USER_QUIET_MS;
  return (voiceQuiet || waited > VOICE_PATIENCE_MS) && (userQuiet || waited > USER_PATIENCE_MS);
}
