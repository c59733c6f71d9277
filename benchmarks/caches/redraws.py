"""Is a difference between two cache policies more than the draw of one log?

    python -m benchmarks.caches.redraws chats --seed 54971 --share 0.05 --json redraws.json

Draws many logs with one seed's parameters, and replays ours and Marconi's cache on each. Printed and written
are the quartiles, over the logs, of ours divided by Marconi's. Nothing is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import quantiles

from benchmarks.caches.eviction_grid import OURS, question
from benchmarks.caches.traces import BLOCK_TOKENS, KINDS, generate
from benchmarks.json_file import write_json
from twinfang.cache_sim.contenders import CONTENDERS
from twinfang.cache_sim.replay import Outcome

PEER = "marconi"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*KINDS, "mixed"])
    parser.add_argument("--seed", type=int, nargs="+", required=True)
    parser.add_argument("--share", type=float, default=0.05, help="budget, as a part of the log's footprint")
    parser.add_argument("--requests", type=int, default=1500, help="of each log")
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = []
    for seed in options.seed:
        pairs = [replays(options, seed, redraw) for redraw in range(1, options.draws + 1)]
        report.append(
            {
                "log": f"{options.kind} {seed}",
                "share": options.share,
                "requests": options.requests,
                "draws": options.draws,
                "hits": quartiles([ours.num_hit / peer.num_hit for ours, peer in pairs]),
                "mean_ttft": quartiles([ours.mean_ttft_s / peer.mean_ttft_s for ours, peer in pairs]),
                "p95_ttft": quartiles([ours.p95_ttft_s / peer.p95_ttft_s for ours, peer in pairs]),
            }
        )
        print(report[-1], flush=True)
    if options.json:
        write_json(options.json, report)


def replays(options: argparse.Namespace, seed: int, redraw: int) -> tuple[Outcome, Outcome]:
    """Returns what ours and Marconi's cache do with one log."""
    requests = generate(options.kind, seed, options.requests, redraw)
    asked = question("8b", requests, BLOCK_TOKENS)
    num_bytes = int(options.share * asked.footprint_bytes)
    return CONTENDERS[OURS](asked, num_bytes), CONTENDERS[PEER](asked, num_bytes)


def quartiles(ratios: list[float]) -> list[float]:
    """Returns the first, second and third quartile."""
    return [round(one, 3) for one in quantiles(ratios, n=4)]


if __name__ == "__main__":
    main()
