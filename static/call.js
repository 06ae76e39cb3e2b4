// The call: one reducer, `step(state, event) -> [state, effects]`. Pure.
//
// Events carry `at`, the time in milliseconds; those of a session carry its `attempt`, so
// that whatever comes late from an older one is recognised. Effects are plain objects that
// app.js carries out; their results come back as events.
//
//   phase       means                                  left by
//   idle        no session                             dial, a planned call -> connecting
//   connecting  microphone, offer, answer under way    started -> live; hangUp, 25 s from the open
//                                                      microphone, and whatever fails -> idle
//   live        session.started came                   hangUp, left, and in time -> closing; lost,
//                                                      closed, an error that ends it, 8 s without
//                                                      a line -> idle
//     asleep      paused by the service                resumed
//     renewal     the next session is being opened     its start, or the end of this -> connecting
//   closing     session.close sent, or the page left   closed, lost, 5 s, returned -> idle
//
// What happens then is told in six modules, each with the states of its own at its door:
//
//   session.js    the session's life: opened, renewed, asleep, ended
//   words.js      what the user says: a request, an answer, or a command
//   runs.js       what Hermes works on, and its answer, told once
//   questions.js  what Hermes asks before it goes on
//   late.js       words that may be an answer too late
//   voice.js      what the voice is given to say, and when
//
// What must stay true:
//
//   1. Nothing is sent before `started`, after `session.close`, or once the page was left.
//   2. Every delegation gets one answer, with its own id, on the connection that made it.
//   3. A word is handed over once, or again as a part of a sentence that a late word corrects.
//      What was not done goes along with nothing: it is repeated by the user only.
//   4. Runs outlive sessions: an update is a rule in every phase.
//   5. A spoken answer to a question is an utterance that began when this question was the newest
//      thing the voice had been heard saying; a click or a key that was on its way when the
//      question came is none.
//   6. A result is told by one page at a time: the one that has the claim to it. Sent is not
//      spoken: what was not heard of it is told in the next session, here or on another page.
//   7. A session that connects after the user hung up is closed, not ignored.
//   8. To a line that is asleep, or about to be replaced, only mute and close are sent.
//   9. No session is opened but by the user, for a renewal, or after a planned hang-up.
//  10. What the user has asked for is handed over before the call ends.
//  11. Words that answer a question that is closed become no run; words that a question took and
//      that are no answer become one.
//  12. A command becomes no run, whether the model hands it over or not; nor does "stop" where
//      nothing runs, nor thanks.
//  13. What the user says or types is handed over whole, or refused with the reason.

import { answeredLate } from "./late.js";
import * as questions from "./questions.js";
import * as runs from "./runs.js";
import * as session from "./session.js";
import { chain, each, keep, notify, START, whileLive } from "./state.js";
import * as voice from "./voice.js";
import * as words from "./words.js";

/** @import { EventRule, Rule, State, Step } from "./state.js" */
/** @import { Event } from "./wire.js" */

export { START };

/** @type {Record<string, EventRule>} */
const ALWAYS = {
  configured,
  set: (state, e) => [{ ...state, progress: e.progress ?? state.progress }, []],
  agreed: (state, e) => [{ ...state, terms: e.terms }, []],
  recalled: words.recalled,
  leave: (state) => chain(state, whileLive(words.handOverAll), words.handLeftNow, keep), // for another conversation
  left: (state) => chain(state, whileLive(words.handOverAll), words.handLeftNow, keep, session.leave),
  returned: session.comeBack,
  notKept: words.notKept,
  typed: words.typed,
  mute: session.mute,
  listed: runs.listed,
  update: runs.update,
  silent: runs.silent,
  polled: runs.polled,
  streamEnded: runs.streamEnded,
  claimed: runs.claimed,
  confirmed: runs.confirmed,
  stopRun: runs.stopRun,
  retry: runs.retry,
  refused: runs.refused,
  approve: questions.approve,
  answered: (state, e) => (e.late ? answeredLate : questions.answered)(state, e),
  notice: (state, e) => [notify(state, e.level, e.text), []],
  tick,
};

