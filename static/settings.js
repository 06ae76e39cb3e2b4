// What the user chose on this device. It is read from what was stored, which may be anything.

export const PROGRESS = ["off", "quiet", "normal", "chatty"];
const STORED_CHARS = 4000;
const WORD_CHARS = 500; // browsers name devices with 64

/** @typedef {{voice: string, microphone: string, speaker: string, progress: string}} Settings empty: not chosen */

/**
 * The settings in a stored text; whatever in it makes no sense is left out.
 * @param {string | null} text
 * @param {string[]} voices those that the server offers
 * @returns {Settings}
 */
export function readSettings(text, voices) {
  const stored = parsed(text);
  const word = (/** @type {string} */ key) => {
    const value = Object.hasOwn(stored, key) ? stored[key] : "";
    return typeof value === "string" && value.length <= WORD_CHARS ? value : "";
  };
  const voice = word("voice");
  const progress = word("progress");
  return {
    voice: voices.includes(voice) ? voice : "",
    microphone: word("microphone"),
    speaker: word("speaker"),
    progress: PROGRESS.includes(progress) ? progress : "",
  };
}

/** @param {string | null} text @returns {Record<string, unknown>} */
function parsed(text) {
  if (!text || text.length > STORED_CHARS) return {};
  try {
    return Object(JSON.parse(text));
  } catch {
    return {};
  }
}
