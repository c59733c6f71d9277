// What a person can do.

import * as api from "./api.js";
import { missingInWords } from "./format.js";
import { keyOf } from "./store.js";
import { forgetToken, keepToken } from "./token.js";
import { Trial } from "./trial.js";

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
  #trial = null;

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
    this.stopTrial();
    this.#store.change((store) => {
      store.forgetData();
      store.forgetTrial();
      store.link = { state: "signed_out" };
      store.question = store.opened = store.notice = null;
    });
  };

  show = (view) => this.#store.change((store) => (store.view = view));

  /** Keeps what a person types into the form to try a prompt. */
  edit = (name, value) => this.#store.change((store) => (store.trial.form[name] = value), { now: name === "kind" });

  startTrial = () => {
    this.stopTrial();
    this.#trial = new Trial(this.#store);
    this.#trial.run();
  };

  stopTrial = () => this.#trial?.stop();

  retryNow = () => this.#feed.hurry();

  filter = (filter) => this.#store.change((store) => (store.filter = filter));

  /** Asks a person before it drains, undrains or aborts; `answer` gets the reply. */
  ask = (kind, id, process) => this.#store.change((store) => (store.question = { kind, id, process }));

  answer = (isYes) => {
    const question = this.#store.question;
    this.#store.change((store) => (store.question = null));
    if (isYes && question) this.#carryOut(question);
  };

  undrain = (id) => this.#carryOut({ kind: "undrain", id });

  async #carryOut({ kind, id, process }) {
    const busy = kind === "abort" ? keyOf({ id, process }) : id;
    this.#store.change((store) => store.busy.add(busy));
    try {
      const changed = await api[kind](id, process);
      this.#say(DONE[kind](id) + (changed.missing?.length ? ` But ${missingInWords(changed.missing)}.` : ""));
      // The event stream sends this too, but the page should be right when the notice appears.
      const workers = kind === "abort" ? [] : await api.getWorkers();
      this.#store.change((store) => workers.forEach((worker) => store.takeWorker(worker)));
    } catch (error) {
      if (error instanceof api.Refused) this.#feed.start(); // the feed meets the same refusal and shows it
      else this.#say(`Could not ${kind} ${id}: ${error.message}.`, true);
    } finally {
      this.#store.change((store) => store.busy.delete(busy));
    }
  }

  #say(text, isBad = false) {
    clearTimeout(this.#noticeTimer);
    this.#store.change((store) => (store.notice = { text, isBad }));
    this.#noticeTimer = setTimeout(() => this.#store.change((store) => (store.notice = null)), NOTICE_MS);
  }

  /** Shows a request's timeline, and keeps it up to date until the request has ended. */
  open = ({ id, process }) => {
    const opened = { id, process, detail: null, problem: null };
    this.#store.change((store) => (store.opened = opened));
    this.#refresh(opened);
  };

  close = () => {
    clearTimeout(this.#detailTimer);
    this.#store.change((store) => (store.opened = null));
  };

  async #refresh({ id, process }) {
    clearTimeout(this.#detailTimer);
    const known = this.#store.requests.get(keyOf({ id, process }))?.state;
    let detail = null;
    let problem = null;
    try {
      detail = { ...(await api.getRequest(id, process)), at: Date.now() };
    } catch (error) {
      problem = error.message || "the token was refused";
    }
    const { opened } = this.#store;
    if (opened === null || keyOf(opened) !== keyOf({ id, process })) return; // closed, or another one was opened
    this.#store.change((store) => (store.opened = { ...opened, detail: detail ?? opened.detail, problem }));
    if (detail === null || !["finished", "failed", "cancelled"].includes(known ?? detail.state)) {
      this.#detailTimer = setTimeout(() => this.#refresh({ id, process }), DETAIL_INTERVAL_MS);
    }
  }
}
