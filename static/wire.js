// What travels: NDJSON from the sidecar, events to and from the voice model. Pure.

/** @typedef {{type: string, [field: string]: any}} Event */

// The model takes 500 tokens an append; no script needs more than one token a byte.
export const APPEND_BYTES = 400;
// The sidecar's longest line is an answer of 100,000 characters.
const LINE_CHARS = 2_000_000;

/** Decodes NDJSON from chunks cut anywhere. */
export class LineDecoder {
  #rest = "";

  /**
   * @param {string} chunk
   * @returns {any[]} the values of the lines that ended in this chunk
   */
  feed(chunk) {
    const lines = (this.#rest + chunk).split("\n");
    this.#rest = lines.pop() ?? "";
    if (this.#rest.length > LINE_CHARS) throw new Error("a line is too long");
    return lines.filter((line) => line.trim()).map((line) => JSON.parse(line));
  }
}

// The model's events and ours. Types that are not here are ignored on purpose.
/** @type {Map<string, (event: any) => Event | null>} */
const FROM_VOICE = new Map(Object.entries({
  "session.started": (e) => ({ type: "started", expiresAt: number(e.session?.expires_at) }),
  "session.paused": () => ({ type: "paused" }),
  "session.resumed": () => ({ type: "resumed" }),
  "session.closed": (e) => ({ type: "closed", reason: string(e.reason) ?? "", ...counted(e) }),
  "session.input_transcript.delta": (e) => heard("user", e),
  "session.output_transcript.delta": (e) => heard("assistant", e),
  "session.delegation.created": (e) =>
    e.delegation?.target === "client" && string(e.delegation.id)
      ? { type: "delegated", id: e.delegation.id, placeMs: number(e.offset_ms) }
      : null,
  "session.commentary.appended": (e) =>
    // Without its place it cannot tell which words came after it.
    number(e.end_ms) === null ? null : { type: "placed", sent: string(e.client_event_id), endMs: e.end_ms },
  "session.thinking.appended": () => null,
  "session.usage.updated": (e) => (number(e.usage?.seconds) === null ? null : { type: "usage", ...counted(e) }),
  error: (e) => ({
    type: "trouble",
    code: code(e.error?.code) || code(e.error?.type) || "unknown",
    sent: string(e.error?.client_event_id) ?? string(e.client_event_id),
  }),
}));

/** @param {"user" | "assistant"} speaker @param {any} e @returns {Event | null} */
function heard(speaker, e) {
  if (!string(e.delta)) return null;
  return { type: "heard", speaker, text: e.delta, startMs: number(e.start_ms) ?? 0, endMs: number(e.end_ms) ?? 0, id: string(e.event_id) };
}

/** What the service says of the session so far, cumulative; `pausedSeconds` where it can pause. @param {any} e */
function counted(e) {
  const pausedSeconds = number(e.usage?.paused_seconds);
  return { seconds: number(e.usage?.seconds), ...(pausedSeconds === null ? {} : { pausedSeconds }) };
}

/** @param {any} value */
function string(value) {
  return typeof value === "string" ? value : null;
}

/** What names an error, as the screen and the server's log take it. @param {any} value */
function code(value) {
  return (string(value) ?? "").toLowerCase().replace(/[^a-z0-9]+/g, "_").slice(0, 64);
}

/** @param {any} value */
function number(value) {
  return Number.isFinite(value) && value >= 0 ? Number(value) : null;
}

/**
 * One message of the data channel as our event, null if it does not concern us.
 * @param {string} message
 * @returns {Event | null}
 */
export function fromVoice(message) {
  let event;
  try {
    event = JSON.parse(message);
  } catch {
    return null;
  }
  const read = FROM_VOICE.get(event?.type);
  return read ? read(event) : null;
}

/** Text for the model to say. @param {string} id @param {string} text @param {string | null} delegation */
export function commentary(id, text, delegation) {
  return append("session.commentary.append", id, text, delegation);
}

/** Text for the model to know. @param {string} id @param {string} text @param {string | null} delegation */
export function thinking(id, text, delegation) {
  return append("session.thinking.append", id, text, delegation);
}

/** @param {string} type @param {string} id @param {string} text @param {string | null} delegation */
function append(type, id, text, delegation) {
  return { type, event_id: id, delegation_id: delegation, content: cut(text, APPEND_BYTES) };
}

/** @param {string} id @param {boolean} muted */
export function muteMessage(id, muted) {
  return { type: `session.input_audio.${muted ? "mute" : "unmute"}`, event_id: id };
}

/** @param {string} id */
export function closeMessage(id) {
  return { type: "session.close", event_id: id };
}

/** Whether a text can be appended as it is. @param {string} text */
export function fits(text) {
  return new TextEncoder().encode(text).length <= APPEND_BYTES;
}

/**
 * The text, shortened to whole characters within a number of UTF-8 bytes.
 * @param {string} text
 * @param {number} bytes
 */
export function cut(text, bytes) {
  if (new TextEncoder().encode(text).length <= bytes) return text;
  let kept = "";
  let size = new TextEncoder().encode("…").length;
  for (const { segment } of new Intl.Segmenter().segment(text)) {
    size += new TextEncoder().encode(segment).length;
    if (size > bytes) break;
    kept += segment;
  }
  return `${kept}…`;
}
