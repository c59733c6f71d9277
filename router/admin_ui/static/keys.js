// What each API key was used for, and how much of its limits.

import { count, percent, quantity } from "./format.js";
import { h } from "./vendor/preact.mjs";

const MAX_ROWS = 100;

const tokensOf = (key) => key.prompt_tokens + key.generated_tokens;

export function keys({ keys: all, processes }) {
  const most = Math.max(1, ...all.map(tokensOf));
  const since = Math.min(...processes.processes.map((one) => one.started_at));
  return h("section", { class: "card panel", "aria-labelledby": "keys-title" },
    h("div", { class: "section-head" },
      h("h2", { id: "keys-title" }, "API keys"),
      Number.isFinite(since) && h("p", { class: "quiet small" }, `Since ${new Date(since * 1000).toLocaleString()}`),
    ),
    all.length === 0
      ? h("p", { class: "empty" }, "No API keys: everybody may send requests. Give the router --api-keys-file FILE.")
      : h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of keys" }, table(all, most)),
    all.length > MAX_ROWS && h("p", { class: "quiet small more" }, `The ${MAX_ROWS} with the most tokens of ${count(all.length)}.`),
  );
}

function table(all, most) {
  const heads = [
    ["Key", ""], ["Requests", "is-number"], ["Not answered", "is-number is-wide"], ["Prompt", "is-number"],
    ["Cached", "is-number"], ["Generated", "is-number"], ["Share", "is-wide share"], ["Limit / used", "limits"],
  ];
  return h("table", { class: "keys" },
    h("thead", null, h("tr", null, heads.map(([title, kind]) => h("th", { scope: "col", class: kind, key: title }, title)))),
    h("tbody", null, all.slice(0, MAX_ROWS).map((key) => row(key, most))),
  );
}

function row(key, most) {
  const { completed = 0, cancelled = 0, refused = 0, failed = 0 } = key.requests;
  const bad = refused + failed;
  return h("tr", { key: key.name, "data-key": key.name },
    h("th", { scope: "row", class: "mono model", title: key.name }, key.name),
    h("td", { class: "is-number" }, count(completed + cancelled + bad)),
    h("td", { class: "is-number is-wide", title: `${count(refused)} refused, ${count(failed)} failed, ${count(cancelled)} cancelled by clients` },
      bad ? h("span", { class: "warn" }, count(bad)) : "0"),
    h("td", { class: "is-number" }, count(key.prompt_tokens)),
    h("td", { class: "is-number", title: `${count(key.cached_tokens)} tokens` },
      percent(key.prompt_tokens ? key.cached_tokens / key.prompt_tokens : null)),
    h("td", { class: "is-number" }, count(key.generated_tokens)),
    h("td", { class: "is-wide share" }, h("span", { class: "bar-of", style: { "--used": tokensOf(key) / most } }, h("span", null))),
    h("td", { class: "limits" }, key.limits?.length ? key.limits.map(limit) : h("span", { class: "quiet small" }, "no limits")),
  );
}

/** One limit of a key: a bar that turns amber, then red, as the limit comes near. */
function limit({ name, used, limit: most }) {
  const share = most ? Math.min(1, used / most) : 0;
  const tint = share >= 1 ? "is-bad" : share >= 0.8 ? "is-warn" : "is-good";
  const text = `${quantity(used)} of ${quantity(most)}`;
  return h("div", { class: `limit ${tint}`, key: name },
    h("span", { class: "quiet small" }, name),
    h("span", { class: "small" }, text),
    h("span", {
      class: "bar-of", role: "meter", "aria-label": name, "aria-valuetext": text,
      "aria-valuemin": 0, "aria-valuemax": most, "aria-valuenow": used, style: { "--used": share },
    }, h("span", null)),
  );
}
