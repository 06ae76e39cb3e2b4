// The DOM: `bind` hands clicks out, `render` shows a state. Nothing else touches the page.

import { parse, toNodes } from "./markdown.js";
import { mayClick } from "./questions.js";
import { isRetryable } from "./runs.js";
import { inOrder, isAsking } from "./state.js";
import { costOf, statusOf } from "./status.js";
import { textOf } from "./transcript.js";

/** @typedef {import("./state.js").State} State */
/** @typedef {State["runs"][number]} Run */

/** @template {HTMLElement} T @param {string} id @param {new () => T} kind @returns {T} */
function find(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no ${id}`);
  return found;
}

const light = find("light", HTMLElement);
const statusWords = find("status-words", HTMLElement);
const statusSeconds = find("status-seconds", HTMLElement);
const meter = find("meter", HTMLElement);
const meterWhat = find("meter-what", HTMLElement);
const meterOurs = find("meter-ours", HTMLElement);
const meterTheirs = find("meter-theirs", HTMLElement);
const entry = find("entry", HTMLFormElement);
const entryWhy = find("entry-why", HTMLElement);
const token = find("token", HTMLInputElement);
const remember = find("remember", HTMLInputElement);
const welcome = find("welcome", HTMLElement);
const log = find("log", HTMLElement);
const questions = find("questions", HTMLElement);
const start = find("start", HTMLButtonElement);
const hangUp = find("hang-up", HTMLButtonElement);
const mute = find("mute", HTMLButtonElement);
const stopSpeaking = find("stop-speaking", HTMLButtonElement);
const goOn = find("go-on", HTMLButtonElement);
const sayAgain = find("say-again", HTMLButtonElement);
const stopTask = find("stop-task", HTMLButtonElement);
const answerControls = find("answer-controls", HTMLElement);
const conversations = find("conversations", HTMLButtonElement);
const talks = find("talks", HTMLDialogElement);
const talksHint = find("talks-hint", HTMLElement);
const talksList = find("talks-list", HTMLUListElement);
const talksNew = find("talks-new", HTMLButtonElement);
const talksClose = find("talks-close", HTMLButtonElement);
const settings = find("settings", HTMLButtonElement);
const choices = find("choices", HTMLDialogElement);
const chooseVoice = find("choose-voice", HTMLSelectElement);
const chooseMicrophone = find("choose-microphone", HTMLSelectElement);
const chooseSpeaker = find("choose-speaker", HTMLSelectElement);
const chooseProgress = find("choose-progress", HTMLSelectElement);
const devicesHint = find("devices-hint", HTMLElement);
const shownLanguage = find("shown-language", HTMLElement);
const shownGlossary = find("shown-glossary", HTMLElement);
const forgetToken = find("forget-token", HTMLButtonElement);
const choicesClose = find("choices-close", HTMLButtonElement);
const compose = find("compose", HTMLFormElement);
const message = find("message", HTMLTextAreaElement);
const demo = find("demo", HTMLElement);
const demoVoiceless = find("demo-voiceless", HTMLElement);
const demoControls = find("demo-controls", HTMLFieldSetElement);
const demoSentences = find("demo-sentences", HTMLElement);
const demoSay = find("demo-say", HTMLFormElement);
const demoWords = find("demo-words", HTMLInputElement);

export const voice = find("voice", HTMLAudioElement);

const NEAR_END_PX = 80; // from its end, the log is taken to be there
const MARGIN_PX = 8; // above an answer that begins at the log's top

/** @typedef {Map<string, {element: HTMLElement, shown: string}>} Drawn */
/** @type {Drawn} */
const items = new Map();
/** @type {Drawn} */
const asked = new Map();
/** Whether the log shows its end, and shall go on to. */
let atEnd = true;
/** How far the log was scrolled when that was last looked at. */
let scrolled = 0;
/** @typedef {{start(): void, approve(key: string, requestId: string, choice: string): void, retry(key: string): void, switchTo(id: string): void, forget(id: string): void}} Actions */
/** @type {Actions} */
let actions = { start() {}, approve() {}, retry() {}, switchTo() {}, forget() {} };

/**
 * @param {{start(): void, hangUp(): void, mute(): void, stopSpeaking(): void, goOn(): void,
 *   sayAgain(): void, stopTask(): void,
 *   send(text: string): void, token(token: string, remember: boolean): void,
 *   conversations(): void, settings(): void, choose(setting: string, value: string): void,
 *   forgetToken(): void} & Actions} callbacks
 */
export function bind(callbacks) {
  actions = callbacks;
  log.addEventListener("scroll", noteScroll);
  start.addEventListener("click", callbacks.start);
  // The second click of a double click on "Start call" lands here.
  hangUp.addEventListener("click", (event) => event.detail < 2 && callbacks.hangUp());
  mute.addEventListener("click", callbacks.mute);
  stopSpeaking.addEventListener("click", callbacks.stopSpeaking);
  goOn.addEventListener("click", callbacks.goOn);
  sayAgain.addEventListener("click", callbacks.sayAgain);
  stopTask.addEventListener("click", callbacks.stopTask);
  conversations.addEventListener("click", callbacks.conversations);
  talksNew.addEventListener("click", () => callbacks.switchTo(""));
  talksClose.addEventListener("click", closeConversations);
  settings.addEventListener("click", callbacks.settings);
  for (const [setting, select] of Object.entries({ voice: chooseVoice, microphone: chooseMicrophone, speaker: chooseSpeaker, progress: chooseProgress })) {
    select.addEventListener("change", () => callbacks.choose(setting, select.value));
  }
  forgetToken.addEventListener("click", callbacks.forgetToken);
  choicesClose.addEventListener("click", () => choices.close());
  entry.addEventListener("submit", (event) => {
    event.preventDefault();
    callbacks.token(token.value.trim(), remember.checked);
    token.value = "";
  });
  const send = () => {
    const text = message.value.trim();
    if (!text) return;
    message.value = "";
    callbacks.send(text);
  };
  compose.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
}

/** Put a text back into the message box. @param {string} text */
export function draft(text) {
  message.value = message.value ? `${text}\n${message.value}` : text;
}

/** Ask for the access token. @param {string} why */
export function askForToken(why) {
  entryWhy.textContent = why;
  entry.hidden = false;
  token.focus();
}

export function hideTokenEntry() {
  entry.hidden = true;
}

/** In a demo, sentences to say instead of speaking. @param {string[]} sentences @param {(text: string) => void} say */
export function showDemo(sentences, say) {
  demoSentences.replaceChildren(...sentences.map((text) => sentenceButton(text, say)));
  demoSay.onsubmit = (event) => {
    event.preventDefault();
    const text = demoWords.value.trim();
    if (text) say(text);
    demoWords.value = "";
  };
  demo.hidden = false;
}

/** Say where a demo can be heard, or only read. @param {boolean} has a voice on this device */
export function showVoice(has) {
  demoVoiceless.hidden = has;
}

/** @param {string} text @param {(text: string) => void} say */
function sentenceButton(text, say) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => say(text));
  return button;
}

/**
 * List the conversations to choose from.
 * @param {{id: string, title: string, updated: number}[]} listed newest first
 * @param {string} current
 */
export function showConversations(listed, current) {
  talksList.replaceChildren(...listed.map((talk) => drawTalk(talk, current)));
  if (!talks.open) talks.showModal();
}

export function closeConversations() {
  talks.close();
}

/** @param {{id: string, title: string, updated: number}} talk @param {string} current */
function drawTalk(talk, current) {
  const title = talk.title || "Without words";
  const when = new Date(talk.updated * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const open = document.createElement("button");
  open.type = "button";
  open.append(make("span", "title", title), make("span", "when", talk.id === current ? `${when}, open` : when));
  open.ariaCurrent = String(talk.id === current);
  open.addEventListener("click", () => actions.switchTo(talk.id));
  const forget = document.createElement("button");
  forget.type = "button";
  forget.textContent = "Forget";
  forget.ariaLabel = `Forget: ${title}`;
  // Twice, since it cannot be undone.
  forget.addEventListener("click", () => {
    if (forget.dataset.sure) return actions.forget(talk.id);
    forget.dataset.sure = "yes";
    forget.textContent = "Really?";
  });
  const item = make("li", "");
  item.append(open, forget);
  return item;
}

/** @typedef {{id: string, label: string}} Device */

/**
 * Show the settings, or show them anew.
 * @param {{chosen: import("./settings.js").Settings, voice: string, voices: string[], progress: string[],
 *   microphones: Device[], speakers: Device[] | null, language: string, glossary: string[], token: boolean}} known
 *   `voice`: the server's; `speakers`: null where the browser chooses; `token`: one is stored here
 */
export function showSettings({ chosen, voice, voices, progress, microphones, speakers, language, glossary, token }) {
  const named = (/** @type {string} */ id) => ({ id, label: id[0].toUpperCase() + id.slice(1) });
  offer(chooseVoice, chosen.voice, [{ id: "", label: voice ? `The server's choice: ${named(voice).label}` : "The server's choice" }, ...voices.map(named)]);
  offer(chooseMicrophone, chosen.microphone, [{ id: "", label: "The default one" }, ...microphones]);
  offer(chooseSpeaker, chosen.speaker, [{ id: "", label: "The default one" }, ...(speakers ?? [])]);
  offer(chooseProgress, chosen.progress, progress.map(named));
  chooseSpeaker.disabled = !speakers;
  const hints = [
    microphones.length ? "" : "Microphones and speakers can be chosen once the page has been allowed to listen: start a call first.",
    speakers ? "" : "This browser lets no page choose the speaker; the system's settings do.",
  ];
  show(devicesHint, hints.join(" ").trim());
  devicesHint.hidden = !devicesHint.textContent;
  show(shownLanguage, language || "The one you speak");
  show(shownGlossary, glossary.join(", ") || "No words");
  forgetToken.hidden = !token;
  if (!choices.open) choices.showModal();
}

