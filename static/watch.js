// What a live session needs at this moment: renewing, ending, or a word about its trouble. Pure.
//
//   renewal    far -> sought (from 5 min before the end, in a quiet moment) -> due (1 min)
//   idle       nobody spoke, nothing ran -> over; a question or an answer on its way is no idleness
//   long run   Hermes works, the user has not spoken for long -> the line is given up for a while
//   media      flowing -> stuck (no audio leaves, and not for want of a microphone) or deaf (the
//              voice has words but no sound)
//   voice      unasked -> asked -> heard, or never heard
//
// What must stay true:
//
//   1. A renewal never comes into somebody's sentence, but for the last minute.
//   2. A clock that is wrong does not renew a session over and over: at least half of its
//      time is used.
//   3. Trouble is told once a session, and not while the connection is known to be broken.

/** @typedef {import("./state.js").State} State */
/**
 * @typedef {{sent: number, received: number, stuck: number, deaf: number, voiced: number,
 *   askedAt: number | null, told: string[]}} Flow
 *   bytes so far; `stuck`, `deaf`: measurements in a row without more of them; `voiced`: the
 *   voice's characters when the last audio came; `askedAt`: when it was first to say something
 */

const LIFETIME_MS = 7200000; // observed, for where the service's own word cannot be used
const CLOCK_MS = 60000; // that a good clock may be wrong
const SHORTEST_MS = 5000; // a session that ends sooner by its own word has not just begun
const SEEK_MS = 300000; // before the end
const HARD_MS = 60000; // before the end
const AGAIN_MS = 30000; // after a renewal that failed
const VOICE_QUIET_MS = 1500;
const USER_QUIET_MS = 3000;
const MEASUREMENTS = 3; // in a row, 2 s apart
const VOICE_MS = 12000; // from something to say until the voice must have been heard

/** @type {Flow} */
export const FLOWING = { sent: 0, received: 0, stuck: 0, deaf: 0, voiced: 0, askedAt: null, told: [] };

/**
 * How long a session that has just started lives.
 * @param {number | null} expiresAt in Unix seconds, by the service's clock
 * @param {number | undefined} wallMs the same moment by ours
 */
export function lifetime(expiresAt, wallMs) {
  const left = (expiresAt ?? NaN) * 1000 - (wallMs ?? NaN);
  return left >= SHORTEST_MS && left <= LIFETIME_MS + CLOCK_MS ? left : LIFETIME_MS;
}

/** Whether nobody speaks and nothing is about to be said. @param {State} state */
export function isQuiet(state) {
  const { sounding, soundAt, userAt, current, waiting } = state.speech;
  const spoken = state.now - soundAt < VOICE_QUIET_MS || state.now - userAt < USER_QUIET_MS;
  const open = state.runs.some((run) => run.claim === "asked" || (run.question && run.question.stage !== "closed"));
  const handing = state.delegations.some((d) => d.state === "settling" || d.state === "captured");
  return !sounding && !spoken && !current && !waiting.length && !open && !handing;
}

/** Whether the session is to be renewed at this moment. @param {State} state */
export function mustRenew(state) {
  if (state.renewal || (state.renewals && state.now - state.triedAt < AGAIN_MS)) return false;
  const half = state.liveAt + (state.expiresAt - state.liveAt) / 2;
  if (state.now >= Math.max(state.expiresAt - HARD_MS, half)) return state.renewals < 2;
  return state.renewals < 1 && state.now >= Math.max(state.expiresAt - SEEK_MS, half) && isQuiet(state);
}

/** Whether the call is over because nobody speaks. @param {State} state */
export function isIdle(state) {
  if (state.now - state.heardAt < state.idleMs || state.runs.some((run) => !run.result)) return false;
  // What waits for a line that is asleep is on the screen, and is told in the next call.
  return state.asleepAt !== null || !state.speech.waiting.length;
}

/** Whether a run has gone on for so long without a word of the user that the call is not worth its price. @param {State} state */
export function isLongRun(state) {
  const working = state.runs.filter((run) => !run.result);
  if (state.terms.onLongRun !== "hang_up" || !working.length) return false;
  const since = Math.max(state.liveAt, state.speech.userAt, ...state.runs.map((run) => run.at), ...working.map((run) => run.since));
  return state.now - since >= state.terms.longRunMs && isQuiet(state);
}

/** Whether something waits for the user's ear. @param {State["runs"][number]} run */
export function isOwed(run) {
  const open = run.question && run.question.stage !== "closed" && !run.result;
  return !!open || ["due", "asked", "mine"].includes(run.claim);
}

/**
 * A measurement of the audio that has passed.
 * @param {Flow} flow @param {{sent: number, received: number}} measured in bytes
 * @param {number} voiced characters that the voice has said
 * @returns {Flow}
 */
export function measure(flow, measured, voiced) {
  const came = measured.received > flow.received;
  return {
    ...flow,
    ...measured,
    stuck: measured.sent > flow.sent ? 0 : flow.stuck + 1,
    deaf: came || voiced === flow.voiced ? 0 : flow.deaf + 1,
    voiced: came ? voiced : flow.voiced,
  };
}

/** How much the voice has said in this session. @param {State} state */
export function voicedOf(state) {
  const lines = state.transcript.lines.filter((line) => line.speaker === "assistant" && line.session === state.attempt);
  return lines.reduce((sum, line) => sum + line.fragments.reduce((length, f) => length + f.text.length, 0), 0);
}

/** @type {Record<string, string>} */
const TROUBLES = {
  stuck: "No sound from your microphone reaches OpenAI. Check the microphone and the network, then hang up and start the call again.",
  deaf: "The voice speaks, but its sound does not arrive here. Its words are on the screen. Hang up and start the call again.",
  silent: "The voice has not answered. Answers are on the screen. Hang up and start the call again to hear them.",
};

/**
 * What is wrong with the sound and was not told yet.
 * @param {State} state
 * @returns {[Flow, string]} and the words for it, empty for nothing
 */
export function troubleOf(state) {
  const { flow, speech } = state;
  const heard = speech.soundAt > state.liveAt || voicedOf(state) > 0;
  const asked = flow.askedAt === null && speech.current ? { ...flow, askedAt: state.now } : flow;
  const isExcused = state.shakyAt !== null || state.asleepAt !== null || state.microphone === "gone" || state.renewal;
  if (isExcused) return [{ ...asked, stuck: 0, deaf: 0 }, ""];
  const silent = !heard && asked.askedAt !== null && state.now - asked.askedAt > VOICE_MS;
  const found = flow.stuck >= MEASUREMENTS ? "stuck" : flow.deaf >= MEASUREMENTS ? "deaf" : silent ? "silent" : "";
  if (!found || asked.told.includes(found)) return [asked, ""];
  return [{ ...asked, told: [...asked.told, found] }, TROUBLES[found]];
}
