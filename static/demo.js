// In a demo: the far end of the call. It takes the page's offer and behaves as the voice
// model does, and nothing leaves this page: words come one by one, work is delegated, appends
// are placed and spoken. It speaks with a voice of this device; where there is none, what would be
// heard is in the transcript only, and the page says so.
//
// The page plays and measures the sound of the connection. That is a tone here, sent while
// the voice speaks and played at no volume, so that the meter hears what the user hears.

export const SENTENCES = [
  "What is the disk usage?",
  "Delete the old snapshots",
  "Compare the backup plans",
  "Try something that fails",
  "Yes, go ahead",
  "Stop",
];

const START_MS = 400; // from the open channel to session.started
const GRID_MS = 200; // the transcript's
const WORD_MS = 300; // of the user
const THINK_MS = 300; // from the user's last word to the delegation
const REPLY_MS = 900; // from there to a reply of the model's own
const PLACED_MS = 700; // from an append to its place in the timeline
const BEGIN_MS = 500; // from there to the first sound
const MS_PER_CHAR = 65; // of speech
const USAGE_MS = 15000;
const LIFE_SECONDS = 7200;
const TONE_HZ = 300;
const TONE = 0.2; // of full scale; the meter calls 0.05 sound
const SLOW_VOICE_MS = 5000; // over its time, then a voice has told of no end
const VOICES_MS = 1000; // within which a browser has loaded the voices of the device

