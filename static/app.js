// The hall: builds the parts, holds the state, carries out effects. It decides nothing.

import { Api, ApiError } from "./api.js";
import { START, step } from "./call.js";
import { CallError, findDevices, onDeviceChange, Session } from "./rtc.js";
import { PROGRESS, readSettings } from "./settings.js";
import { placed } from "./state.js";
import * as view from "./view.js";
import { settlesAt } from "./words.js";

/** @typedef {import("./wire.js").Event} Event */
/** @typedef {import("./state.js").Effect} Effect */

const TICK_MS = 200;
const NO_TOKEN = "This server asks for its access token.";
const ENTER_TOKEN = "Or enter the token here.";
/** As the server wrote it into the page. */
const TOKEN_NEEDED = document.querySelector("meta[name=access-token]")?.getAttribute("content") === "needed";
const KEEPALIVE_BYTES = 60_000; // browsers let 64 KiB outlive a page, and refuse more

const api = new Api();
let state = START;
let timer = 0;
/** For words that are complete between two ticks. */
let wake = 0;
/** @type {{attempt: number, session: Session} | null} */
let current = null;
/** The session that is to replace it. @type {{attempt: number, session: Session} | null} */
let next = null;
/** @type {Map<string, AbortController>} */
const streams = new Map();
/** @type {WakeLockSentinel | null} */
let wakeLock = null;
/** @type {import("./demo.js").Demo | null} */
let demo = null;

const known = localStorage.getItem("conversation");
let conversation = known ?? newId();
localStorage.setItem("conversation", conversation);
const page = newId().slice(0, 12);
let offered = { voice: "", voices: /** @type {string[]} */ ([]), language: "", glossary: /** @type {string[]} */ ([]), progress: "" };
let settings = readSettings(localStorage.getItem("settings"), []);

/** Not every page has crypto.randomUUID: plain http has not. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Event} event */
function dispatch(event) {
  const [next, effects] = step(state, { at: performance.now(), ...event });
  state = next;
  for (const effect of effects) EFFECTS[effect.do](effect);
  if (!timer) timer = window.setTimeout(redraw, 16);
  clearTimeout(wake);
  const wait = settlesAt(state) - performance.now();
  if (wait < TICK_MS) wake = window.setTimeout(() => dispatch({ type: "tick" }), Math.max(1, wait));
}

function redraw() {
  timer = 0;
  view.render(state);
  keepAwake(state.phase === "live");
}

/** @param {any} error @returns {{message: string, code?: string, status?: number}} */
function explained(error) {
  if (error instanceof ApiError || error instanceof CallError) return error;
  console.error(error);
  return { message: "Something went wrong on this page. Reload it and try again." };
}

/** @type {Record<string, (effect: any) => void>} */
const EFFECTS = {
  open: (effect) => void open(effect),
  takeOver: ({ over, sessionId, seconds, reason }) => {
    letGo(over);
    [current, next] = [next, null];
    if (sessionId) void hangUp(sessionId, seconds, reason);
  },
  meter: (effect) => void meter(effect),
  send: ({ message }) => current?.session.send(message),
  mute: ({ on }) => {
    for (const each of [current, next]) each?.session.mute(on);
  },
  silence: ({ on }) => current?.session.silence(on),
  release: (effect) => EFFECTS.drop(effect), // the server closes its account of it
  drop: ({ attempt, sessionId, reason }) => {
    letGo(attempt);
    if (sessionId) void hangUp(sessionId, attempt === state.attempt ? state.seconds : null, reason);
  },
  // The connection stays up for the service's own goodbye.
  goodbye: ({ sessionId, seconds }) => sessionId && void hangUp(sessionId, seconds),
  delegate: ({ key, lines }) => void follow(key, "delegate", { hermes_session: conversation, delegation_id: key, lines }),
  follow: ({ key, runId, after }) => void follow(key, `runs/${runId}/updates?after=${after}`, null),
  poll: (effect) => void poll(effect),
  unfollow: ({ key }) => streams.get(key)?.abort(),
  stop: (effect) => void stop(effect),
  approve: (effect) => void approve(effect),
  draft: ({ text }) => view.draft(text),
  claim: (effect) => void claim(effect),
  told: (effect) => void confirm(effect),
  giveBack: ({ runId }) => void deliver(runId, { told: false }).catch(() => {}), // it lapses by itself
  keep: ({ lines }) => void keep(lines),
};

