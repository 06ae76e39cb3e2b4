// What is said of a question of Hermes's, and when. Pure.
//
//   when                                    what
//   it is asked                             the question
//   a third and two thirds of its time on   a reminder, the second one more urgent
//   20 s before it runs out                 the last one
//
// A reminder that would come within 15 s of the question's last words is left out.

const LAST_MS = 20000;
const APART_MS = 15000;

/** @typedef {{description: string, askedAt: number | null, until: number, saidAt: number, reminded: number}} Asked */

/** @param {boolean} byVoice whether words may answer it */
function howTo(byVoice) {
  return byVoice ? "Do you allow it, yes or no?" : "Please answer with the buttons on the screen.";
}

/** The question itself. @param {{description: string}} question @param {boolean} byVoice */
export function questionWords({ description }, byVoice) {
  const what = description ? ` It is about: ${description}.` : "";
  return `Hermes asks for permission to run a command.${what} The exact command is on the screen. ${howTo(byVoice)}`;
}

/** How many reminders were due up to a time. @param {Asked} question @param {number} at */
export function remindersDue({ askedAt, until }, at) {
  if (askedAt === null) return 0;
  const third = (until - askedAt) / 3;
  return [askedAt + third, askedAt + 2 * third, until - LAST_MS].filter((due) => due > askedAt && due <= at).length;
}

/** Whether a reminder may be said now. @param {Asked} question @param {number} at */
export function mayRemind(question, at) {
  return at < question.until && at - question.saidAt >= APART_MS;
}

/** @param {Asked} question @param {number} at @param {boolean} byVoice */
export function reminderWords(question, at, byVoice) {
  const seconds = Math.max(1, Math.round((question.until - at) / 1000));
  const due = remindersDue(question, at);
  if (question.until - at <= LAST_MS) return `Last call: in ${seconds} seconds Hermes gives up on its question. ${howTo(byVoice)}`;
  if (due > 1) return `Hermes still needs an answer, or it will not do it. ${seconds} seconds are left. ${howTo(byVoice)}`;
  return `Hermes is waiting for your answer to its question. ${howTo(byVoice)}`;
}