export function settingsShown() {
  return choices.open;
}

/** A device that is not there is offered no more, and the first is chosen. @param {HTMLSelectElement} select @param {string} chosen @param {Device[]} offered */
function offer(select, chosen, offered) {
  select.replaceChildren(...offered.map(({ id, label }) => new Option(label, id, false, id === chosen)));
}

/** @param {State} state */
export function render(state) {
  const working = state.runs.some((run) => !run.result);
  const asking = state.runs.filter(isAsking);
  // The seconds are for the eye: a screen reader would read every one of them out.
  const [words, seconds = ""] = statusOf(state).split(/(?=, \d+ s)/);
  show(statusWords, words);
  show(statusSeconds, seconds);
  const cost = costOf(state);
  meter.hidden = !cost.ours;
  meterWhat.hidden = state.phase === "idle";
  show(meterOurs, cost.ours);
  show(meterTheirs, cost.theirs);
  light.dataset.phase = state.phase;
  light.dataset.muted = String(state.phase === "live" && state.muted);
  light.dataset.gone = String(state.phase === "live" && state.microphone === "gone");
  light.dataset.asking = String(asking.length > 0);
  start.hidden = state.phase !== "idle" || !entry.hidden;
  hangUp.hidden = state.phase === "idle";
  hangUp.disabled = state.phase === "closing";
  mute.hidden = state.phase !== "live" && state.phase !== "connecting";
  mute.ariaPressed = String(state.muted);
  show(mute, state.muted ? "Unmute" : "Mute");
  // In a call these stay where they are, and a question does too, so that nothing else comes up
  // under a finger.
  const isHeard = state.speech.sounding && !state.silenced;
  stopSpeaking.hidden = state.phase !== "live";
  stopSpeaking.disabled = !isHeard;
  stopTask.hidden = !working && state.phase !== "live";
  stopTask.disabled = !state.runs.some((run) => !run.result && !run.stopAsked);
  const mayTell = state.phase === "live" && !isHeard && !asking.length;
  goOn.hidden = !mayTell || !state.speech.kept.length;
  sayAgain.hidden = !mayTell || !state.speech.last.length;
  answerControls.hidden = goOn.hidden && sayAgain.hidden;
  compose.hidden = conversations.hidden = settings.hidden = !entry.hidden;
  demoControls.disabled = state.phase !== "live" || state.muted;
  talksHint.hidden = state.phase === "idle";
  for (const button of talks.querySelectorAll("button")) button.disabled = state.phase !== "idle" && button !== talksClose;
  draw(questions, asked, asking.map((run) => ({ key: run.key, draw: drawOpenQuestion, data: visible(run, state) })));
  questions.hidden = !asking.length;
  renderLog(state);
  welcome.hidden = !entry.hidden || items.size > 0;
}

