"""Cache policies on logs of prompt hashes, at five budgets: tokens hit, FLOP saved, time to first tokens.

    python -m benchmarks.caches.eviction_grid --seeds 101 102
    python -m benchmarks.caches.eviction_grid --log conversation_trace.jsonl --seeds 101 --publish

--seeds generates logs of the four kinds of benchmarks.caches.traces. Nothing is timed: `twinfang cache-sim`
computes the same for one log. "short" is how many tokens less than the best of the others that do not know
the future our cache hits, as a part of what that one hits; negative: it hits more. --publish writes
benchmarks/results/eviction.json, and the tables and the plot of docs/cache-policies.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.caches import eviction_report
from benchmarks.caches.traces import BLOCK_TOKENS, KINDS, generate
from benchmarks.json_file import write_json
from benchmarks.steps.model_shape import PUBLISHED, write_configuration
from engine.cost.gpu import GpuSpeed, gpu_costs
from engine.models import read_config
from twinfang.cache_sim.command import DEFAULT_SHARES, Cell, model_sizes
from twinfang.cache_sim.contenders import CONTENDERS, Question
from twinfang.cache_sim.replay import Hardware
from twinfang.cache_sim.trace import MOONCAKE_BLOCK_TOKENS, TracedRequest, read_trace

OURS = "value+placement"
OTHERS = ("lru", "value", "served", "marconi")
RESULTS = Path("benchmarks/results/eviction.json")
GPU = GpuSpeed(400e12, 2500e9, 20e9, 0.002)
STATE_BLOCK_TOKENS = 512
CHUNK_TOKENS = 2048


def question(model: str, requests: Sequence[TracedRequest], block_tokens: int) -> Question:
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(write_configuration(model, Path(folder), max_model_len=262_144), device="cuda")
    hardware = Hardware(gpu_costs(config, GPU).prefill, CHUNK_TOKENS)
    state_block = max(1, STATE_BLOCK_TOKENS // block_tokens)
    return Question(requests, model_sizes(config, block_tokens), hardware, state_block)


def logs(options: argparse.Namespace) -> Iterator[tuple[str, Sequence[TracedRequest], int]]:
    """Yields name, requests and tokens of a block."""
    for path in options.log:
        yield path.stem, read_trace(path, MOONCAKE_BLOCK_TOKENS), MOONCAKE_BLOCK_TOKENS
    for kind in (*KINDS, "mixed"):
        for seed in options.seeds:
            yield f"{kind} {seed}", generate(kind, seed, options.requests), BLOCK_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(PUBLISHED), default="8b")
    parser.add_argument("--log", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=1500, help="of each generated log")
    parser.add_argument("--shares", type=float, nargs="*", default=list(DEFAULT_SHARES))
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    report: dict[str, list[dict[str, Any]]] = {}
    print(f"{'log':<22}{'budget':>10}" + "".join(f"{name:>17}" for name in CONTENDERS) + f"{'short':>8}")
    for name, requests, block_tokens in logs(options):
        asked = question(options.model, requests, block_tokens)
        for share in options.shares:
            num_bytes = int(share * asked.footprint_bytes)
            cells = {
                one: Cell(one, num_bytes, replay(asked, num_bytes)).figures()
                for one, replay in CONTENDERS.items()
            }
            report.setdefault(name, []).append({"budget_bytes": num_bytes, "caches": cells})
            texts = "".join(f"{cell['hit_rate']:>17.1%}" for cell in cells.values())
            print(f"{name:<22}{num_bytes / 2**30:>6.1f} GiB{texts}{shortfall(cells):>8.1%}", flush=True)
    if options.publish:
        write_json(RESULTS, {"model": options.model, "logs": report})
        eviction_report.publish(report)


def shortfall(cells: Mapping[str, Mapping[str, Any]]) -> float:
    """Returns the share of the best other cache's hits that ours lacks."""
    best = max(cells[one]["hit_tokens"] for one in OTHERS)
    return (best - cells[OURS]["hit_tokens"]) / best if best else 0.0


if __name__ == "__main__":
    main()
