// What servers' prefix caches hold and save, and each model's queue.

import { count, percent, plural } from "./format.js";
import { h } from "./vendor/preact.mjs";
import { meter } from "./worker_card.js";

const ROLES = ["prefill", "decode", "both"];

export function caches(store) {
  const place = (worker) => `${ROLES.indexOf(worker.role)} ${worker.id}`;
  const workers = [...store.workers.values()].sort((one, other) => place(one).localeCompare(place(other), "en"));
  return h("div", { class: "stack" },
    h("section", { class: "card panel", "aria-labelledby": "caches-title" },
      h("div", { class: "section-head" },
        h("h2", { id: "caches-title" }, "Prefix caches"),
        h("p", { class: "quiet small" }, `All servers: ${percent(store.stats.cache_hit_rate)} of the prompt tokens of the last ${store.stats.window_s} s`),
      ),
      workers.length === 0
        ? h("p", { class: "empty" }, "No servers.")
        : h("ul", { class: "cache-list" }, workers.map(cacheOf)),
      h("p", { class: "meter-key quiet small" },
        h("span", { class: "swatch" }), "used", h("span", { class: "swatch is-cached" }), "cached, freed when a request needs room"),
    ),
    models(store),
  );
}

function cacheOf(worker) {
  const { stats } = worker;
  const rate = worker.recent_prompt_tokens ? worker.recent_cached_tokens / worker.recent_prompt_tokens : null;
  const figures = [
    ["hit rate", percent(rate)],
    ["prompt tokens", count(worker.recent_prompt_tokens), "of the last minute"],
    ["cached", count(worker.recent_cached_tokens), "prompt tokens of the last minute that were not computed"],
    ["kept states", count(stats?.cached_states), "states in the cache: where a request can resume"],
    ["known starts", count(worker.cached_prefixes ?? undefined), "starts that the router knows when it chooses a server"],
  ];
  return h("li", { class: `cache is-${worker.role}`, key: worker.id, "data-cache": worker.id },
    h("div", { class: "cache-name" },
      h("h3", { class: "mono" }, worker.id),
      h("span", { class: "quiet small" }, worker.role === "both" ? "prefill and decode" : worker.role),
    ),
    stats
      ? h("div", { class: "cache-meters" },
          meter("KV blocks", stats.num_blocks, stats.free_blocks, stats.cached_blocks),
          meter("State slots", stats.num_slots, stats.free_slots, stats.cached_states))
      : h("p", { class: "quiet small" }, worker.problem || "No figures from this server yet."),
    h("dl", { class: "cache-figures" }, figures.map(([name, value, title]) =>
      h("div", { key: name, title }, h("dt", null, name), h("dd", null, value)))),
  );
}

function models({ models: all, config }) {
  if (!all.length) return null;
  const hasKept = all.some((model) => model.conversations);
  return h("section", { class: "card panel", "aria-labelledby": "models-title" },
    h("div", { class: "section-head" },
      h("h2", { id: "models-title" }, "Queues"),
      h("p", { class: "quiet small" }, config?.hold_s ? `Requests wait ${plural(config.hold_s, "second")} at most for a server that is away` : ""),
    ),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of queues" }, h("table", null,
      h("thead", null, h("tr", null,
        [["Model", ""], ["In flight", "is-number"], ["Queued", "is-number"], ["Held", "is-number"],
          ["Places", "is-number"], hasKept && ["Kept", "is-number"]]
          .filter(Boolean).map(([title, kind]) => h("th", { scope: "col", class: kind, key: title }, title)))),
      h("tbody", null, all.map((model) => h("tr", { key: model.name, "data-model": model.name },
        h("td", { class: "mono model" }, model.name),
        h("td", { class: "is-number" }, count(model.in_flight)),
        h("td", { class: "is-number" }, count(model.queued)),
        h("td", { class: "is-number" }, count(model.held)),
        h("td", { class: "is-number" }, count(model.places)),
        hasKept && h("td", { class: "is-number", title: "conversations whose state is kept for the next turn" }, count(model.conversations)),
      ))),
    )),
  );
}
