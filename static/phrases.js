// Short commands by voice: a phrase counts when it is all that was said. Pure.
//
//   of what was said                                  does not count
//   case, punctuation, spaces between characters      ever
//   fillers and politeness around it, in any order    unless the phrase has them
//   a "no" that is set apart                          "No, stop." is "stop"; "no cancelar" is not
//   repetition                                        "Stop stop stop!" is "stop"

const CJK = "\\p{Script=Han}\\p{Script=Hiragana}\\p{Script=Katakana}ー";

// Of the languages that permission knows. None of them may turn what follows into its opposite:
// "no", "não" and "nie" also mean "not".
const FILLERS = [
  "hermes|great|perfect|nice|cool|good|very good|excellent|wonderful",
  "u+m+|u+h+m*|e+r+m*|h+m+|m+|oh|ah|hey|hi|ok|okay|well|so|now|then|wait|just|right now|actually",
  "alright|all right|sorry|please|thanks|thank you|(?:can|could|will|would) you|no(?= stop$)",
  "bitte|danke|super|toll|prima|perfekt|sehr gut|äh+m?|hm+|ach|also|jetzt|sofort|mal|doch|na|nein|(?:kannst|könntest|würdest) du",
  "parfait|très bien|s'il (?:te|vous) pla[îi]t|merci|euh|hé|eh|bon|alors|maintenant|tout de suite",
  "perfecto|muy bien|por favor|gracias|oye|bueno|vale|ahora|ya",
  "perfetto|benissimo|per (?:favore|piacere)|grazie|ehm|ehi|dai|allora|ora|adesso|subito",
  "perfeito|ótimo|obrigad[oa]|ei|então|agora|olha",
  "alsjeblieft|alstublieft|dank (?:je|u)|bedankt|nou|even|nu|nee",
  "świetnie|proszę|dziękuję|hej|ej|teraz|już|e+|y+",
  "harika|lütfen|teşekkürler|tamam|şimdi|artik|hadi|hayir",
].join("|");
const CJK_FILLERS = [
  "很好|太好了|请|請|嗯|啊|呃|喂|嘿|好的?|那个|那個|就|先|快|马上|馬上|现在|現在|谢谢|謝謝|吧|了|啦",
  "ヘルメス|いいね|ねえ|えっと|ええと|あの|ちょっと|もう|今すぐ|すみません|お願いします|ください|下さい|ありがとう|よ|ね",
].join("|");
const LEADS = new RegExp(`^(?:(?:${FILLERS}) |(?:${CJK_FILLERS}) ?)`, "u");
const TRAILS = new RegExp(`(?: (?:${FILLERS})| ?(?:${CJK_FILLERS}))$`, "u");
const WITHIN = new RegExp(`(?<![^ ])(?:${FILLERS})(?![^ ])`, "gu");
const NO_FIRST = /^\s*(?:no|nein|non|não|nee|nie|hay[ıi]r|不|いや|いいえ)\s*[,.!…，、。！]+/iu;
const BESIDE_CJK = new RegExp(`(?<=[${CJK}]) | (?=[${CJK}])`, "gu");
const CJK_TWICE = new RegExp(`^([${CJK}]+?)\\1+$`, "u");
const LONGEST = 120; // characters that can be a command, with all that stands around it

// What asks for nothing: thanks, and a goodbye that names nobody.
const SMALL_TALK = [
  "thanks|thank you|thanks a lot|thanks so much|many thanks|thank you (?:very|so) much|cheers|bye|goodbye|bye bye|see you|good night",
  "danke|danke (?:schön|sehr)|dankeschön|(?:vielen|besten) dank|tschüss|auf wiedersehen|gute nacht",
  "merci|merci (?:beaucoup|bien)|au revoir|bonne nuit",
  "gracias|(?:muchas|mil) gracias|adiós|hasta luego|buenas noches",
  "grazie|grazie mille|(?:molte|tante) grazie|ciao|arrivederci|buonanotte",
  "(?:muito )?obrigad[oa]|valeu|tchau|adeus|boa noite",
  "bedankt|dank (?:je|u)(?: wel)?|dankjewel|doei|tot ziens|welterusten",
  "dziękuję|dzięki|dziękuję bardzo|wielkie dzięki|do widzenia|dobranoc",
  "(?:çok )?teşekkürler|(?:çok )?teşekkür ederim|sağ ol|sağ olun|hoşça kal|görüşürüz|iyi geceler",
  "谢谢你?|謝謝你?|多谢|多謝|非常感谢|非常感謝|再见|再見|拜拜|晚安",
  "(?:どうも)?ありがとう(?:ございます|ございました)?|どうも|感謝します|さようなら|じゃあね|おやすみ(?:なさい)?",
].join("|");
const IS_SMALL_TALK = new RegExp(`^(?:${SMALL_TALK})$`, "u");

/** A text without what its spelling adds. @param {string} text */
function plain(text) {
  const letters = text.normalize("NFKC").toLowerCase().replace(/i\u0307|ı/g, "i").replace(/[’‘ʼ]/g, "'");
  const words = letters.replace(/[^\p{L}\p{M}\p{N}' ]/gu, " ").replace(/\s+/g, " ").trim();
  return words.replace(BESIDE_CJK, "");
}

/** "Stop stop stop!" says what "stop" does. @param {string} words */
function once(words) {
  const single = words.split(" ").filter((word, n, all) => word !== all[n - 1]).join(" ");
  return single.replace(CJK_TWICE, "$1");
}

/** A text, and each that is left as fillers are taken from an end of it. @param {string} text @param {RegExp} edge @returns {string[]} */
function peeled(text, edge) {
  const rest = text.replace(edge, "");
  return rest === text ? [text] : [text, ...peeled(rest, edge)];
}

/** What a text may say, apart from what stands around it. @param {string} said */
function formsOf(said) {
  if (said.length > LONGEST) return [];
  const whole = [said, said.replace(NO_FIRST, " ")].map(plain);
  const forms = whole.flatMap((text) => [text, once(text), plain(text.replace(WITHIN, " "))]);
  const bare = forms.flatMap((text) => peeled(text, LEADS)).flatMap((text) => peeled(text, TRAILS));
  return bare.flatMap((text) => [text, once(text)]).filter(Boolean);
}

/** Whether a text is one of the phrases. @param {string} said @param {string[]} phrases */
export function isOneOf(said, phrases) {
  const forms = new Set(formsOf(said));
  return forms.size > 0 && phrases.some((phrase) => forms.has(plain(phrase)));
}

/** Whether a text only thanks, or says goodbye. @param {string} said */
export function isSmallTalk(said) {
  return formsOf(said).some((text) => IS_SMALL_TALK.test(text));
}