/** @param {{attempt: number, history: object[], call?: string}} effect */
async function open({ attempt, history, call }) {
  const renews = state.phase === "live"; // the session so far goes on meanwhile
  if (!renews) current?.session.close();
  const session = new Session(view.voice, (event) => {
    // A demo's voice is not played there.
    if (event.type === "soundBlocked") return demo ? undefined : allowSound();
    if (event.type === "deviceGone") return dispatch({ type: "notice", level: "error", text: `The ${event.device} is not there any more. The default one is used now.` });
    dispatch({ ...event, attempt, wallMs: Date.now() });
  });
  if (renews) next = { attempt, session };
  else current = { attempt, session };
  try {
    await session.open(async (sdp) => {
      const { session_id, sdp: answer, seconds_left } = demo
        ? { session_id: null, sdp: await demo.answer(sdp), seconds_left: null }
        : await api.post("session", { sdp, conversation, history, call, voice: settings.voice || undefined });
      dispatch({ type: "opened", attempt, sessionId: session_id, secondsLeft: seconds_left });
      return answer;
    }, state.muted, settings, demo?.microphone);
  } catch (error) {
    dispatch({ type: "failed", attempt, message: explained(error).message });
  }
}

/** @param {number} attempt */
function letGo(attempt) {
  if (next?.attempt === attempt) {
    next.session.close();
    next = null;
  }
  if (current?.attempt !== attempt) return;
  current.session.close();
  current = null;
}

/** Tell the server that a session is over; it hangs up what is not. @param {string} sessionId @param {number | null} seconds by the service's count @param {string} [reason] the error that ended it */
function hangUp(sessionId, seconds, reason) {
  return api.post("session/close", { session_id: sessionId, seconds, reason }, { keepalive: true }).catch(() => {}); // the server logs it
}

/** Tell the server that a session is up. It hangs up what it does not hear of for long. @param {{attempt: number, sessionId: string, seconds: number | null}} effect */
async function meter({ attempt, sessionId, seconds }) {
  const answer = await api.post("session/meter", { session_id: sessionId, seconds }).catch(() => null);
  if (answer) dispatch({ type: "allowed", attempt, secondsLeft: answer.seconds_left });
}

/** The browser wants a tap before it plays anything. */
function allowSound() {
  dispatch({ type: "notice", level: "error", text: "This browser holds the sound back. Tap anywhere to hear the voice." });
  document.addEventListener("click", () => void view.voice.play(), { once: true });
}

/** @param {string} key @param {string} path @param {object | null} body */
async function follow(key, path, body) {
  const controller = new AbortController();
  streams.set(key, controller);
  try {
    const take = (/** @type {any} */ update) => dispatch({ type: "update", key, update });
    await api.follow(path, body, take, controller.signal, () => dispatch({ type: "silent", key }));
    dispatch({ type: "streamEnded", key, refused: false });
  } catch (error) {
    if (controller.signal.aborted) return;
    const { message, status = 0 } = explained(error);
    if (status === 401) askForToken(message);
    dispatch({ type: "streamEnded", key, refused: status >= 400 && status < 500 && status !== 401, message });
  } finally {
    if (streams.get(key) === controller) streams.delete(key);
  }
}

/** Ask for what a stream does not bring. @param {{key: string, runId: string | null, after: number}} effect */
async function poll({ key, runId, after }) {
  /** @type {any[]} */
  const updates = [];
  try {
    if (runId) await api.follow(`runs/${runId}/updates?after=${after}&wait=0`, null, (update) => updates.push(update));
    else updates.push(...(await listed()).filter((run) => run.delegations.includes(key)).map(({ run_id, state }) => ({ type: "run", run_id, state })));
  } catch (error) {
    explained(error); // the stream, or its end, tells more
  }
  for (const update of updates) dispatch({ type: "update", key, update, polled: true });
  dispatch({ type: "polled", key, found: updates.length > 0, named: !!runId });
}

/** The server's runs of this conversation. @returns {Promise<any[]>} */
async function listed() {
  return (await api.get(`runs?conversation=${conversation}`)).runs;
}

/** @param {{key: string, runId: string}} effect */
async function stop({ key, runId }) {
  try {
    await api.post(`runs/${runId}/stop`, {});
  } catch (error) {
    dispatch({ type: "refused", key, message: explained(error).message });
  }
}

/** @param {{key: string, runId: string, requestId: string, choice?: string, heard?: string, typed?: string, late?: boolean}} effect */
async function approve({ key, runId, requestId, choice, heard, typed, late }) {
  const body = { run_id: runId, request_id: requestId, ...(choice ? { choice } : { heard }) };
  try {
    const answer = await api.post("approve", body);
    dispatch({ type: "answered", key, requestId, choice: answer.choice, more: answer.more, typed, late });
  } catch (error) {
    const { message, code } = explained(error);
    dispatch({ type: "answered", key, requestId, choice: null, message, code, typed, late });
  }
}

/** What this page does about a run's end. It may be the last thing it does. @param {string} runId @param {{told?: boolean}} [more] */
function deliver(runId, more) {
  return api.post(`runs/${runId}/delivered`, { page, ...more }, { keepalive: true });
}

