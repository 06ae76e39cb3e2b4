// Short commands by voice: a phrase counts when it is all that was said. Pure.

// Said around a command, it changes nothing.
const POLITE = /(?<![\p{L}\p{N}])(?:hermes|please|bitte)(?![\p{L}\p{N}])/gu;

/** @param {string} text */
function plain(text) {
  return text.toLowerCase().replace(/[^\p{L}\p{M}\p{N}' ]/gu, " ").replace(/\s+/g, " ").trim();
}

/** "Stop stop stop!" says what "stop" does. @param {string} words */
function once(words) {
  return words.split(" ").filter((word, n, all) => word !== all[n - 1]).join(" ");
}

/** Whether a text is one of the phrases. @param {string} said @param {string[]} phrases */
export function isOneOf(said, phrases) {
  const words = plain(said);
  // A phrase may hold such a word itself: "goodbye" alone is not "goodbye Hermes".
  const asked = [words, plain(words.replace(POLITE, " "))].flatMap((text) => [text, once(text)]).filter(Boolean);
  return phrases.some((phrase) => asked.includes(plain(phrase)));
}
