// One session's media: microphone, peer connection, data channel, meter.

import { fromVoice } from "./wire.js";

/** @typedef {import("./wire.js").Event} Event */

const GATHER_MS = 3000; // once a candidate exists
const GATHER_MOST_MS = 10000;
const METER_MS = 100;
const MEASURE_MS = 2000;
const LOUD = 6; // of 128, the peak that counts as sound
const QUIET_TICKS = 4;

/** A failure with words for a person. */
export class CallError extends Error {}

/** @type {Record<string, string>} */
const MICROPHONE = {
  NotAllowedError: "The microphone is not allowed. Allow it for this page in the browser's settings, then start the call again.",
  SecurityError: "The microphone is not allowed. Allow it for this page in the browser's settings, then start the call again.",
  NotReadableError: "The microphone is in use by another program. Close that, then start the call again.",
  AbortError: "The microphone is in use by another program. Close that, then start the call again.",
  NotFoundError: "No microphone was found. Connect one, then start the call again.",
  OverconstrainedError: "No microphone was found. Connect one, then start the call again.",
};

const INSECURE =
  "Browsers give no microphone to a page over plain http. Three ways out: open the page as " +
  "http://localhost on the machine itself; forward a port, with ssh -L 8790:localhost:8790 and the server's name, and open " +
  "http://localhost:8790 here; or use HTTPS, with --tls-cert, a reverse proxy or tailscale serve.";

const NO_NETWORK = "The browser found no network to hold the call over. Connect this computer to one, then start the call again.";

/** @typedef {{id: string, label: string}} Device */
/** @typedef {{microphone: string, speaker: string}} Chosen ids of devices, empty for the default ones */

/**
 * The devices there are, beside the default ones. Before the page was once allowed to listen,
 * browsers name none.
 * @returns {Promise<{microphones: Device[], speakers: Device[] | null}>} no speakers where the browser chooses
 */
export async function findDevices() {
  const found = (await navigator.mediaDevices?.enumerateDevices().catch(() => [])) ?? [];
  const named = (/** @type {string} */ kind, /** @type {string} */ word) =>
    found
      .filter((device) => device.kind === kind && device.deviceId && device.deviceId !== "default")
      .map(({ deviceId, label }, index) => ({ id: deviceId, label: label || `${word} ${index + 1}` }));
  const speakers = "setSinkId" in HTMLMediaElement.prototype ? named("audiooutput", "Speaker") : null;
  return { microphones: named("audioinput", "Microphone"), speakers };
}

/** @param {() => void} callback when a device has come or gone */
export function onDeviceChange(callback) {
  navigator.mediaDevices?.addEventListener("devicechange", callback);
}

export class Session {
  /** @type {RTCPeerConnection | null} */ #peer = null;
  /** @type {RTCDataChannel | null} */ #channel = null;
  /** @type {MediaStream | null} */ #microphone = null;
  /** @type {AudioContext | null} */ #context = null;
  /** @type {number | undefined} */ #meter;
  /** @type {number | undefined} */ #measuring;
  /** @type {MediaStream | null} */ #heard = null; // what the audio element plays of this session
  #closed = false;
  #swaps = 0;
  #isGone = false; // the microphone, and no other one opened
  #wanted = ""; // the microphone that was chosen last
  #speaker = "";
  #playing = false;
  #audio;
  #emit;

  /**
   * Call it inside the user's tap: it primes the audio element, unless another session has it.
   * @param {HTMLAudioElement} audio
   * @param {(event: Event) => void} emit
   */
  constructor(audio, emit) {
    this.#audio = audio;
    this.#emit = emit;
    if (!audio.srcObject) {
      audio.srcObject = this.#heard = new MediaStream();
      audio.muted = false;
    }
    audio.play().catch(() => {}); // an empty stream may refuse; the tap has counted
    if (window.isSecureContext) this.#context = new AudioContext();
  }

