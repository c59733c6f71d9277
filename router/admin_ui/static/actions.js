// What a person can do.

import * as api from "./api.js";
import { forgetToken, keepToken } from "./token.js";

const NOTICE_MS = 6_000;
const DETAIL_INTERVAL_MS = 1_000;

const DONE = {
  drain: (id) => `${id} takes no new requests.`,
  undrain: (id) => `${id} takes requests again.`,
  abort: (id) => `Request ${id} is aborted.`,
};

export class Actions {
  #store;
  #feed;
  #noticeTimer = null;
  #detailTimer = null;

  constructor(store, feed) {
    this.#store = store;
    this.#feed = feed;
  }

  signIn = (token) => {
    keepToken(token);
    this.#store.change((store) => (store.link = { state: "connecting" }));
    this.#feed.start();
  };

  signOut = () => {
    forgetToken();
    this.#feed.stop();
    this.#store.change((store) => {
      store.forgetData();
      store.link = { state: "signed_out" };
      store.question = store.opened = store.notice = null;
    });
  };

  retryNow = () => this.#feed.hurry();

  filter = (filter) => this.#store.change((store) => (store.filter = filter));

  /** Asks a person before it drains, undrains or aborts; `answer` gets the reply. */
  ask = (kind, id) => this.#store.change((store) => (store.question = { kind, id }));

  answer = (isYes) => {
    const question = this.#store.question;
    this.#store.change((store) => (store.question = null));
    if (isYes && question) this.#carryOut(question);
  };

  undrain = (id) => this.#carryOut({ kind: "undrain", id });

  async #carryOut({ kind, id }) {
    this.#store.change((store) => store.busy.add(id));
    try {
      await api[kind](id);
      this.#say(DONE[kind](id));
      // The event stream sends this too, but the page should be right when the notice appears.
      const workers = kind === "abort" ? [] : await api.getWorkers();
      this.#store.change((store) => workers.forEach((worker) => store.takeWorker(worker)));
    } catch (error) {
      if (error instanceof api.Refused) this.#feed.start(); // the feed meets the same refusal and shows it
      else this.#say(`Could not ${kind} ${id}: ${error.message}.`, true);
    } finally {
      this.#store.change((store) => store.busy.delete(id));
    }
  }

  #say(text, isBad = false) {
    clearTimeout(this.#noticeTimer);
    this.#store.change((store) => (store.notice = { text, isBad }));
    this.#noticeTimer = setTimeout(() => this.#store.change((store) => (store.notice = null)), NOTICE_MS);
  }

  /** Shows a request's timeline, and keeps it up to date until the request has ended. */
  open = (id) => {
    this.#store.change((store) => (store.opened = { id, detail: null, problem: null }));
    this.#refresh(id);
  };

  close = () => {
    clearTimeout(this.#detailTimer);
    this.#store.change((store) => (store.opened = null));
  };

  async #refresh(id) {
    clearTimeout(this.#detailTimer);
    const known = this.#store.requests.get(id)?.state;
    let detail = null;
    let problem = null;
    try {
      detail = { ...(await api.getRequest(id)), at: Date.now() };
    } catch (error) {
      problem = error.message || "the token was refused";
    }
    if (this.#store.opened?.id !== id) return; // closed, or another request was opened
    this.#store.change((store) => (store.opened = { id, detail: detail ?? store.opened.detail, problem }));
    if (detail === null || !["finished", "failed", "cancelled"].includes(known ?? detail.state)) {
      this.#detailTimer = setTimeout(() => this.#refresh(id), DETAIL_INTERVAL_MS);
    }
  }
}