/** @param {HTMLElement} element @param {string} text */
function show(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {State} state */
function renderLog(state) {
  noteScroll();
  const held = atEnd ? null : firstInView();
  const heldAt = held?.offsetTop ?? 0;
  const came = newAnswers(state);
  draw(log, items, inOrder(state).map((item) => drawnAs(item, state)));
  const begins = came.map(longAnswer).find((top) => top !== null);
  if (atEnd && begins) {
    log.scrollTop = begins - MARGIN_PX;
    atEnd = false;
  } else if (atEnd) log.scrollTop = log.scrollHeight;
  else if (held?.isConnected) log.scrollTop += held.offsetTop - heldAt;
  scrolled = log.scrollTop;
}

/** Where an answer that the log cannot show whole is read from, as the voice reads it; null for a shorter one. @param {string} key */
function longAnswer(key) {
  const card = items.get(key)?.element;
  const answer = /** @type {HTMLElement | null | undefined} */ (card?.querySelector(".answer"));
  if (!card || !answer) return null;
  // Many questions may stand before it.
  const begins = answer.offsetTop - card.offsetTop < log.clientHeight / 2 ? card.offsetTop : answer.offsetTop;
  return card.offsetTop + card.offsetHeight - begins > log.clientHeight - 2 * MARGIN_PX ? begins : null;
}

/** The reader may have scrolled: to the end, which then stays in view, or away from it. */
function noteScroll() {
  if (log.scrollTop === scrolled) return;
  scrolled = log.scrollTop;
  atEnd = log.scrollHeight - scrolled - log.clientHeight < NEAR_END_PX;
}

/** What the reader has before them, which stays there whatever moves; a line, since cards move themselves. */
function firstInView() {
  const inView = [...items.values()].map(({ element }) => element).filter((element) => {
    const top = element.offsetTop - log.scrollTop;
    return top < log.clientHeight && top + element.offsetHeight > 0;
  });
  return inView.find((element) => !element.matches(".card")) ?? inView[0] ?? null;
}

/** The keys of answers that have just come, oldest first; not of those that were heard of on an earlier page. @param {State} state */
function newAnswers(state) {
  const isNews = (/** @type {Run} */ run) => {
    const drawn = items.get(`run${run.key}`)?.element;
    return drawn ? !drawn.querySelector(".answer") : run.attempt >= 0 || isNew(run, state);
  };
  return state.runs.filter((run) => run.result?.show && isNews(run)).map(({ key }) => `run${key}`);
}

/** @param {ReturnType<typeof inOrder>[number]} item @param {State} state */
function drawnAs(item, state) {
  if (item.kind === "line") return { key: `line${item.line.key}`, draw: drawLine, data: { speaker: item.line.speaker, text: textOf(item.line) } };
  if (item.kind === "run") return { key: `run${item.run.key}`, draw: drawRun, data: carded(item.run, state) };
  const offersCall = item.notice.offersCall && state.phase === "idle" && item.notice === state.notices.at(-1);
  return { key: `notice${item.notice.key}`, draw: drawNotice, data: { ...item.notice, offersCall } };
}

/**
 * Every item has a key and is drawn again only when what it shows has changed.
 * @param {HTMLElement} parent
 * @param {Drawn} drawn what it shows so far
 * @param {{key: string, draw: (element: HTMLElement, data: any) => void, data: object}[]} wanted
 */
function draw(parent, drawn, wanted) {
  const keys = new Set(wanted.map((item) => item.key));
  for (const [key, item] of drawn) {
    if (keys.has(key)) continue;
    item.element.remove();
    drawn.delete(key);
  }
  let before = parent.firstChild;
  for (const { key, draw, data } of wanted) {
    const known = drawn.get(key);
    const shown = JSON.stringify(data);
    const element = known?.element ?? document.createElement("div");
    if (element === before) before = element.nextSibling;
    else parent.insertBefore(element, before);
    if (known?.shown === shown) continue;
    draw(element, data);
    drawn.set(key, { element, shown });
  }
}

/** @param {HTMLElement} element @param {{speaker: string, text: string}} line */
function drawLine(element, line) {
  element.className = `said ${line.speaker}`;
  element.replaceChildren(make("span", "unseen", line.speaker === "user" ? "You: " : "Voice: "), line.text);
}

/** @param {HTMLElement} element @param {{level: string, text: string, offersCall: boolean}} notice */
function drawNotice(element, notice) {
  element.className = `notice ${notice.level}`;
  element.replaceChildren(make("p", "", notice.text));
  if (!notice.offersCall) return;
  const button = make("button", "", "Reconnect");
  button.addEventListener("click", () => actions.start());
  element.append(button);
}

/** @type {Record<string, string>} */
const FINISHED = {
  stop: "Done",
  failed: "Not done",
  cancelled: "Stopped",
  interrupted: "Interrupted",
  unknown: "Outcome unknown",
};

/** Whether nobody was told of its end. @param {Run} run @param {State} state */
function isNew(run, state) {
  return ["due", "asked"].includes(run.claim) && state.phase === "idle";
}

/** What a run's card shows of it. @param {Run} run @param {State} state */
function visible(run, state) {
  const question = run.question;
  return {
    key: run.key,
    request: run.request,
    state: run.result ? (FINISHED[run.result.finish] ?? "Ended") : workingLabel(run),
    isNew: isNew(run, state),
    failed: !!run.result && !["stop", "cancelled"].includes(run.result.finish),
    mayRetry: isRetryable(run),
    progress: run.result ? "" : run.progress,
    tools: run.tools,
    answer: run.result?.show ?? "",
    question: question && {
      ...question,
      open: question.stage !== "closed",
      busy: question.stage === "answering",
      mayClick: mayClick(question, state.now),
      seconds: Math.max(0, Math.ceil((question.until - state.now) / 1000)),
      stage: "",
    },
  };
}

/** The same for the log, where a question appears once it is answered. @param {Run} run @param {State} state */
function carded(run, state) {
  const closed = [...run.earlier, run.question].filter((question) => question?.stage === "closed");
  return { ...visible(run, state), question: null, questions: closed };
}

/** @param {Run} run */
function workingLabel(run) {
  if (run.state === "queued") return "Waiting";
  if (run.state === "stopping") return "Stopping…";
  if (run.state === "unreachable") return "Hermes cannot be reached; still trying";
  return "Working…";
}

/** @param {HTMLElement} element @param {ReturnType<typeof carded>} run */
function drawRun(element, run) {
  const open = element.querySelector("details")?.open ?? false;
  element.className = run.failed ? "card failed" : "card";
  element.role = "article";
  element.ariaLabel = `Task: ${run.request || "from earlier"}`;
  const head = make("header", "");
  head.append(make("p", "request", run.request), make("p", "state", run.isNew ? `New: ${run.state}` : run.state));
  const parts = /** @type {Node[]} */ ([head]);
  if (run.progress) parts.push(make("p", "progress", run.progress));
  parts.push(...run.questions.flatMap((question) => (question ? [drawAnsweredQuestion(question)] : [])));
  if (run.answer) {
    const answer = make("div", "answer");
    answer.append(toNodes(parse(run.answer)));
    parts.push(answer);
  }
  if (run.tools.length) parts.push(drawTools(run.tools, open));
  if (run.mayRetry) parts.push(retryButton(run.key));
  element.replaceChildren(...parts);
}

/** @param {string} key */
function retryButton(key) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Ask again";
  button.addEventListener("click", () => actions.retry(key));
  return button;
}