/** @param {{key: string, runId: string}} effect */
async function claim({ key, runId }) {
  try {
    await deliver(runId);
    dispatch({ type: "claimed", key, mine: true });
  } catch (error) {
    const { status = 0, code } = explained(error);
    // A run that the server has forgotten can be told by nobody else.
    dispatch({ type: "claimed", key, mine: status === 404 ? true : status === 409 ? false : null, told: code === "delivered" });
  }
}

/** @param {{key: string, runId: string}} effect */
async function confirm({ key, runId }) {
  try {
    await deliver(runId, { told: true });
    dispatch({ type: "confirmed", key, known: true });
  } catch (error) {
    const { message, status = 0 } = explained(error);
    if (status === 401 && api.token) askForToken(message); // a wrong one would be counted every time
    dispatch({ type: "confirmed", key, known: status === 404 });
  }
}

/** It may be the last thing this page does. @param {object[]} lines */
async function keep(lines) {
  try {
    const keepalive = new Blob([JSON.stringify(lines)]).size < KEEPALIVE_BYTES;
    await api.post(`conversations/${conversation}/lines`, { lines }, { keepalive });
  } catch (error) {
    // What the server refuses for good would be refused again.
    const { status = 0 } = explained(error);
    if (![400, 413].includes(status)) dispatch({ type: "notKept" });
  }
}

/** @param {boolean} on */
async function keepAwake(on) {
  if (!on || document.visibilityState !== "visible") {
    void wakeLock?.release();
    wakeLock = null;
  } else if (!wakeLock && navigator.wakeLock) {
    wakeLock = await navigator.wakeLock.request("screen").catch(() => null);
    wakeLock?.addEventListener("release", () => (wakeLock = null));
  }
}

/** @param {string} why */
function askForToken(why) {
  sessionStorage.removeItem("token");
  localStorage.removeItem("token");
  api.token = "";
  view.askForToken(why);
}

/** @param {string} id */
function openConversation(id) {
  conversation = id;
  localStorage.setItem("conversation", id);
}

async function showConversations() {
  try {
    const { conversations } = await api.get("conversations");
    view.showConversations(conversations, conversation);
  } catch (error) {
    dispatch({ type: "notice", level: "error", text: explained(error).message });
  }
}

/** @param {string} id */
async function forget(id) {
  try {
    await api.delete(`conversations/${id}`);
    if (id === conversation) return switchTo("");
    await showConversations();
  } catch (error) {
    view.closeConversations();
    dispatch({ type: "notice", level: "error", text: explained(error).message });
  }
}

/** Another conversation is another page. @param {string} id empty for a new one */
function switchTo(id) {
  dispatch({ type: "leave" });
  openConversation(id || newId());
  location.reload();
}

/** What the server's settings say of a call's course and its price. @param {any} config */
function termsOf(config) {
  return {
    greeting: config.greeting,
    hangUpPhrases: config.hang_up_phrases,
    onLongRun: config.on_long_run,
    longRunMs: config.long_run_seconds * 1000,
    prices: { active: config.price_per_minute, standby: config.standby_price_per_minute, currency: config.currency },
  };
}

/** The voice model's place is taken by a part of this page. */
async function beginDemo() {
  const { Demo, SENTENCES, watchVoice } = await import("./demo.js");
  const made = (demo ??= new Demo(view.voice));
  view.showDemo(SENTENCES, (text) => made.hear(text));
  void watchVoice(view.showVoice);
}

/** @param {boolean} [anew] only if they are shown already */
async function showSettings(anew = false) {
  const devices = await findDevices();
  if (anew && !view.settingsShown()) return;
  const token = [localStorage, sessionStorage].some((store) => store.getItem("token") !== null);
  const chosen = { ...settings, progress: settings.progress || offered.progress };
  view.showSettings({ ...offered, ...devices, chosen, progress: PROGRESS, token });
}

/** @param {string} setting @param {string} value */
async function choose(setting, value) {
  settings = { ...settings, [setting]: value };
  localStorage.setItem("settings", JSON.stringify(settings));
  try {
    // During a renewal there are two.
    const sessions = [current, next].flatMap((each) => each?.session ?? []);
    if (setting === "microphone") await Promise.all(sessions.map((session) => session.useMicrophone(value)));
    if (setting === "speaker") await Promise.all(sessions.map((session) => session.useSpeaker(value)));
    if (setting === "progress") dispatch({ type: "set", progress: value });
  } catch (error) {
    dispatch({ type: "notice", level: "error", text: explained(error).message });
  }
}

/** As if the page was never let in; the call ends with it. */
function forgetToken() {
  localStorage.removeItem("token");
  sessionStorage.removeItem("token");
  location.reload();
}

