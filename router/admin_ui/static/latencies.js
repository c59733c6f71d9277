// Distributions of TTFT and TPOT.

import { histogram } from "./histogram.js";
import { h } from "./vendor/preact.mjs";

export function latencies({ stats }) {
  return h("section", { class: "latencies", "aria-label": "Latency" },
    histogram("Time to first token", "TTFT", "is-prefill", stats.ttft_ms, stats.window_s),
    histogram("Time per output token", "TPOT", "is-decode", stats.tpot_ms, stats.window_s),
  );
}
