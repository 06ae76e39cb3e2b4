// Why it is quiet, and what the call costs, in words for the screen. Pure.

import * as meter from "./meter.js";
import { openQuestion, settling } from "./state.js";

/** @import { Run, State } from "./state.js" */

const ASKING_MS = 1000; // a microphone that is allowed already opens sooner
const OPENING_WORDS = { dialled: "Connecting…", renewed: "Renewing the call…", reopened: "Starting the call again…" };

/** @param {State} state @returns {string} */
export function statusOf(state) {
  const working = state.runs.findLast((run) => !run.result);
  const seconds = working ? Math.max(0, Math.round((state.now - working.since) / 1000)) : 0;
  const doing = working && workingWords(working, seconds);
  const isGone = state.phase === "live" && state.microphone === "gone";
  const unheard = isGone ? "Nobody hears you: the microphone is gone" : state.muted ? "You are muted" : "";
  const and = unheard && `. ${unheard}`;
  if (state.phase === "connecting") return connectingWords(state);
  if (state.phase === "closing") return "Hanging up…";
  if (state.phase === "live" && state.shakyAt !== null) return "The connection is shaky. Waiting for it to come back…";
  if (state.asleepAt !== null && !isGone) return pausedWords(state);
  if (openQuestion(state)) return `Hermes is waiting for your approval${state.phase === "live" ? and : ""}`;
  if (state.phase === "idle") return doing || "Off";
  if (state.speech.sounding && !state.silenced) return `Speaking${and}`;
  if (settling(state).length) return "Thinking…";
  if (doing) return `${doing}${and}`;
  if (isGone) return unheard;
  const muted = state.sessionId ? "Muted: nobody hears you, the call still costs" : "Muted: nobody hears you"; // a demo is free
  return state.muted ? muted : "Listening";
}

/** @param {State} state */
function connectingWords({ opening, microphone, dialledAt, now }) {
  if (microphone === "asked" && now - dialledAt > ASKING_MS) return "Waiting for the microphone. Allow it if the browser asks…";
  return OPENING_WORDS[opening];
}

/** @param {State} state */
function pausedWords(state) {
  if (state.speech.userAt > (state.asleepAt ?? 0)) return "Waking up…";
  const doing = state.muted ? "unmute and say something" : "say something";
  if (openQuestion(state)) return `Paused, and Hermes is waiting for your approval: answer here, or ${doing}`;
  const waits = state.speech.waiting.some((piece) => piece.kind === "result");
  return waits ? `Paused, and there is an answer: ${doing} to hear it` : `Paused to save money: ${doing} to go on`;
}

/** What the call costs so far or, until the next one, what it has cost. Where nothing is billed there are no words. @param {State} state */
export function costOf(state) {
  if (state.sessionId) return meter.words(state.meter, state.terms.prices, state.now);
  const bill = state.phase === "idle" && state.call ? meter.bill(state.meter, state.terms.prices) : "";
  return { ours: bill && `Call ended: ${bill}`, theirs: "" };
}

/** What a run is at. @param {Run} run @param {number} seconds so far */
export function workingWords(run, seconds) {
  if (run.state === "stopping") return "Stopping the task…";
  if (run.retries) return "hermes-voice cannot be reached at the moment. Still trying…";
  if (run.state === "starting") return "Passing the request on to Hermes…";
  if (run.state === "queued") return "Waiting for the task before to stop…";
  if (run.state === "unreachable") return "Hermes cannot be reached at the moment. Still trying…";
  return `Hermes is working, ${seconds} s`;
}
