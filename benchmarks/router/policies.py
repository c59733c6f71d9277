"""Compares policies on a trace with shared beginnings and bursts, in simulated time.

    python -m benchmarks.router.policies --json benchmarks/results/policies.json --plot docs/policies.png

The policies are the router's own. The servers are simulated (``policy_simulation.py``): a prefill rate, a
queue, and a block cache that evicts the least recently used. The trace (``policy_trace.py``), and so every
figure, depends only on the seed. Load is a share of what all servers can compute without any cache hit.

| figure | is |
|---|---|
| TTFT | wait and prefill of a prompt on its server; network and decode servers are left out |
| hits | share of all prompt tokens that the chosen server's cache had |
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.router.policy_trace import Trace
from router.policies.least_loaded import LeastLoaded
from router.policies.policy import Policy
from router.policies.prefix_affinity import PrefixAffinity
from router.policies.round_robin import RoundRobin
from router.policies.session_affinity import SessionAffinity
from testing.simulation.policies import Simulation

NUM_SERVERS = 4
CACHE_BLOCKS = 1500
"""Blocks of 64 tokens in each server's cache. The documents alone have 3,900 blocks: one server can't hold
them all, four can."""
SECONDS = 90.0
LOADS = (0.5, 1.0, 1.5, 2.0, 2.5)
MEAN_TOKENS_S = NUM_SERVERS * 10_000.0

POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "round_robin": lambda _rng: RoundRobin(0),
    "least_loaded": LeastLoaded,
    "session_affinity": lambda rng: SessionAffinity(LeastLoaded(rng)),
    "prefix_affinity": PrefixAffinity,
}
ROUTERS = {"1 router": (1, 0.25), "16 routers": (16, 0.5)}
"""Number of routers, and the greatest age of the servers' figures in seconds."""


def trace_at(load: float, seconds: float, seed: int) -> Trace:
    """Returns arrivals that make this load; their rate is computed from a trace at 10 per second."""
    tokens_per_arrival = Trace(per_s=10.0, seconds=seconds, seed=seed).num_tokens / seconds / 10.0
    return Trace(per_s=load * MEAN_TOKENS_S / tokens_per_arrival, seconds=seconds, seed=seed)


def simulated(name: str, trace: Trace, num_routers: int, figures_every_s: float, seed: int) -> dict[str, Any]:
    simulation = Simulation(
        POLICIES[name],
        num_servers=NUM_SERVERS,
        num_routers=num_routers,
        cache_blocks=CACHE_BLOCKS,
        figures_every_s=figures_every_s,
        seed=seed,
    )
    for arrival in trace.arrivals:
        simulation.request(arrival.at_s, arrival.demand)
    simulation.run(trace.arrivals[-1].at_s)
    by_kind: dict[str, list[float]] = {}
    for arrival, ttft_s in zip(trace.arrivals, simulation.ttfts_s, strict=True):
        by_kind.setdefault(arrival.kind, []).append(ttft_s)
    return {
        "hit_rate": round(simulation.hit_rate, 4),
        "ttft_ms": summary(simulation.ttfts_s),
        "ttft_ms_by_kind": {kind: summary(values) for kind, values in sorted(by_kind.items())},
        "longest_queue_tokens": simulation.fullest,
    }


def summary(values_s: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    figures = {"mean": statistics.fmean(values_s), "p50": cuts[49], "p99": cuts[98]}
    return {name: round(value * 1e3, 1) for name, value in figures.items()}


def measure(loads: Sequence[float], seconds: float, seed: int) -> list[dict[str, Any]]:
    results = []
    print(f"{'load':>5} {'routers':>10} {'policy':>17} {'hits':>6} {'mean':>8} {'p50':>8} {'p99 ms':>8}")
    for load in loads:
        trace = trace_at(load, seconds, seed)
        for routers, (num_routers, figures_every_s) in ROUTERS.items():
            for name in POLICIES:
                found = simulated(name, trace, num_routers, figures_every_s, seed)
                ttft = found["ttft_ms"]
                times = f"{ttft['mean']:>8.0f} {ttft['p50']:>8.0f} {ttft['p99']:>8.0f}"
                print(f"{load:>5} {routers:>10} {name:>17} {found['hit_rate']:>6.1%} {times}", flush=True)
                results.append({"load": load, "routers": num_routers, "policy": name, **found})
    return results


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots, for one router, hit rate, mean and p99 of TTFT over the load, with a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    panels: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
        ("prompt tokens found in caches", "%", lambda r: 100 * float(r["hit_rate"])),
        ("TTFT, mean", "ms", lambda r: float(r["ttft_ms"]["mean"])),
        ("TTFT, p99", "ms", lambda r: float(r["ttft_ms"]["p99"])),
    )
    for axis, (title, unit, value) in zip(axes, panels, strict=True):
        for name, marker in zip(POLICIES, "sv^o", strict=True):
            rows = [r for r in results if r["policy"] == name and r["routers"] == 1]
            axis.plot([100 * r["load"] for r in rows], [value(r) for r in rows], marker=marker, label=name)
        axis.set(xlabel="load without caches, % of capacity", ylabel=unit, title=title)
        axis.grid(alpha=0.3)
        if unit == "ms":
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axes[0].legend(loc="lower left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loads", default=",".join(map(str, LOADS)), help="with commas; default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the trace; default: %(default)g")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--plot", type=Path, help="draw them there")
    options = parser.parse_args()
    results = measure([float(load) for load in options.loads.split(",")], options.seconds, options.seed)
    if options.json:
        settings = {
            "seed": options.seed,
            "seconds": options.seconds,
            "servers": NUM_SERVERS,
            "prefill_tokens_per_s": MEAN_TOKENS_S / NUM_SERVERS,
            "cache_blocks": CACHE_BLOCKS,
        }
        report = {"machine": "simulated time: any machine gives the same", **settings, "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
