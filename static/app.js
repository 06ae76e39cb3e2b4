// The hall: builds the parts, holds the state, carries out effects. It decides nothing.

import { Api, ApiError } from "./api.js";
import { START, step } from "./call.js";
import { CallError, Session } from "./rtc.js";
import * as view from "./view.js";

/** @typedef {import("./wire.js").Event} Event */
/** @typedef {import("./call.js").Effect} Effect */

const TICK_MS = 200;

const api = new Api();
let state = START;
let timer = 0;
/** @type {{attempt: number, session: Session} | null} */
let current = null;
/** @type {Map<string, AbortController>} */
const streams = new Map();
/** @type {WakeLockSentinel | null} */
let wakeLock = null;

const conversation = localStorage.getItem("conversation") ?? crypto.randomUUID?.() ?? `c${Date.now()}${Math.random().toString(36).slice(2)}`;
localStorage.setItem("conversation", conversation);

/** @param {Event} event */
function dispatch(event) {
  const [next, effects] = step(state, { at: performance.now(), ...event });
  state = next;
  for (const effect of effects) EFFECTS[effect.do](effect);
  if (!timer) timer = window.setTimeout(redraw, 16);
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

/** @param {{key: string, runId: string, requestId: string, choice?: string, heard?: string, typed?: string}} effect */
async function approve({ key, runId, requestId, choice, heard, typed }) {
  const body = { run_id: runId, request_id: requestId, ...(choice ? { choice } : { heard }) };
  try {
    const answer = await api.post("approve", body);
    dispatch({ type: "answered", key, requestId, choice: answer.choice, typed });
  } catch (error) {
    dispatch({ type: "answered", key, requestId, choice: null, message: explained(error).message, typed });
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

/** Load what the server knows; without the right token, ask for it. */
async function begin() {
  api.token = sessionStorage.getItem("token") ?? localStorage.getItem("token") ?? "";
  try {
    const config = await api.get("config");
    view.hideTokenEntry();
    dispatch({ type: "configured", idleSeconds: config.idle_seconds });
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
  stopTask: () => {
    for (const run of state.runs.filter((r) => !r.result && !r.stopAsked)) dispatch({ type: "stopRun", key: run.key });
  },
  send: (text) => dispatch({ type: "typed", text, id: crypto.randomUUID?.().replaceAll("-", "") ?? `${Date.now()}` }),
  approve: (key, requestId, choice) => dispatch({ type: "approve", key, requestId, choice }),
  token: (token, remember) => {
    (remember ? localStorage : sessionStorage).setItem("token", token);
    void begin();
  },
});
setInterval(() => dispatch({ type: "tick" }), TICK_MS);
addEventListener("pagehide", () => {
  if (state.sessionId) void hangUp(state.sessionId);
});
void begin();
