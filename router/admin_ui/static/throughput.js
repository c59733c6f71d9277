// What the router does per second: each figure with its last two minutes.

import { bytes, count, ms, percent, quantity } from "./format.js";
import { sparkline } from "./sparkline.js";
import { h } from "./vendor/preact.mjs";

const [SHORTEST_S, LONGEST_S] = [10, 120];

export function throughput({ stats, history }) {
  const windowS = Math.min(LONGEST_S, Math.max(SHORTEST_S, stats.at - history[0].at));
  const line = (read) => history.map((at) => [at.at, read(at)]);
  const [transferred, unit] = bytes(stats.transfer.bytes_per_s);
  const { throughput, transfer } = stats;
  const tile = (title, value, per, below, tint, read) =>
    h("div", { class: `tile ${tint}` },
      h("dt", null, title),
      h("dd", null,
        h("span", { class: "value" }, value, h("span", { class: "unit" }, per)),
        h("span", { class: "below" }, below),
      ),
      sparkline(line(read), windowS),
    );
  return h("section", { "aria-labelledby": "throughput-title" },
    h("h2", { id: "throughput-title", class: "visually-hidden" }, "Throughput"),
    h("dl", { class: "tiles" },
      tile("Requests", quantity(throughput.requests_per_s), "/s",
        `${count(stats.in_flight)} in flight, ${count(stats.queued)} queued`,
        "is-plain", (at) => at.throughput.requests_per_s),
      tile("Prompt tokens", quantity(throughput.prompt_tokens_per_s), "/s", `last ${stats.window_s} s`,
        "is-prefill", (at) => at.throughput.prompt_tokens_per_s),
      tile("Generated tokens", quantity(throughput.generated_tokens_per_s), "/s", `last ${stats.window_s} s`,
        "is-decode", (at) => at.throughput.generated_tokens_per_s),
      tile("Transfer", transferred, unit && `${unit}/s`,
        `p50 ${ms(transfer.p50_ms)}, p99 ${ms(transfer.p99_ms)}`,
        "is-transfer", (at) => at.transfer.bytes_per_s),
      tile("Cache hit rate", percent(stats.cache_hit_rate), "", "of prompt tokens",
        "is-prefill", (at) => at.cache_hit_rate),
      tile("Accepted length", quantity(stats.accepted_draft_length), "",
        stats.accepted_draft_length === null ? "no drafts" : "tokens a step with drafts",
        "is-decode", (at) => at.accepted_draft_length),
    ),
  );
}
