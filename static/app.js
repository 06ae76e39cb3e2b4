// The hall: builds the parts, holds the state, carries out effects. It decides nothing.

import { Api, ApiError } from "./api.js";
import { settlesAt, START, step } from "./call.js";
import { CallError, Session } from "./rtc.js";
import * as view from "./view.js";

/** @typedef {import("./wire.js").Event} Event */
/** @typedef {import("./call.js").Effect} Effect */

const TICK_MS = 200;

const api = new Api();
let state = START;
let timer = 0;
/** For words that are complete between two ticks. */
let wake = 0;
/** @type {{attempt: number, session: Session} | null} */
let current = null;
/** @type {Map<string, AbortController>} */
const streams = new Map();
/** @type {WakeLockSentinel | null} */
let wakeLock = null;

const known = localStorage.getItem("conversation");
let conversation = known ?? newId();
localStorage.setItem("conversation", conversation);
const page = newId().slice(0, 12);

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
  open: (effect) => void open(effect.attempt, effect.history),
  send: ({ message }) => current?.session.send(message),
  mute: ({ on }) => current?.session.mute(on),
  silence: ({ on }) => current?.session.silence(on),
  release: ({ attempt }) => letGo(attempt),
  drop: ({ attempt, sessionId }) => {
    letGo(attempt);
    if (sessionId) void hangUp(sessionId);
  },
  delegate: ({ key, lines }) => void follow(key, "delegate", { hermes_session: conversation, delegation_id: key, lines }),
  follow: ({ key, runId, after }) => void follow(key, `runs/${runId}/updates?after=${after}`, null),
  unfollow: ({ key }) => streams.get(key)?.abort(),
  stop: (effect) => void stop(effect),
  approve: (effect) => void approve(effect),
  draft: ({ text }) => view.draft(text),
  claim: (effect) => void claim(effect),
  keep: ({ lines }) => void keep(lines),
};

/** @param {number} attempt @param {object[]} history */
async function open(attempt, history) {
  current?.session.close();
  const session = new Session(view.voice, (event) => {
    if (event.type === "soundBlocked") return allowSound();
    if (event.type === "microphoneEnded") return dispatch({ type: "notice", level: "error", text: "The microphone was taken away. Hang up and start the call again." });
    dispatch({ ...event, attempt });
  });
  current = { attempt, session };
  try {
    await session.open(async (sdp) => {
      const { session_id, sdp: answer } = await api.post("session", { sdp, conversation, history });
      dispatch({ type: "opened", attempt, sessionId: session_id });
      return answer;
    }, state.muted);
  } catch (error) {
    dispatch({ type: "failed", attempt, message: explained(error).message });
  }
}

/** @param {number} attempt */
function letGo(attempt) {
  if (current?.attempt !== attempt) return;
  current.session.close();
  current = null;
}

/** @param {string} sessionId */
function hangUp(sessionId) {
  return api.post("session/close", { session_id: sessionId }, { keepalive: true }).catch(() => {}); // the server logs it
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
    await api.follow(path, body, (update) => dispatch({ type: "update", key, update }), controller.signal);
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
    dispatch({ type: "answered", key, requestId, choice: answer.choice, typed, late });
  } catch (error) {
    const { message, code } = explained(error);
    dispatch({ type: "answered", key, requestId, choice: null, message, code, typed, late });
  }
}

/** @param {{key: string, runId: string}} effect */
async function claim({ key, runId }) {
  try {
    await api.post(`runs/${runId}/delivered`, { page });
    dispatch({ type: "claimed", key, mine: true });
  } catch (error) {
    const { status = 0 } = explained(error);
    // A run that the server has forgotten can be told by nobody else.
    dispatch({ type: "claimed", key, mine: status === 404 ? true : status === 409 ? false : null });
  }
}

/** It may be the last thing this page does. @param {object[]} lines */
async function keep(lines) {
  try {
    await api.post(`conversations/${conversation}/lines`, { lines }, { keepalive: JSON.stringify(lines).length < 60_000 });
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

/** Load what the server knows; without the right token, ask for it. */
async function begin() {
  api.token = sessionStorage.getItem("token") ?? localStorage.getItem("token") ?? "";
  try {
    const config = await api.get("config");
    view.hideTokenEntry();
    dispatch({
      type: "configured",
      idleSeconds: config.idle_seconds,
      stopPhrases: config.stop_phrases,
      goOnPhrases: config.go_on_phrases ?? ["go on", "continue", "weiter"],
      repeatPhrases: config.repeat_phrases ?? ["say that again", "repeat that", "again", "noch einmal"],
      progress: config.progress,
      voiceApprovals: config.voice_approvals,
      page,
    });
    const { conversations } = await api.get("conversations");
    // A device that has no conversation yet goes on with the newest, unless it has begun one.
    const untouched = !known && !state.runs.length && !state.transcript.lines.length;
    if (untouched && conversations.length) openConversation(conversations[0].id);
    const { lines } = await api.get(`conversations/${conversation}`);
    const age = (/** @type {number} */ at) => Math.max(0, Date.now() - at * 1000);
    dispatch({ type: "recalled", lines: lines.map((/** @type {any} */ line) => ({ ...line, age: age(line.at) })) });
    const { runs } = await api.get(`runs?conversation=${conversation}`);
    dispatch({ type: "listed", runs });
  } catch (error) {
    const { message, status } = explained(error);
    if (status === 401) askForToken(api.token ? "That token was not accepted. Check it and try again." : "This server asks for its access token.");
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
  send: (text) => dispatch({ type: "typed", text, id: newId() }),
  approve: (key, requestId, choice) => dispatch({ type: "approve", key, requestId, choice }),
  conversations: () => void showConversations(),
  switchTo,
  forget: (id) => void forget(id),
  token: (token, remember) => {
    (remember ? localStorage : sessionStorage).setItem("token", token);
    void begin();
  },
});
setInterval(() => dispatch({ type: "tick" }), TICK_MS);
addEventListener("pagehide", () => {
  dispatch({ type: "leave" });
  if (state.sessionId) void hangUp(state.sessionId);
});
void begin();