/** @type {Record<string, Record<string, EventRule>>} */
const TABLE = {
  idle: { ...ALWAYS, dial: session.dial, opened: session.late },
  connecting: {
    ...ALWAYS, opened: session.opened, started: session.started, failed: session.failed, lost: session.lost, closed: session.lost,
    trouble: session.troubled, hangUp: session.abandon,
    microphoneOpened: session.microphoneOpened, microphoneEnded: session.microphoneEnded,
  },
  live: {
    ...ALWAYS, hangUp: ending(session.close, words.handOverAll), closed: ending(session.closed), lost: ending(session.lost),
    link: session.link, paused: session.paused, resumed: session.resumed, allowed: session.allowed, usage: session.usage, media: session.media,
    microphoneOpened: session.microphoneOpened, microphoneEnded: session.microphoneEnded,
    heard: words.heard, delegated: words.delegated,
    placed: voice.placed, sound: voice.sound, trouble: ending(session.troubled),
    stopSpeaking: voice.stopSpeaking, goOn: voice.goOn, sayAgain: voice.sayAgain,
  },
  closing: { ...ALWAYS, heard: words.heard, usage: session.usage, closed: session.closed, lost: session.lost },
};

/** Of the session that is to replace the present one. @type {Record<string, EventRule>} */
const RENEWAL = {
  microphoneOpened: session.renewalMicrophone, microphoneEnded: session.renewalMicrophone,
  opened: session.renewalOpened, started: ending(session.renewalStarted),
  failed: session.renewalFailed, lost: session.renewalFailed, closed: session.renewalFailed,
  trouble: session.renewalTroubled,
};

const OF_SESSION = new Set([
  "opened", "started", "failed", "lost", "closed", "link", "paused", "resumed", "allowed", "usage", "media",
  "heard", "delegated", "placed", "sound", "trouble", "microphoneOpened", "microphoneEnded",
]);

/** What time brings, in this order. */
const TICK = [
  ending(session.watchSession),
  ...[
    words.settle, words.listenForAnswer, words.listenForCommand, words.listenForLate, words.correct, words.handTail,
    questions.askAnew, questions.remind, runs.reportProgress,
  ].map(whileLive),
  words.handLeft, runs.followAgain, runs.pollHeld, runs.claimDue, words.keepLines,
];

/**
 * One event. Returns the next state and what is to be done.
 * @param {State} state @param {Event} event
 * @returns {Step}
 */
export function step(state, event) {
  const rule = ruleFor(state, event);
  if (!rule) return [state, []];
  return voice.pump(...rule({ ...state, now: event.at ?? state.now }, event));
}

/** @param {State} state @param {Event} event @returns {EventRule | undefined} */
function ruleFor(state, event) {
  if (!OF_SESSION.has(event.type) || event.attempt === state.attempt) return TABLE[state.phase][event.type];
  if (event.attempt === state.renewal?.attempt) return RENEWAL[event.type];
  return event.type === "opened" ? session.late : undefined;
}

/** @type {EventRule} */
function tick(state, event) {
  return each(state, TICK, (s, rule) => rule(s, event));
}

/** A rule that may end the session; before that, what the user has asked for is handed over. @param {EventRule} rule @param {Rule} [before] @returns {EventRule} */
function ending(rule, before = words.handOver) {
  return (state, event) => {
    const [next, effects] = rule(state, event);
    const isOver = state.phase === "live" && (next.phase !== "live" || next.attempt !== state.attempt);
    return isOver ? chain(state, before, (s) => rule(s, event)) : [next, effects];
  };
}

/** How this server is set up. @type {EventRule} */
function configured(state, event) {
  const { stopPhrases, stopSpeakingPhrases = [], goOnPhrases = [], repeatPhrases = [], retryPhrases = [] } = event;
  const { progress = "normal", voiceApprovals = true, page } = event;
  const phrases = { stopPhrases, stopSpeakingPhrases, goOnPhrases, repeatPhrases, retryPhrases };
  return [{ ...state, idleMs: event.idleSeconds * 1000, ...phrases, progress, voiceApprovals, page }, []];
}
