// Keeps the store up to date: gets a snapshot, then the router's events, and both again after each break.

import {
  Failed, Refused, getConfig, getKeys, getModels, getProcesses, getRequests, getStats, getWorkers, openEvents,
} from "./api.js";
import { eventsOf } from "./event_stream.js";

const REQUESTS_AT_START = 100;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;

export class Feed {
  #store;
  #run = null;

  constructor(store) {
    this.#store = store;
    addEventListener("online", () => this.hurry());
  }

  start() {
    this.stop();
    this.#run = { stop: new AbortController(), hurry: () => {} };
    this.#keepUp(this.#run);
  }

  stop() {
    this.#run?.stop.abort();
    this.#run?.hurry();
    this.#run = null;
  }

  /** Ends the wait before the next attempt. */
  hurry() {
    this.#run?.hurry();
  }

  async #keepUp(run) {
    const change = (update, options) => run.stop.signal.aborted || this.#store.change(update, options);
    let breaks = 0;
    while (!run.stop.signal.aborted) {
      change((store) => (store.link = { state: breaks ? "reconnecting" : "connecting", since: store.link.since }));
      let problem;
      try {
        await this.#follow(run, change, () => (breaks = 0));
      } catch (error) {
        if (error instanceof Refused) return change((store) => (store.link = { state: "refused" }));
        if (error instanceof Failed && error.status === 404) {
          return change((store) => (store.link = { state: "missing" }));
        }
        problem = error.message;
      }
      const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** breaks) * (0.75 + 0.5 * Math.random());
      breaks += 1;
      change((store) => {
        const since = store.link.since ?? Date.now();
        store.link = { state: "reconnecting", problem, since, retryAt: Date.now() + wait };
      });
      await new Promise((resume) => {
        run.hurry = resume;
        setTimeout(resume, wait);
      });
    }
  }

  /** Follows one connection to its end. Events that come while the snapshot is fetched wait in the response. */
  async #follow(run, change, onLive) {
    const attempt = new AbortController();
    const signal = AbortSignal.any([run.stop.signal, attempt.signal]);
    try {
      const response = await openEvents(signal);
      const [workers, requests, config, stats, keys, models, processes] = await Promise.all([
        getWorkers(), getRequests(REQUESTS_AT_START), getConfig(), getStats(), getKeys(), getModels(), getProcesses(),
      ]);
      onLive();
      change((store) => {
        store.takeSnapshot({ workers, requests, config, stats, keys, models, processes });
        store.link = { state: "live" };
      });
      for await (const event of eventsOf(response)) {
        change((store) => store.takeEvent(event), { now: false });
      }
    } finally {
      attempt.abort(); // frees the connection
    }
  }
}
