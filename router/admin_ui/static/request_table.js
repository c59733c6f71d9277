// Requests under way and the last ones that have ended, newest first.

import { age, count, shortId } from "./format.js";
import { ageOf, hasEnded, keyOf } from "./store.js";
import { h } from "./vendor/preact.mjs";

const MAX_ROWS = 40;

const FILTERS = {
  all: ["All", () => true],
  in_flight: ["In flight", (request) => !hasEnded(request)],
  failed: ["Failed", (request) => request.state === "failed" || request.state === "cancelled"],
};

export const STATE_TINTS = {
  queued: "is-queued", prefill: "is-prefill", transfer: "is-transfer", decode: "is-decode",
  finished: "is-plain", failed: "is-bad", cancelled: "is-warn",
};

export function requestTable(store, actions) {
  const all = store.newestRequests();
  const rows = all.filter(FILTERS[store.filter][1]);
  return h("section", { class: "card requests", "aria-labelledby": "requests-title" },
    h("div", { class: "section-head" },
      h("h2", { id: "requests-title" }, "Requests"),
      filters(store, actions),
    ),
    rows.length === 0
      ? h("p", { class: "empty" }, all.length ? "No such requests." : "No requests yet.")
      : h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of requests" },
          table(rows.slice(0, MAX_ROWS), store, actions)),
    rows.length > MAX_ROWS && h("p", { class: "quiet small more" }, `The newest ${MAX_ROWS} of ${count(rows.length)}.`),
  );
}

function filters(store, actions) {
  return h("div", { class: "segments", role: "group", "aria-label": "Which requests" },
    Object.entries(FILTERS).map(([name, [title]]) => h("button", {
      key: name, "aria-pressed": String(store.filter === name), onClick: () => actions.filter(name),
    }, title)));
}

function table(rows, store, actions) {
  const hasKeys = rows.some((request) => request.key_name);
  const heads = [
    ["Request", ""], ["State", ""], ["Model", "is-wide"], ["Prompt", "is-number"], ["Generated", "is-number"],
    ["Path", "is-wide"], hasKeys && ["Key", "is-wide"], ["Age", "is-number"],
  ].filter(Boolean);
  return h("table", null,
    h("thead", null, h("tr", null,
      heads.map(([title, kind]) => h("th", { scope: "col", class: kind, key: title }, title)),
      h("th", { scope: "col", class: "is-action" }, h("span", { class: "visually-hidden" }, "Action")),
    )),
    h("tbody", null, rows.map((request) => row(request, hasKeys, store, actions))),
  );
}

function row(request, hasKeys, store, actions) {
  const { id } = request;
  return h("tr", { key: keyOf(request), "data-request": id, onClick: () => actions.open(request) },
    h("td", null, h("button", {
      class: "link mono", title: id, "aria-label": `Timeline of request ${id}`,
      onClick: (event) => {
        event.stopPropagation();
        actions.open(request);
      },
    }, shortId(id))),
    h("td", null, stateTag(request.state)),
    h("td", { class: "is-wide mono model", title: request.model }, request.model),
    h("td", { class: "is-number" }, count(request.prompt_tokens)),
    h("td", { class: "is-number" }, count(request.generated_tokens)),
    h("td", { class: "is-wide mono path" }, pathOf(request)),
    hasKeys && h("td", { class: "is-wide" }, request.key_name),
    h("td", { class: "is-number" }, age(ageOf(request))),
    h("td", { class: "is-action" }, hasEnded(request) ? null : abortButton(request, store, actions)),
  );
}

export const stateTag = (state) => h("span", { class: `tag ${STATE_TINTS[state] ?? ""}` }, state);

/** Prefill server → decode server, as far as they are known. */
export const pathOf = (request) => [request.prefill_worker, request.decode_worker].filter(Boolean).join(" → ");

export function abortButton({ id, process }, store, actions) {
  const isBusy = store.busy.has(keyOf({ id, process }));
  const ask = (event) => {
    event.stopPropagation(); // a click on the row would open the timeline
    if (!isBusy) actions.ask("abort", id, process);
  };
  return h("button", {
    class: "button is-small is-danger", "aria-disabled": String(isBusy),
    "aria-label": `Abort request ${id}`, onClick: ask,
  }, "Abort");
}