const SMALL_TALK = [
  { words: /^(?:hello|hi|hey|good (?:morning|evening)|how are you)\b/i, reply: "Hello! Tell me what you need, and I hand it to Hermes." },
  { words: /^(?:thanks|thank you|great|nice|bye|goodbye)\b/i, reply: "You are welcome." },
];
const YES_OR_NO = /^(?:yes|yeah|yep|sure|ok|okay|go ahead|do it|allow|approve|no|nope|nah|don't|do not|deny|refuse)\b/i;

/**
 * What the voice does about a sentence: a reply of its own, "answer" to leave it to the open
 * question, or "delegate".
 * @param {string} text @param {boolean} asking
 */
export function decide(text, asking) {
  const said = text.trim();
  if (asking && YES_OR_NO.test(said)) return { kind: "answer", reply: "" };
  const small = SMALL_TALK.find(({ words }) => words.test(said) && said.length < 40);
  return small ? { kind: "talk", reply: small.reply } : { kind: "delegate", reply: "One moment." };
}

/** The words of a text as a transcript's deltas, each with a space before it. @param {string} text @returns {string[]} */
export function deltas(text) {
  return (text.match(/\S+/g) ?? []).map((word) => ` ${word}`);
}

/** A voice of this device that speaks the demo's language. Others send the text to a server. */
function localVoice() {
  return globalThis.speechSynthesis?.getVoices().find((voice) => voice.localService && voice.lang.startsWith("en"));
}

/** Report whether this device has a voice, and again when that changes. @param {(has: boolean) => void} report */
export async function watchVoice(report) {
  localVoice(); // the first call only has them loaded
  await wait(VOICES_MS);
  report(!!localVoice());
  globalThis.speechSynthesis?.addEventListener("voiceschanged", () => report(!!localVoice()));
}

/** Speaks on this device, and tells when it is done. */
class Speaker {
  #audio;
  #finish = () => {};

  /** @param {HTMLAudioElement} audio */
  constructor(audio) {
    this.#audio = audio;
    addEventListener("pagehide", () => this.stop());
  }

  /** Resolves when it is said, or was stopped. @param {string} text @returns {Promise<void>} */
  say(text) {
    this.stop();
    const least = text.length * MS_PER_CHAR;
    return new Promise((resolve) => {
      this.#finish = resolve;
      const voice = localVoice();
      if (!voice || this.#audio.muted) return void setTimeout(resolve, least);
      const utterance = new SpeechSynthesisUtterance(text);
      utterance.voice = voice;
      for (const end of ["end", "error"]) utterance.addEventListener(end, () => resolve());
      setTimeout(resolve, least * 2 + SLOW_VOICE_MS);
      speechSynthesis.speak(utterance);
    });
  }

  stop() {
    globalThis.speechSynthesis?.cancel();
    this.#finish();
  }
}

/** The demo's side of the page. */
export class Demo {
  #speaker;
  /** @type {AudioContext | null} */ #context = null;
  /** @type {MediaStream | null} */ #silence = null;
  /** @type {Line | null} */ #line = null;

  /** @param {HTMLAudioElement} audio what the page plays the call on */
  constructor(audio) {
    this.#speaker = new Speaker(audio);
    audio.volume = 0;
    // "Stop speaking" mutes it.
    audio.addEventListener("volumechange", () => audio.muted && this.#line?.hush());
  }

  /** In place of a microphone: a track of its own that carries silence. Call it after a tap. @returns {Promise<MediaStream>} */
  microphone = async () => (this.#silence ??= silence((this.#context ??= new AudioContext()))).clone();

  /** Take a call. @param {string} offer @returns {Promise<string>} the answer */
  async answer(offer) {
    this.#line?.close();
    const line = (this.#line = new Line(this.#speaker, (this.#context ??= new AudioContext())));
    return line.accept(offer);
  }

  /** The user says a sentence. @param {string} text */
  hear(text) {
    this.#line?.hear(text);
  }
}

/** Silence that is sent, as a microphone's is: without a source nothing would be. @param {AudioContext} context */
function silence(context) {
  const out = context.createMediaStreamDestination();
  const source = new ConstantSourceNode(context, { offset: 0 });
  source.connect(out);
  source.start();
  return out.stream;
}

/** One session. */
class Line {
  #peer = new RTCPeerConnection();
  #loudness;
  #tone;
  #speaker;
  /** @type {RTCDataChannel | null} */ #channel = null;
  #startedAt = 0; // 0 before session.started and after session.closed
  #muted = false;
  #asking = false; // was the user asked for a yes or no, and nothing since?
  #owed = 0; // commentaries that are not spoken yet
  #hearing = Promise.resolve(); // until the user's sentence is over
  #turn = 0; // counts what is said, so that what was cut off falls silent
  #ended = false;
  #usage = 0;

  /** @param {Speaker} speaker @param {AudioContext} context */
  constructor(speaker, context) {
    this.#speaker = speaker;
    this.#tone = new OscillatorNode(context, { frequency: TONE_HZ });
    this.#loudness = new GainNode(context, { gain: 0 });
  }

  /** @param {string} offer */
  async accept(offer) {
    const peer = this.#peer;
    const out = new MediaStreamAudioDestinationNode(/** @type {AudioContext} */ (this.#tone.context));
    this.#tone.connect(this.#loudness).connect(out);
    this.#tone.start();
    peer.addEventListener("datachannel", ({ channel }) => this.#open(channel));
    peer.addEventListener("connectionstatechange", () => ["failed", "closed"].includes(peer.connectionState) && this.close());
    await peer.setRemoteDescription({ type: "offer", sdp: offer });
    peer.addTrack(out.stream.getAudioTracks()[0], out.stream);
    await peer.setLocalDescription(await peer.createAnswer());
    while (peer.iceGatheringState !== "complete") {
      await new Promise((resolve) => peer.addEventListener("icegatheringstatechange", resolve, { once: true }));
    }
    return peer.localDescription?.sdp ?? "";
  }

  /** The user says a sentence. @param {string} text */
  hear(text) {
    this.#hearing = this.#hearing.then(() => this.#listen(text));
  }

  /** @param {string} text */
  async #listen(text) {
    if (!this.#startedAt || this.#muted || this.#ended) return;
    this.hush();
    const asking = this.#asking;
    for (const delta of deltas(text)) {
      this.#tell("session.input_transcript.delta", { delta, ...this.#span() });
      await wait(WORD_MS);
    }
    const { kind, reply } = decide(text, asking);
    await wait(THINK_MS);
    if (kind === "delegate") {
      const delegation = { id: `item_${crypto.randomUUID()}`, type: "delegation", target: "client" };
      this.#tell("session.delegation.created", { offset_ms: this.#now(), delegation });
    }
    if (reply) void this.#reply(reply);
  }

  /** Say something of its own, unless there is something else to say by then. @param {string} text */
  async #reply(text) {
    const turn = this.#turn;
    await wait(REPLY_MS);
    if (turn === this.#turn && !this.#owed) await this.#say(text);
  }

  /** Fall silent. */
  hush() {
    this.#turn += 1;
    this.#speaker.stop();
    this.#loudness.gain.value = 0;
  }

  close() {
    if (this.#ended) return;
    this.#ended = true;
    this.hush();
    clearInterval(this.#usage);
    this.#peer.close();
    this.#tone.stop();
  }

  /** @param {RTCDataChannel} channel */
  #open(channel) {
    this.#channel = channel;
    channel.addEventListener("message", ({ data }) => void this.#take(JSON.parse(data)));
    channel.addEventListener("close", () => this.close());
    setTimeout(() => {
      this.#startedAt = performance.now();
      this.#tell("session.started", { session: { status: "active", expires_at: Date.now() / 1000 + LIFE_SECONDS } });
      this.#usage = window.setInterval(() => this.#tell("session.usage.updated", { usage: this.#seconds() }), USAGE_MS);
    }, START_MS);
  }

  /** An event of the page. @param {any} event */
  async #take(event) {
    const [, kind, what] = event.type.split(".");
    if (kind === "input_audio") this.#muted = what === "mute";
    if (event.type === "session.close") {
      this.#tell("session.closed", { client_event_id: event.event_id, reason: "close_requested", usage: this.#seconds() });
      this.#startedAt = 0;
      this.hush();
    }
    if (what !== "append") return;
    // Whatever is said or noted after a question is about something else.
    this.#asking = kind === "commentary" && /yes or no\?$/.test(event.content);
    if (kind === "commentary") this.#owed += 1;
    await wait(PLACED_MS);
    this.#tell(`session.${kind}.appended`, { client_event_id: event.event_id, ...this.#span() });
    if (kind !== "commentary") return;
    await wait(BEGIN_MS);
    await this.#hearing;
    this.#owed -= 1;
    await this.#say(event.content);
  }

  /** Speak: sound, and the words as they come. What is being said is cut off. @param {string} text */
  async #say(text) {
    if (this.#ended || !this.#startedAt) return;
    this.hush();
    const turn = this.#turn;
    const said = this.#speaker.say(text);
    this.#loudness.gain.value = TONE;
    for (const delta of deltas(text)) {
      if (turn !== this.#turn) return;
      this.#tell("session.output_transcript.delta", { delta, ...this.#span() });
      await wait(delta.length * MS_PER_CHAR);
    }
    await said;
    if (turn === this.#turn) this.hush();
  }

  /** @param {string} type @param {object} fields */
  #tell(type, fields) {
    const event = { type, event_id: `event_${crypto.randomUUID()}`, ...fields };
    if (this.#channel?.readyState === "open") this.#channel.send(JSON.stringify(event));
  }

  #now() {
    return Math.floor((performance.now() - this.#startedAt) / GRID_MS) * GRID_MS;
  }

  #span() {
    return { start_ms: this.#now(), end_ms: this.#now() + GRID_MS };
  }

  #seconds() {
    return { seconds: Math.round((performance.now() - this.#startedAt) / 1000) };
  }
}

/** @param {number} ms */
function wait(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
