// The whole page as a function of the store. No part of the page keeps state of its own.

import { confirmation } from "./confirmation.js";
import { throughput } from "./throughput.js";
import { caches } from "./caches.js";
import { banner, header, missing, notice, unsaved } from "./header.js";
import { keys } from "./keys.js";
import { latencies } from "./latencies.js";
import { requestTable } from "./request_table.js";
import { signIn } from "./sign_in.js";
import { timelineDialog } from "./timeline.js";
import { topology } from "./topology.js";
import { trialPage } from "./trial_page.js";
import { h } from "./vendor/preact.mjs";

const GATE = new Set(["signed_out", "refused", "missing"]);

export function page(store, actions) {
  if (GATE.has(store.link.state) || (store.link.state === "connecting" && !store.isLoaded)) {
    return h("div", { class: "gate" }, signIn(store, actions));
  }
  return h("div", { class: `page ${store.link.state === "live" ? "" : "is-stale"}` },
    header(store, actions),
    banner(store, actions),
    missing(store),
    unsaved(store),
    store.isLoaded ? content(store, actions) : skeleton(),
    confirmation(store, actions),
    timelineDialog(store, actions),
    notice(store),
  );
}

const VIEWS = {
  overview: (store, actions) => [
    throughput(store), topology(store, actions), latencies(store), requestTable(store, actions),
  ],
  caches: (store) => [caches(store)],
  keys: (store) => [keys(store)],
  try: (store, actions) => [trialPage(store, actions)],
};

const content = (store, actions) =>
  h("main", { class: "content", id: "content", key: store.view }, VIEWS[store.view](store, actions));

/** Takes the place of the figures until the first ones have come. */
function skeleton() {
  const rows = ["is-low", "is-high", "is-low"];
  return h("main", { class: "content", "aria-busy": "true", "aria-label": "Loading" },
    rows.map((size) => h("div", { class: `skeleton ${size}` })),
  );
}