/** @param {Run["tools"]} tools @param {boolean} open */
function drawTools(tools, open) {
  const details = document.createElement("details");
  details.open = open;
  const list = make("ol", "steps");
  for (const tool of tools) {
    const mark = tool.status === "error" ? " (failed)" : tool.status === "running" ? " …" : "";
    const item = make("li", "", `${tool.label}${mark}`);
    if (tool.preview) item.append(": ", make("code", "", tool.preview));
    list.append(item);
  }
  details.append(make("summary", "", tools.length === 1 ? "1 step" : `${tools.length} steps`), list);
  return details;
}

/** @type {Record<string, string>} */
const CHOICES = { once: "Allow once", deny: "Deny", session: "Allow for this task" };
/** @type {Record<string, string>} */
const OUTCOMES = {
  allowed: "You allowed it.",
  denied: "You denied it.",
  answered: "It was answered.",
  timeout: "Nobody answered in time, so Hermes did not do it.",
  run_ended: "The task ended before it was answered.",
  late: "Your answer came when Hermes no longer waited for it.",
  unknown: "Your answer may not have reached Hermes.",
  lost: "hermes-voice was restarted, so it could not be answered any more.",
};

/** @typedef {Omit<NonNullable<Run["question"]>, "stage">} ShownQuestion */

