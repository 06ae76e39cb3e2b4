// The voice at the other end: what it is given to say, and when it is told to be quiet. Pure.
//
//   speech.js is the queue; here its next piece is sent, when the line can bear it.

import { askedAloud } from "./questions.js";
import { titleOf } from "./runs.js";
import * as speech from "./speech.js";
import { answerable, chain, doing, isHeld, known, note, notify, openQuestion, questionChanged } from "./state.js";
import { commentary } from "./wire.js";

/** @import { Effect, EventRule, Rule, State, Step } from "./state.js" */

const CUT_OFF = "The user talked over you. The rest of that answer is kept: it comes when they ask to go on.";

/** Send what may be said at this moment. @param {State} state @param {Effect[]} effects @returns {Step} */
export function pump(state, effects) {
  // Over a broken connection it might be lost, and nobody would know.
  if (state.phase !== "live" || state.shakyAt !== null || isHeld(state)) return [state, effects];
  const id = `say_${state.attempt}_${state.counter}`;
  const [next, piece] = speech.next(state.speech, id, state.now, !!answerable(state));
  const moved = next === state.speech ? state : { ...state, speech: next };
  const [after, notes] = next.kept === state.speech.kept ? [moved, []] : note(moved, CUT_OFF, null);
  if (!piece) return [after, [...effects, ...notes]];
  const unmuted = state.silenced ? [{ do: "silence", on: false }] : [];
  const send = { do: "send", message: commentary(id, piece.text, known(state, piece.delegation)) };
  const sent = { ...after, counter: after.counter + 1, silenced: false };
  const asks = piece.kind === "question" || piece.kind === "reminder";
  const told = asks ? questionChanged(sent, piece.run, { sentAs: id, sentWords: piece.text }) : sent;
  return [told, [...effects, ...notes, ...unmuted, send]];
}

/** An append has its place in the timeline. @type {EventRule} */
export function placed(state, event) {
  const id = event.sent ?? state.speech.current?.id;
  const next = { ...state, speech: speech.placed(state.speech, event.sent, state.now) };
  return [askedAloud(next, id, event.endMs), []];
}

/** The model refused something we sent. @type {EventRule} */
export function refused(state, event) {
  const current = state.speech.current;
  if (!current || event.sent !== current.id) return [state, []];
  const [left, givenUp] = speech.refused(state.speech, event.code === "invalid_value");
  const next = { ...state, speech: left };
  return [givenUp ? notify(next, "error", "The voice could not say something. It is on the screen.") : next, []];
}

/** The voice began or ceased to sound. @type {EventRule} */
export function sound(state, event) {
  const next = { ...state, speech: speech.sound(state.speech, event.on, state.now), heardAt: state.now };
  if (event.on || !state.silenced) return [next, []];
  return [unasked({ ...next, silenced: false }), [{ do: "silence", on: false }]];
}

/** Nobody heard the question, which is not asked anew against the user's wish. @param {State} state @returns {State} */
function unasked(state) {
  return questionChanged(state, openQuestion(state)?.key ?? null, { placeMs: null });
}

/** Silence at once; the work goes on. @type {Rule} */
export function stopSpeaking(state) {
  const silent = unasked({ ...state, silenced: true, speech: speech.hush(state.speech) });
  return chain(silent, doing({ do: "silence", on: true }), (s) => note(s, "The user wants you to be quiet until they speak again.", null));
}

/** The user said "stop" to the voice, which has mostly given way by now. What it began since is its answer to that. @type {Rule} */
export function giveWay(state) {
  const quiet = { ...state, speech: speech.hush(state.speech) };
  const { sounding, soundAt, userAt } = state.speech;
  return sounding && soundAt <= userAt ? [{ ...quiet, silenced: true }, [{ do: "silence", on: true }]] : [quiet, []];
}

/** Say the rest of what was cut off. @type {Rule} */
export function goOn(state) {
  const first = state.speech.kept[0];
  const run = state.runs.find((r) => r.key === first?.run);
  const title = run ? titleOf(state, run) : "";
  const lead = title && !first.text.startsWith(title) ? [{ ...first, text: title }] : [];
  return [{ ...state, speech: speech.goOn(state.speech, lead, state.now) }, []];
}

/** Say the last answer once more. @type {Rule} */
export function sayAgain(state) {
  return [{ ...state, speech: speech.again(state.speech, state.now) }, []];
}