  /**
   * Open the microphone, then the connection.
   * @param {(sdp: string) => Promise<string>} exchange offer against answer
   * @param {boolean} muted
   * @param {Chosen} chosen
   * @param {() => Promise<MediaStream>} microphone
   */
  async open(exchange, muted, chosen, microphone = () => this.#openMicrophone(chosen.microphone)) {
    if (!window.isSecureContext || !navigator.mediaDevices) throw new CallError(INSECURE);
    [this.#wanted, this.#speaker] = [chosen.microphone, chosen.speaker];
    this.#microphone = await microphone();
    if (this.#closed) return this.#release();
    this.#emit({ type: "microphoneOpened" });
    const peer = (this.#peer = new RTCPeerConnection());
    for (const track of this.#microphone.getAudioTracks()) {
      track.enabled = !muted;
      track.addEventListener("ended", () => void this.#replaceLost());
      peer.addTrack(track, this.#microphone);
    }
    // While the first one was being opened, another may have been chosen.
    if (this.#wanted !== chosen.microphone) await this.useMicrophone(this.#wanted);
    this.#openChannel(peer);
    peer.addEventListener("track", (event) => void this.#play(event.streams[0] ?? new MediaStream([event.track])));
    peer.addEventListener("connectionstatechange", () => this.#report(peer.connectionState));
    await peer.setLocalDescription(await peer.createOffer());
    await gathered(peer);
    const offer = peer.localDescription?.sdp ?? "";
    if (!/^a=candidate:/m.test(offer)) throw new CallError(NO_NETWORK);
    // The text goes out as it is: the service refuses an offer without its last line end.
    const answer = await exchange(offer);
    if (this.#closed) return;
    try {
      await peer.setRemoteDescription({ type: "answer", sdp: answer });
    } catch {
      throw new CallError("The voice service's answer could not be used. Start the call again.");
    }
  }

  /** @param {object} message */
  send(message) {
    if (this.#channel?.readyState === "open") this.#channel.send(JSON.stringify(message));
  }

  /** The track stays: without it the service's timeline would stop. @param {boolean} on */
  mute(on) {
    for (const track of this.#microphone?.getAudioTracks() ?? []) track.enabled = !on;
  }

  /**
   * Go on with another microphone; if it does not open, with the one so far.
   * @param {string} id empty for the default one
   */
  async useMicrophone(id) {
    this.#wanted = id;
    const sender = this.#peer?.getSenders()[0];
    if (!sender || this.#closed) return;
    const number = ++this.#swaps;
    const opened = await this.#openMicrophone(id);
    const [track] = opened.getAudioTracks();
    if (this.#closed || number !== this.#swaps) return track.stop();
    const before = this.#microphone?.getAudioTracks() ?? [];
    track.enabled = before.every((old) => old.enabled);
    track.addEventListener("ended", () => void this.#replaceLost());
    this.#microphone = opened;
    try {
      await sender.replaceTrack(track);
    } finally {
      for (const old of before) old.stop();
    }
    if (this.#isGone && !this.#closed) this.#emit({ type: "microphoneOpened" });
    this.#isGone = false;
  }

  /** A device has come or gone: it may be a microphone where there was none. */
  async checkMicrophone() {
    if (this.#isGone) await this.useMicrophone(this.#wanted).catch(() => {}); // there is still none
  }

  /** @param {string} id empty for the default one */
  async useSpeaker(id) {
    this.#speaker = id;
    if (!this.#playing || !("setSinkId" in this.#audio) || this.#audio.sinkId === id) return;
    try {
      await this.#audio.setSinkId(id);
    } catch {
      this.#emit({ type: "deviceGone", device: "speaker" });
      await this.#audio.setSinkId("").catch(() => {}); // it is the default one already
    }
  }

  /** A device has come or gone: the speaker may be it. */
  async checkSpeaker() {
    const { speakers } = await findDevices();
    const id = this.#playing && this.#audio.sinkId;
    if (!id || !speakers || speakers.some((speaker) => speaker.id === id)) return;
    this.#emit({ type: "deviceGone", device: "speaker" });
    await this.useSpeaker("");
  }

  /** The microphone was unplugged, or taken away. */
  async #replaceLost() {
    if (this.#closed) return;
    try {
      await this.useMicrophone("");
      if (!this.#closed) this.#emit({ type: "deviceGone", device: "microphone" });
    } catch {
      this.#isGone = true;
      if (!this.#closed) this.#emit({ type: "microphoneEnded" });
    }
  }

  /** @param {string} id */
  #openMicrophone(id) {
    return openMicrophone(id, () => this.#emit({ type: "deviceGone", device: "microphone" }));
  }

  /** @param {boolean} on */
  silence(on) {
    this.#audio.muted = on;
  }

  /** Safe at any time, also twice. */
  close() {
    this.#closed = true;
    this.#release();
  }

  #release() {
    this.#playing = false;
    clearInterval(this.#meter);
    clearInterval(this.#measuring);
    for (const track of this.#microphone?.getTracks() ?? []) track.stop();
    this.#peer?.close();
    this.#context?.close().catch(() => {}); // it may be closed already
    this.#context = null;
    // The next session may have taken it over.
    if (this.#audio.srcObject === this.#heard) this.#audio.srcObject = null;
  }

  /** @param {RTCPeerConnection} peer */
  #openChannel(peer) {
    const channel = (this.#channel = peer.createDataChannel("oai-events"));
    channel.addEventListener("message", ({ data }) => {
      const event = typeof data === "string" ? fromVoice(data) : null;
      if (event && !this.#closed) this.#emit(event);
    });
    channel.addEventListener("close", () => {
      if (!this.#closed) this.#emit({ type: "lost" });
    });
  }

  /** @param {RTCPeerConnectionState} connection */
  #report(connection) {
    if (this.#closed) return;
    if (connection === "connected") this.#measuring ??= window.setInterval(() => void this.#measureMedia(), MEASURE_MS);
    if (connection === "failed") this.#emit({ type: "lost" });
    else this.#emit({ type: "link", broken: connection === "disconnected" });
  }

  /** How much audio has passed, either way. */
  async #measureMedia() {
    const passed = { sent: 0, received: 0 };
    for (const report of (await this.#peer?.getStats())?.values() ?? []) {
      if (report.type === "outbound-rtp") passed.sent += report.bytesSent;
      if (report.type === "inbound-rtp") passed.received += report.bytesReceived;
    }
    if (!this.#closed) this.#emit({ type: "media", ...passed });
  }

  /** @param {MediaStream} stream */
  async #play(stream) {
    this.#audio.srcObject = this.#heard = stream;
    if (this.#context) this.#measure(stream, this.#context);
    await this.#audio.play().catch(() => this.#emit({ type: "soundBlocked" }));
    // Earlier the speaker could not be set: the element was still changing its source.
    this.#playing = !this.#closed;
    await this.useSpeaker(this.#speaker);
  }

  /** @param {MediaStream} stream @param {AudioContext} context */
  #measure(stream, context) {
    const analyser = context.createAnalyser();
    analyser.fftSize = 512;
    context.createMediaStreamSource(stream).connect(analyser);
    const samples = new Uint8Array(analyser.fftSize);
    let on = false;
    let quiet = 0;
    this.#meter = window.setInterval(() => {
      analyser.getByteTimeDomainData(samples);
      const loud = samples.some((sample) => Math.abs(sample - 128) > LOUD);
      quiet = loud ? 0 : quiet + 1;
      if (loud === on || (on && quiet < QUIET_TICKS)) return;
      on = loud;
      this.#emit({ type: "sound", on });
    }, METER_MS);
  }
}

/** @param {string} id empty for the default one @param {() => void} gone the default one is taken instead */
async function openMicrophone(id, gone) {
  const which = id ? { deviceId: { exact: id } } : {}; // a mere wish is not always granted
  try {
    return await navigator.mediaDevices.getUserMedia({
      audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true, ...which },
    });
  } catch (error) {
    const name = error instanceof Error ? error.name : "";
    if (id && ["NotFoundError", "OverconstrainedError"].includes(name)) {
      gone();
      return openMicrophone("", gone);
    }
    throw new CallError(MICROPHONE[name] ?? "The microphone could not be opened. Check it, then start the call again.");
  }
}

/** Wait for ICE candidates: there is no way to send them later. @param {RTCPeerConnection} peer */
function gathered(peer) {
  return new Promise((resolve) => {
    const finish = () => resolve(undefined);
    setTimeout(finish, GATHER_MOST_MS);
    peer.addEventListener("icecandidate", () => setTimeout(finish, GATHER_MS));
    peer.addEventListener("icegatheringstatechange", () => peer.iceGatheringState === "complete" && finish());
    if (peer.iceGatheringState === "complete") finish();
  });
}
