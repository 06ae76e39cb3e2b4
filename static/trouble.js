// Errors that the voice service reports: which of them end the session, and the words. Pure.
//
//   an error                                            then
//   of the account, or "the session is over"            the session ends, with the reason
//   of the service, if it names no message of ours      the same
//   that names a message of ours                        voice.js: that one was refused
//   that comes with an end or a store, and changes      nothing
//     nothing for the user
//   any other, known or not                             told once a session; the call goes on
//
// Before the session has started, every error ends it.

const NO_CREDIT = "OpenAI ended the call because the account has no credit left. Add some in OpenAI's billing settings.";
const NO_KEY = "OpenAI ended the call because it does not accept the server's key any more. Run hermes-voice with --check to see why.";
const SERVICE = "OpenAI ended the call because of a fault of its own.";
const SESSION = "OpenAI ended the call.";

// Whatever they name.
/** @type {Record<string, string>} */
const ENDS = {
  insufficient_quota: NO_CREDIT,
  credit_balance_exhausted: NO_CREDIT,
  billing_hard_limit_reached: "OpenAI ended the call because the account's spending limit is reached. Raise it in OpenAI's billing settings.",
  invalid_api_key: NO_KEY,
  account_deactivated: NO_KEY,
  live_api_access_denied: NO_KEY,
  session_expired: "The call reached the longest time OpenAI allows.",
  session_closed: SESSION,
  session_not_found: SESSION,
};

// Naming a message of ours, they are about that one only.
/** @type {Record<string, string>} */
const ENDS_ALONE = {
  server_error: SERVICE,
  pipeline_error: SERVICE,
  rate_limit_exceeded: "OpenAI ended the call because too much was asked of it at once. Wait a minute.",
};

// What was not placed before the end, a session that could not be stored: we store none, and
// the end comes by itself.
const MEANS_NOTHING = ["context_injection_incomplete", "session_storage_failed", "session_finalization_failed"];

// The voice is cut off by these; where the session ends too, its end says so.
const CONTENT = /^(?:content|moderation)/;

/** Why this error ends the session; empty if it does not. @param {string} code @param {boolean} alone it names no message of ours */
export function endOf(code, alone) {
  const ends = alone ? { ...ENDS, ...ENDS_ALONE } : ENDS;
  return Object.hasOwn(ends, code) ? ends[code] : "";
}

/** What an error means for the user while the call goes on; empty for nothing. @param {string} code */
export function wordsOf(code) {
  if (MEANS_NOTHING.includes(code)) return "";
  if (CONTENT.test(code)) return "OpenAI cut the voice off because of its content rules. Put it in other words.";
  return `OpenAI reported an error (${code}). The call goes on; if the voice does not answer, hang up and start it again.`;
}

/** Why a session does not start after this error. @param {string} code */
export function refusalOf(code) {
  return endOf(code, true) || `OpenAI reported an error (${code}), and the call did not start.`;
}
