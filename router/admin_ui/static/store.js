// Everything that the page knows. It changes nowhere else.

const MAX_REQUESTS = 400; // beyond that, the oldest requests that have ended are forgotten
const HISTORY_S = 120;
const RENDER_INTERVAL_MS = 150; // a busy router sends hundreds of events a second

const ENDED = new Set(["finished", "failed", "cancelled"]);

export const hasEnded = (request) => ENDED.has(request.state);

/** What tells a request from all others: clients choose ids, and two router processes may have the same one. */
export const keyOf = ({ id, process }) => `${process ?? ""}/${id}`;

/** What the page to try a prompt shows before one was sent. */
export const NO_TRIAL = { state: "idle", thinking: "", answer: "", problem: null, usage: null, times: null, finish: null, id: null, isCode: false };
const FIRST_FORM = { kind: "chat", model: "", system: "", prompt: "", max_tokens: "256", temperature: "", top_p: "", seed: "", key: "" };

export class Store {
  #timer = null;
  #render;

  constructor(render) {
    this.#render = render;
    this.link = { state: "signed_out" }; // connecting, live, reconnecting, refused, missing
    this.view = "overview"; // caches, keys, try
    this.filter = "all"; // in_flight, failed
    this.question = null; // the action that waits for a yes: {kind, id, process}
    this.opened = null; // the request whose timeline is shown: {id, process, detail, problem}
    this.busy = new Set(); // workers' ids and requests' keys with an action under way
    this.notice = null; // {text, isBad}
    this.forgetTrial();
    this.forgetData();
  }

  forgetData() {
    this.workers = new Map();
    this.requests = new Map();
    this.stats = null;
    this.history = [];
    this.config = null;
    this.keys = [];
    this.models = [];
    this.processes = { processes: [], missing: [] };
    this.isLoaded = false;
  }

  forgetTrial() {
    this.trial = { ...NO_TRIAL, form: { ...FIRST_FORM } };
  }

  /** Applies `update` to this store and draws the page soon, or `now`. */
  change(update, { now = true } = {}) {
    update(this);
    if (now) {
      clearTimeout(this.#timer);
      this.#timer = null;
      this.#render();
    } else if (this.#timer === null) {
      this.#timer = setTimeout(() => {
        this.#timer = null;
        this.#render();
      }, RENDER_INTERVAL_MS);
    }
  }

  /** Replaces everything by the state at one moment. */
  takeSnapshot({ workers, requests, config, stats, keys, models, processes }) {
    const before = this.workers;
    this.workers = new Map();
    for (const worker of workers) this.takeWorker(worker, before.get(worker.id));
    this.requests = new Map();
    for (const request of requests) this.takeRequest(request);
    this.config = config;
    this.keys = keys;
    this.models = models;
    this.processes = processes;
    this.takeStats(stats);
    this.isLoaded = true;
  }

  takeEvent({ name, data }) {
    if (name === "worker") this.takeWorker(data);
    if (name === "worker_removed") this.workers.delete(data.id);
    if (name === "request") this.takeRequest(data);
    if (name === "config") this.config = data;
    if (name === "keys") this.keys = data.keys;
    if (name === "models") this.models = data.models;
    if (name === "processes") this.processes = data;
    if (name === "stats") this.takeStats(data);
  }

  takeWorker(worker, before = this.workers.get(worker.id)) {
    this.workers.set(worker.id, { ...worker, pace: paceOf(worker, before) });
  }

  takeRequest(request) {
    this.requests.set(keyOf(request), { ...request, at: Date.now() });
    if (this.requests.size <= MAX_REQUESTS) return;
    const ended = this.newestRequests().filter(hasEnded);
    for (const old of ended.slice(-MAX_REQUESTS / 4)) this.requests.delete(keyOf(old));
  }

  newestRequests() {
    return [...this.requests.values()].sort((one, other) => other.received_at - one.received_at);
  }

  takeStats(stats) {
    this.stats = stats;
    this.history = [...this.history.filter((old) => old.at > stats.at - HISTORY_S && old.at < stats.at), stats];
  }
}

/** Seconds since a request arrived or, if it has ended, that it took. */
export function ageOf(request) {
  return request.age_s + (hasEnded(request) ? 0 : (Date.now() - request.at) / 1000);
}

/** Tokens that a server computed per second since its last figures: counters of one incarnation at two moments. */
function paceOf(worker, before) {
  const now = Date.now();
  const tokens = worker.stats ? worker.stats.prefill_tokens + worker.stats.decode_tokens : null;
  const last = before?.pace;
  if (tokens === null || !last || last.tokens === null || before.incarnation !== worker.incarnation) {
    return { tokens, at: now, perSecond: null };
  }
  const elapsed = (now - last.at) / 1000;
  if (elapsed < 0.9) return last; // too short a time to measure
  return { tokens, at: now, perSecond: Math.max(0, tokens - last.tokens) / elapsed };
}
