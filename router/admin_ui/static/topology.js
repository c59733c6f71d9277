// The router, its pools, and what flows between them.

import { bytes, count, plural } from "./format.js";
import { h } from "./vendor/preact.mjs";
import { workerCard } from "./worker_card.js";

const POOLS = {
  prefill: { title: "Prefill", empty: "No prefill servers: only servers that do both can take prompts." },
  decode: { title: "Decode", empty: "No decode servers: requests are answered with 503." },
  both: { title: "Prefill and decode", empty: "" },
};

export function topology(store, actions) {
  const of = (role) => [...store.workers.values()].filter((worker) => worker.role === role).sort(byId);
  const [prefill, decode, both] = [of("prefill"), of("decode"), of("both")];
  const isPair = prefill.length + decode.length > 0 || both.length === 0;
  const [rate, unit] = bytes(store.stats.transfer.bytes_per_s);
  return h("section", { class: "topology", "aria-labelledby": "topology-title" },
    h("h2", { id: "topology-title", class: "visually-hidden" }, "Servers"),
    routerNode(store),
    flow("prompts", `${count(store.stats.in_flight)} in flight`, store.stats.in_flight > 0, "is-plain"),
    isPair && pool("prefill", prefill, store, actions),
    isPair && flow("NIXL", unit ? `${rate} ${unit}/s` : rate, store.stats.transfer.bytes_per_s > 0, "is-transfer"),
    isPair && pool("decode", decode, store, actions),
    both.length > 0 && pool("both", both, store, actions),
  );
}

const byId = (one, other) => String(one.id).localeCompare(String(other.id), "en", { numeric: true });

function routerNode({ stats, config, processes }) {
  const answering = processes.processes.length;
  const all = answering + processes.missing.length;
  const line = (name, value) => h("div", null, h("dt", null, name), h("dd", null, value));
  return h("div", { class: "router card" },
    h("h3", null, "Router"),
    h("dl", { class: "lines" },
      all > 1 && line("processes", h("span", { class: answering < all ? "warn" : "" }, `${answering} of ${all}`)),
      line("in flight", limited(stats.in_flight, config?.max_requests_in_flight * all)),
      line("queued", limited(stats.queued, config?.max_queue * all)),
      config?.prefill_policy && line("prefill policy", h("span", { class: "mono" }, config.prefill_policy)),
      config?.decode_policy && line("decode policy", h("span", { class: "mono" }, config.decode_policy)),
    ),
  );
}

const limited = (value, limit) =>
  h("span", null, count(value), limit ? h("span", { class: "quiet" }, ` of ${count(limit)}`) : null);

/** An arrow between two parts; it moves while something flows. */
function flow(what, amount, isFlowing, tint) {
  return h("div", { class: `flow ${tint} ${isFlowing ? "is-flowing" : ""}` },
    h("span", { class: "flow-what" }, what),
    h("span", { class: "flow-line", "aria-hidden": "true" }),
    h("span", { class: "flow-amount" }, amount),
  );
}

function pool(role, workers, store, actions) {
  const serving = workers.filter((worker) => worker.state === "serving");
  const queued = workers.reduce((sum, worker) => sum + (worker.queued_tokens ?? 0), 0);
  const running = workers.reduce((sum, worker) => sum + (worker.requests ?? 0), 0);
  return h("div", { class: `pool is-${role}`, role: "group", "aria-labelledby": `pool-${role}` },
    h("div", { class: "pool-head" },
      h("h3", { id: `pool-${role}` }, POOLS[role].title),
      workers.length > 0 && h("span", { class: serving.length === workers.length ? "quiet" : "warn" },
        `${serving.length} of ${workers.length} serving`),
      workers.length > 0 && h("span", { class: "quiet pool-load" },
        `${plural(running, "request")} · ${plural(queued, "queued token")}`),
    ),
    workers.length === 0
      ? h("p", { class: "empty" }, POOLS[role].empty)
      : [
          h("ul", { class: "workers" }, workers.map((worker) => workerCard(worker, store, actions))),
          h("p", { class: "meter-key quiet small" },
            h("span", { class: "swatch" }), "used",
            h("span", { class: "swatch is-cached" }), "cached, freed when a request needs room"),
        ],
  );
}
