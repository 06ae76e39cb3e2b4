// What a call costs by the wall clock, what the service says, and how long it may go on. Pure.
//
//   session    begun -> awake <-> asleep -> over; a call may have several
//   cap        far -> told 5 min before -> told 1 min before -> reached
//
// What must stay true:
//
//   1. A call's time is the sum of its sessions'; each moment is active or standby, not both.
//   2. What the service counts is shown beside it, never mixed with it.
//   3. A warning is given once; one that came too late for its time tells the time left.

const WARN_MS = [300000, 60000];
const LAST_MS = 2000; // of a cap, for a clean end before the server hangs up

/**
 * @typedef {{since: number | null, asleep: boolean, activeMs: number, standbyMs: number,
 *   counted: Count, countedBefore: Count, endsAt: number | null, told: number}} Meter
 *   `since`: up to when an open session is in `activeMs` and `standbyMs`; `counted`: what the
 *   service says of it, `countedBefore` of the sessions before; `endsAt`: when the
 *   call's or the day's cap is reached; `told`: the last warning that was given
 * @typedef {{seconds: number, paused: number}} Count   `paused`: so many of the seconds
 * @typedef {{active: number, standby: number, currency: string}} Prices   for a minute
 */

/** @type {Meter} */
export const NOTHING = { since: null, asleep: false, activeMs: 0, standbyMs: 0, counted: { seconds: 0, paused: 0 }, countedBefore: { seconds: 0, paused: 0 }, endsAt: null, told: Infinity };

/** @param {Meter} meter @param {number} at @returns {Meter} */
function upTo(meter, at) {
  if (meter.since === null) return meter;
  const ms = Math.max(0, at - meter.since);
  const { activeMs, standbyMs, asleep } = meter;
  return { ...meter, since: at, activeMs: activeMs + (asleep ? 0 : ms), standbyMs: standbyMs + (asleep ? ms : 0) };
}

/** A session has started. @param {Meter} meter @param {number} at @returns {Meter} */
export function begin(meter, at) {
  return { ...upTo(meter, at), since: at, asleep: false };
}

/** It was paused, or is awake again. @param {Meter} meter @param {boolean} asleep @param {number} at @returns {Meter} */
export function sleep(meter, asleep, at) {
  return { ...upTo(meter, at), asleep };
}

/** It is over. @param {Meter} meter @param {number} at @returns {Meter} */
export function end(meter, at) {
  const over = upTo(meter, at);
  return { ...over, since: null, asleep: false, counted: NOTHING.counted, countedBefore: countOf(over) };
}

/** What the service says of the open session. @param {Meter} meter @param {number | null} seconds @param {number | null} [paused] @returns {Meter} */
export function count(meter, seconds, paused) {
  return seconds === null ? meter : { ...meter, counted: { seconds, paused: paused ?? 0 } };
}

/** What the service says of the call. @param {Meter} meter @returns {Count} */
function countOf({ counted, countedBefore }) {
  return { seconds: countedBefore.seconds + counted.seconds, paused: countedBefore.paused + counted.paused };
}

/** How long the call may go on. @param {Meter} meter @param {number | null | undefined} seconds @param {number} at @returns {Meter} */
export function allow(meter, seconds, at) {
  if (seconds === undefined || seconds === null) return { ...meter, endsAt: null, told: Infinity };
  return { ...meter, endsAt: at + seconds * 1000, told: seconds * 1000 > WARN_MS[0] ? Infinity : meter.told };
}

/**
 * The warning that is due, if one is.
 * @param {Meter} meter @param {number} at
 * @returns {[Meter, string]} and its time in words, empty for none
 */
export function warn(meter, at) {
  const left = meter.endsAt === null ? Infinity : meter.endsAt - at;
  const due = WARN_MS.findLast((ms) => left <= ms && ms < meter.told);
  if (due === undefined || left <= 0) return [meter, ""];
  const minutes = Math.max(1, Math.round(left / 60000));
  const words = left < 45000 ? "less than a minute" : minutes === 1 ? "one minute" : `${minutes} minutes`;
  return [{ ...meter, told: due }, words];
}

/** Whether the cap is reached. @param {Meter} meter @param {number} at */
export function isUsedUp(meter, at) {
  return meter.endsAt !== null && at >= meter.endsAt - LAST_MS;
}

/**
 * The time and the price so far, in words.
 * @param {Meter} meter @param {Prices} prices @param {number} at
 * @returns {{ours: string, theirs: string}} by the wall clock, and by the service's count
 */
export function words(meter, prices, at) {
  const { activeMs, standbyMs } = upTo(meter, at);
  const theirs = countOf(meter);
  return {
    ours: `${spent(activeMs + standbyMs, standbyMs)} · ${price(activeMs, standbyMs, prices)}`,
    theirs: theirs.seconds ? ` · OpenAI: ${spent(theirs.seconds * 1000, theirs.paused * 1000)}` : "",
  };
}

/** What a call that is over took, in words; empty if it took nothing. @param {Meter} meter @param {Prices} prices */
export function bill({ activeMs, standbyMs }, prices) {
  const seconds = Math.round((activeMs + standbyMs) / 1000);
  const time = seconds < 60 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
  return seconds ? `${time}, about ${price(activeMs, standbyMs, prices)}` : "";
}

/** @param {number} activeMs @param {number} standbyMs @param {Prices} prices */
function price(activeMs, standbyMs, { active, standby, currency }) {
  const unit = /\p{L}$/u.test(currency) ? `${currency} ` : currency;
  return `${unit}${((activeMs * active + standbyMs * standby) / 60000).toFixed(2)}`;
}

/** @param {number} ms @param {number} pausedMs so many of them */
function spent(ms, pausedMs) {
  return pausedMs >= 1000 ? `${clock(ms)} (${clock(pausedMs)} paused)` : clock(ms);
}

/** @param {number} ms */
function clock(ms) {
  const seconds = Math.floor(ms / 1000);
  return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}