const LONG_CHARS = 150; // of a command; its end may be out of sight
// Words that are written from right to left, codes of what cannot be seen, and tabs.
const TURNED = "[\\u0590-\\u08ff\\ufb1d-\\ufdff\\ufe70-\\ufefc\\u{10800}-\\u{10fff}\\u{1e800}-\\u{1efff}]+";
const ODD = new RegExp(`(${TURNED})|(\\\\u\\{[0-9A-F]+\\})|(\t)`, "u");

/** @param {ShownQuestion} question */
function questionWords(question) {
  const about = make("p", "", "Hermes asks before it does this");
  if (question.description) about.append(" (", drawExact("span", question.description), ")");
  about.append(":");
  const command = make("pre", "");
  command.append(drawExact("code", question.command));
  const size = make("p", "size", sizeOf(question.command));
  const isLong = question.command.length > LONG_CHARS || question.command.includes("\n");
  return isLong ? [about, size, command] : [about, command];
}

/** @param {string} command */
function sizeOf(command) {
  const [lines, characters] = [command.split("\n"), command].map(({ length }) => length.toLocaleString("en"));
  return `${lines} ${lines === "1" ? "line" : "lines"}, ${characters} characters`;
}

/**
 * A text whose characters are in the order in which they are read: the server has put codes for what
 * cannot be seen, and each word from right to left stands alone, so that it turns nothing around it.
 * Lines have numbers where there are several: one that is only too long has none.
 * @param {string} tag @param {string} text
 */
