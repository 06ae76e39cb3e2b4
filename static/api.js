// The sidecar's HTTP interface: fetch, the token, streams.

import { LineDecoder } from "./wire.js";

const FIRST_MS = 4000; // the sidecar's first line comes at once, but for a request that Hermes is slow to take
const SILENCE_MS = 20000; // its heartbeats come every 15 s

/** What the sidecar, or the way to it, answered instead of what was asked for. */
export class ApiError extends Error {
  /** @param {string} message @param {string} code @param {number} status 0 if there was no answer */
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

export class Api {
  token = "";

  /** @param {string} path */
  get(path) {
    return this.#call(path, {});
  }

  /** @param {string} path @param {object} body @param {RequestInit} [more] */
  post(path, body, more = {}) {
    return this.#call(path, { ...posting(body), ...more });
  }

  /** @param {string} path */
  delete(path) {
    return this.#call(path, { method: "DELETE" });
  }

  /**
   * Follow a run until its stream ends.
   * @param {string} path
   * @param {object | null} body to POST, null to GET
   * @param {(update: any) => void} onUpdate
   * @param {AbortSignal} [signal]
   * @param {() => void} [onSilence] it brings nothing for longer than the sidecar is ever silent
   */
  async follow(path, body, onUpdate, signal, onSilence = () => {}) {
    let timer = setTimeout(onSilence, FIRST_MS);
    try {
      const response = await this.#fetch(path, { ...(body ? posting(body) : {}), signal });
      if (!response.body) throw new ApiError("The answer has no body.", "network", 0);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const lines = new LineDecoder();
      for (;;) {
        const { value, done } = await reader.read();
        clearTimeout(timer);
        if (done) return;
        timer = setTimeout(onSilence, SILENCE_MS);
        for (const update of lines.feed(value)) onUpdate(update);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  /** @param {string} path @param {RequestInit} init */
  async #call(path, init) {
    return (await this.#fetch(path, init)).json();
  }

  /** @param {string} path @param {RequestInit} init */
  async #fetch(path, init) {
    const headers = { ...init.headers, ...(this.token ? { Authorization: `Bearer ${this.token}` } : {}) };
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...init, headers, cache: "no-store" });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new ApiError("hermes-voice cannot be reached. Check that it is running.", "network", 0);
    }
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    throw new ApiError(error?.message ?? `The server answered ${response.status}.`, error?.code ?? "", response.status);
  }
}

/** @param {object} body @returns {RequestInit} */
function posting(body) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}
