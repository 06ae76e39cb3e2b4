// Short commands by voice: a phrase counts when it is all that was said. Pure.

// Said around a command, it changes nothing.
const POLITE = /(?<![\p{L}\p{N}])(?:hermes|please|bitte)(?![\p{L}\p{N}])/gu;

/** @param {string} text */
function plain(text) {
  const words = text.toLowerCase().replace(/[^\p{L}\p{M}\p{N}' ]/gu, " ");
  return words.replace(POLITE, " ").replace(/\s+/g, " ").trim();
}

/** Whether a text is one of the phrases. @param {string} said @param {string[]} phrases */
export function isOneOf(said, phrases) {
  const words = plain(said);
  return !!words && phrases.some((phrase) => plain(phrase) === words);
}
