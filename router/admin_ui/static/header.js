// The router's models, the state of the connection, and the result of the last action.

import { missingInWords, plural, seconds } from "./format.js";
import { h } from "./vendor/preact.mjs";

const VIEWS = { overview: "Overview", caches: "Caches", keys: "Keys", try: "Try it" };

/** The view that an address names; the overview if it names none. */
export const viewOf = (hash) => (Object.hasOwn(VIEWS, hash.slice(1)) ? hash.slice(1) : "overview");

export function header(store, actions) {
  const isLive = store.link.state === "live";
  return h("header", { class: "header" },
    h("img", { src: "ui/icon.svg", alt: "", width: 28, height: 28 }),
    h("h1", null, "Twinfang"),
    h("nav", { class: "views", "aria-label": "Pages" }, Object.entries(VIEWS).map(([view, title]) =>
      h("a", { key: view, href: `#${view}`, "aria-current": store.view === view ? "page" : undefined }, title))),
    h("span", { class: "models mono", title: modelsOf(store) }, modelsOf(store)),
    h("span", { class: `pill ${isLive ? "is-good" : "is-warn"}`, role: "status" },
      h("span", { class: "dot", "aria-hidden": "true" }),
      isLive ? "Live" : store.isLoaded ? "Reconnecting" : "Connecting",
    ),
    h("button", { class: "button is-small", onClick: actions.signOut }, "Sign out"),
  );
}

function modelsOf(store) {
  const names = [...new Set([...store.workers.values()].map((worker) => worker.model).filter(Boolean))].map(String);
  return names.length > 2 ? plural(names.length, "model") : names.join(", ");
}

/** Says that the page is out of date, since when and why. Nothing while the page is up to date. */
export function banner({ link, isLoaded }, actions) {
  if (link.state !== "reconnecting") return null;
  const now = Date.now();
  const left = Math.ceil(Math.max(0, (link.retryAt ?? now) - now) / 1000);
  const since = link.since && isLoaded ? ` The figures are ${seconds(Math.max(1, (now - link.since) / 1000))} old.` : "";
  return h("div", { class: "banner", role: "alert" },
    h("p", null, h("strong", null, "Disconnected"), link.problem ? ` (${link.problem}).` : ".", since),
    h("span", { class: "quiet", "aria-live": "off" }, left ? `Next try in ${left} s` : "Trying …"),
    h("button", { class: "button is-small", onClick: actions.retryNow }, "Try now"),
  );
}

/** Says which router processes do not answer. Nothing while all do. */
export function missing({ processes }) {
  if (!processes.missing.length) return null;
  return h("div", { class: "banner", role: "alert" },
    h("p", null, h("strong", null, "Not everything is shown"), `: ${missingInWords(processes.missing)}. `,
      "Its requests and figures are missing here. It gets changes when it answers again."),
  );
}

/** Says that operators' changes would not survive a restart of the router. Nothing while they would. */
export function unsaved({ config }) {
  if (!config?.warning) return null;
  return h("div", { class: "banner", role: "alert" },
    h("p", null, h("strong", null, "Not saved"), `: ${config.warning}.`),
  );
}

export function notice({ notice: said }) {
  return h("div", { class: "notices", role: "status", "aria-live": "polite" },
    said && h("p", { class: `notice ${said.isBad ? "is-bad" : ""}` }, said.text),
  );
}
