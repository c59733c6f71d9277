// One server: its state, how full it is, and the button that drains it.

import { count, quantity } from "./format.js";
import { h } from "./vendor/preact.mjs";

const STATES = {
  serving: ["is-good", "serving"],
  draining: ["is-warn", "draining"],
  drained: ["is-off", "drained"],
  unreachable: ["is-bad", "unreachable"],
};
const BREAKERS = { half_open: ["is-warn", "half open"], open: ["is-bad", "open"] };

export function workerCard(worker, store, actions) {
  const [tint, word] = STATES[worker.state] ?? ["is-off", String(worker.state)];
  const { stats } = worker;
  return h("li", { class: `worker ${tint}`, key: worker.id, "data-worker": worker.id, "data-state": worker.state },
    h("div", { class: "worker-head" },
      h("h4", { class: "mono", title: worker.id }, worker.id),
      button(worker, store, actions),
    ),
    h("p", { class: "worker-about" },
      h("span", { class: `pill ${tint}` }, h("span", { class: "dot", "aria-hidden": "true" }), word),
      h("span", { class: "quiet mono small address", title: worker.address }, worker.address),
      hasModels(store) && h("span", { class: "quiet mono small address", title: worker.model }, worker.model),
    ),
    worker.problem && h("p", { class: "problem", title: worker.problem }, worker.problem),
    stats
      ? [
          meter("KV blocks", stats.num_blocks, stats.free_blocks, stats.cached_blocks),
          meter("State slots", stats.num_slots, stats.free_slots, stats.cached_states),
        ]
      : h("p", { class: "quiet small" }, "No figures from this server yet."),
    h("dl", { class: "worker-figures" }, figuresOf(worker).map(([name, value]) =>
      h("div", { key: name }, h("dt", null, name), h("dd", null, value)))),
  );
}

/** Whether cards have to name the servers' models, since there are several. */
const hasModels = (store) => new Set([...store.workers.values()].map((worker) => worker.model).filter(Boolean)).size > 1;

function figuresOf(worker) {
  const { stats } = worker;
  const own = worker.role === "prefill" ? ["leases", stats?.leases_held] : ["transfers", stats?.transfers_in_flight];
  return [
    ["requests", count(worker.requests)],
    ["queued tokens", count(worker.queued_tokens)],
    ["tokens/s", quantity(worker.pace?.perSecond)],
    ["waiting", count(stats?.num_waiting)],
    [own[0], count(own[1])],
    ["breaker", breaker(worker.breaker)],
  ];
}

function breaker(state) {
  const [tint, word] = BREAKERS[state] ?? ["", String(state)];
  return h("span", { class: tint ? `breaker ${tint}` : "" }, word);
}

function button(worker, store, actions) {
  const isBusy = store.busy.has(worker.id);
  const isDrained = worker.draining || worker.state === "draining" || worker.state === "drained";
  const [word, act] = isDrained
    ? ["Undrain", () => actions.undrain(worker.id)]
    : ["Drain", () => actions.ask("drain", worker.id)];
  return h("button", {
    // Not `disabled`: a disabled button would lose the focus when a person has just pressed it.
    class: "button is-small", "aria-disabled": String(isBusy), "aria-label": `${word} ${worker.id}`,
    onClick: () => isBusy || act(),
  }, isBusy ? "…" : word);
}

/** A bar of used, cached (freed when a request needs room) and free parts. */
export function meter(name, all, free, cached) {
  const used = all - free;
  const held = Math.min(cached ?? 0, free);
  const text = `${count(used)} of ${count(all)} used, ${count(held)} cached`;
  return h("div", { class: "meter", key: name },
    h("span", { class: "meter-name" }, name),
    h("span", { class: "meter-text" }, `${count(used)} / ${count(all)}`),
    h("div", {
      class: "meter-bar", role: "meter", title: text, "aria-label": name, "aria-valuetext": text,
      "aria-valuemin": 0, "aria-valuemax": all, "aria-valuenow": used,
      style: { "--used": all ? used / all : 0, "--cached": all ? held / all : 0 },
    }, h("span", { class: "meter-used" }), h("span", { class: "meter-cached" })),
  );
}
