// Words that came soon after a question closed, and may be an answer that is too late. Pure.
//
//   asked       the server is asked whether they answer it; the words wait
//   an answer   told as late, and no run
//   none        a request after all; handed over at once, if the call they came in is over

import { delegate } from "./runs.js";
import { assign, noteAll, notify, questionChanged, say, unsay } from "./state.js";
import * as transcript from "./transcript.js";

/** @import { EventRule, State, Step } from "./state.js" */

const LATE_MS = 10000; // after a question closed, words may still be meant for it
const LATE_CHARS = 100; // the server takes no longer answer
const TOO_LATE = "That answer came too late: the question had run out of time, so Hermes did not do it. Ask for it again if you still want it.";

/** Words that came soon after a question closed may be meant for it: the server knows. @param {State} state @param {string[]} ids @returns {Step | null} */
export function lateAnswer(state, ids) {
  const heard = transcript.newestWords(state.transcript, state.attempt);
  const { userAt } = state.speech;
  const run = state.runs.findLast(({ runId, question: q }) => runId && q?.stage === "closed" && userAt >= q.at && userAt - q.closedAt < LATE_MS);
  if (!run?.question || !heard || heard.length > LATE_CHARS || state.late || !state.voiceApprovals) return null;
  const newest = transcript.newest(state.transcript, state.attempt);
  const [handed, batch] = transcript.hand(state.transcript, (f) => newest.includes(f));
  const { requestId } = run.question;
  const next = { ...assign(state, ids, "captured", null), transcript: handed, late: { key: run.key, requestId, batch, ids } };
  return [next, [{ do: "approve", key: run.key, runId: run.runId, requestId, heard, late: true }]];
}

/** What the server says of them. @type {EventRule} */
export function answeredLate(state, event) {
  const late = state.late;
  if (!late || late.requestId !== event.requestId) return [state, []];
  const isAnswer = event.code === "too_late" || event.choice;
  const outcome = state.runs.find((r) => r.key === late.key)?.question?.outcome;
  // Once looked at, words after this question are what they are.
  const over = questionChanged({ ...state, late: null, actedAt: state.now }, late.key, { closedAt: -1e9 });
  if (!isAnswer) {
    const unasked = { ...over, transcript: transcript.takeBack(over.transcript, [late.batch]) };
    const isOver = late.ids.length > 0 && !state.delegations.some((d) => late.ids.includes(d.id));
    return isOver ? delegate(unasked, late.ids[0], []) : [assign(unasked, late.ids, "settling", null), []];
  }
  const released = assign(over, late.ids, "answered", null);
  if (outcome === "timeout") {
    const fresh = unsay(released, (piece) => piece.kind === "notice" && piece.run === late.key);
    const last = late.ids.at(-1) ?? null;
    return noteAll(say(fresh, "notice", [TOO_LATE], last, late.key), "The user's answer came too late.", late.ids.slice(0, -1));
  }
  const told = outcome === "run_ended" ? "That answer came too late: the task has ended." : "Hermes's question was already answered.";
  return noteAll(notify(released, "info", told), told, late.ids);
}