function drawExact(tag, text) {
  const lines = text.split("\n");
  const exact = make(tag, lines.length > 1 ? "exact lines" : "exact");
  exact.dir = "ltr";
  for (const [at, line] of lines.entries()) {
    if (at) exact.append("\n");
    const part = make("span", "line");
    part.append(...line.split(ODD).filter(Boolean).map(drawOdd));
    exact.append(part);
  }
  return exact;
}

/** @param {string} part of a line, as `ODD` splits it */
function drawOdd(part) {
  const [, turned, code, tab] = part.match(ODD) ?? [];
  if (turned) return make("bdi", "", turned);
  if (code) return make("mark", "", code);
  return tab ? make("span", "tab", tab) : part;
}

/** @param {ShownQuestion} question */
function drawAnsweredQuestion(question) {
  const box = make("div", "question");
  box.append(...questionWords(question), make("p", "outcome", OUTCOMES[question.outcome] ?? OUTCOMES.run_ended));
  return box;
}

/** Buttons are made once: one that is drawn anew would lose its focus. @param {HTMLElement} element @param {ReturnType<typeof visible>} run */
function drawOpenQuestion(element, { key, question }) {
  if (!question) return;
  if (element.dataset.requestId !== question.requestId) {
    element.dataset.requestId = question.requestId;
    element.className = "question";
    const buttons = make("div", "buttons");
    const offered = Object.keys(CHOICES).filter((choice) => question.choices.includes(choice));
    buttons.append(...offered.map((choice) => choiceButton(key, question.requestId, choice)));
    // First, where a small screen does not cut it off.
    const only = offered.join() === "deny" ? [make("p", "", "It cannot be allowed from here.")] : [];
    element.replaceChildren(make("p", "left", ""), ...questionWords(question), ...only, buttons);
  }
  for (const button of element.querySelectorAll("button")) button.disabled = !question.mayClick;
  const left = /** @type {HTMLElement} */ (element.firstElementChild);
  show(left, question.busy ? "Passing your answer on…" : `${question.seconds} s left. ${question.note}`);
}

/** @param {string} key @param {string} requestId @param {string} choice */
function choiceButton(key, requestId, choice) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = CHOICES[choice];
  button.addEventListener("click", () => actions.approve(key, requestId, choice));
  return button;
}

/** @param {string} tag @param {string} className @param {string} [text] */
function make(tag, className, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