/** A link that `--pair` printed brings a code, which is worth the token once. It does not stay in the address bar. */
async function arrive() {
  const [, code] = location.hash.match(/^#pair=(.*)$/) ?? [];
  if (code === undefined) return begin();
  history.replaceState(null, "", location.pathname + location.search);
  try {
    const { token } = await api.post("pair", { code });
    localStorage.setItem("token", token);
    sessionStorage.removeItem("token");
    dispatch({ type: "notice", level: "info", text: "This device is paired and keeps the access token. The settings can forget it." });
    await begin();
  } catch (error) {
    await begin(explained(error).message);
  }
}

/** Load what the server knows; without the right token, ask for it. @param {string} [why] a link did not pair this device */
async function begin(why) {
  api.token = sessionStorage.getItem("token") ?? localStorage.getItem("token") ?? "";
  // Without one that is needed nothing has to be asked: the answer would be no.
  if (!api.token && TOKEN_NEEDED) {
    askForToken(why ? `${why} ${ENTER_TOKEN}` : NO_TOKEN);
    return redraw();
  }
  try {
    const config = await api.get("config");
    view.hideTokenEntry();
    if (config.demo) await beginDemo();
    if (why) dispatch({ type: "notice", level: "error", text: why });
    offered = config;
    settings = readSettings(localStorage.getItem("settings"), config.voices);
    dispatch({
      type: "configured",
      idleSeconds: config.idle_seconds,
      stopPhrases: config.stop_phrases,
      stopSpeakingPhrases: config.stop_speaking_phrases,
      goOnPhrases: config.go_on_phrases,
      repeatPhrases: config.repeat_phrases,
      retryPhrases: config.retry_phrases,
      progress: settings.progress || config.progress,
      voiceApprovals: config.voice_approvals,
      page,
    });
    dispatch({ type: "agreed", terms: termsOf(config) });
    const { conversations } = await api.get("conversations");
    // A device that has no conversation yet goes on with the newest, unless it has begun one.
    const untouched = !known && !state.runs.length && !state.transcript.lines.length;
    if (untouched && conversations.length) openConversation(conversations[0].id);
    const { lines, now } = await api.get(`conversations/${conversation}`);
    // Lines and cards find their order by one clock, the server's, however long each list takes to come.
    const origin = performance.now() - now * 1000;
    dispatch({ type: "recalled", lines: lines.map((/** @type {any} */ line) => ({ ...line, at: placed(origin, line.at) })) });
    dispatch({ type: "listed", runs: await listed(), origin });
  } catch (error) {
    const { message, status } = explained(error);
    if (status === 401) askForToken(why ? `${why} ${ENTER_TOKEN}` : api.token ? "That token was not accepted. Check it and try again." : NO_TOKEN);
    else if (status === 429) askForToken(message); // too many wrong ones; the right one is let in all the same
    else dispatch({ type: "notice", level: "error", text: message });
    redraw();
  }
}

view.bind({
  start: () => dispatch({ type: "dial" }),
  hangUp: () => dispatch({ type: "hangUp" }),
  mute: () => dispatch({ type: "mute", on: !state.muted }),
  stopSpeaking: () => dispatch({ type: "stopSpeaking" }),
  goOn: () => dispatch({ type: "goOn" }),
  sayAgain: () => dispatch({ type: "sayAgain" }),
  stopTask: () => {
    for (const run of state.runs.filter((r) => !r.result && !r.stopAsked)) dispatch({ type: "stopRun", key: run.key });
  },
  retry: (key) => dispatch({ type: "retry", key }),
  send: (text) => dispatch({ type: "typed", text, id: newId() }),
  approve: (key, requestId, choice) => dispatch({ type: "approve", key, requestId, choice }),
  conversations: () => void showConversations(),
  switchTo,
  forget: (id) => void forget(id),
  settings: () => void showSettings(),
  choose: (setting, value) => void choose(setting, value),
  forgetToken,
  token: (token, remember) => {
    // A token is ASCII without spaces; copying brings along what nobody sees, and fetch would not send.
    (remember ? localStorage : sessionStorage).setItem("token", token.replace(/[^!-~]/g, ""));
    void begin();
  },
});
setInterval(() => dispatch({ type: "tick" }), TICK_MS);
addEventListener("pagehide", () => dispatch({ type: "left" }));
addEventListener("pageshow", ({ persisted }) => persisted && dispatch({ type: "returned" }));
onDeviceChange(() => {
  void current?.session.checkSpeaker();
  for (const each of [current, next]) void each?.session.checkMicrophone();
  void showSettings(true);
});
addEventListener("hashchange", () => location.hash && void arrive());
void arrive();
