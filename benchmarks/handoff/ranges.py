"""How scattered the blocks of handoffs are: ranges of memory that one read has to name. No machine's clock.

    python -m benchmarks.handoff.ranges
    python -m benchmarks.handoff.ranges --publish        # the table of docs/network.md and the JSON

A prefill and a decode server's pools and prefix caches, without tensors, live through 5,000 requests. The
prefill server keeps prompts cached and evicts the oldest; on the decode server, answers of very different
lengths grow a block at a time beside one another. Blocks are read as one range if they are adjacent on both
sides.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.json_file import write_json
from engine.memory.cached_start import CachedBlock
from engine.memory.index_pool import NULL_INDEX, IndexPool
from engine.memory.prefix_cache import PrefixCache
from testing.marked_section import replace_between
from wire.messages.prefixes import block_keys

BLOCK = 16
NUM_REQUESTS = 5_000
NUM_BLOCKS = 16_384
ROWS = 64
"""Requests that a decode server runs at a time."""
LEASES = 8
"""Prompts whose blocks wait on the prefill server to be read."""
DOCUMENT = Path("docs/network.md")
BEGIN = "<!-- written by: python -m benchmarks.handoff.ranges --publish -->"
END = "<!-- end of what the ranges benchmark writes -->"
RESULTS = Path("benchmarks/results/ranges.json")


@dataclass(frozen=True)
class Traffic:
    """What clients send: lengths in tokens, drawn log-normally around their medians."""

    name: str
    prompt: int
    answer: int
    spread: float
    num_shared: int = 0
    """Number of beginnings that prompts share; 0 if every prompt is new."""
    shared: int = 0
    """Length of these beginnings."""


TRAFFIC = (
    Traffic("prompts of 1,000 tokens", 1_000, 200, 0.8),
    Traffic("prompts of 4,000 tokens", 4_000, 400, 0.8),
    Traffic("agents: 3,000 shared, 500 new", 500, 300, 1.0, num_shared=30, shared=3_000),
)


class Prefill:
    """The pools of a prefill server, whose prefix cache keeps all prompts that fit."""

    def __init__(self) -> None:
        self.blocks = IndexPool(NUM_BLOCKS, "block")
        slots = IndexPool(2, "slot")
        self.cache = PrefixCache(self.blocks, slots, block_size=BLOCK, fingerprint="f")
        self._leases: list[tuple[list[CachedBlock], list[int]]] = []

    def compute(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of a prompt."""
        keys = block_keys(tokens, block_size=BLOCK, fingerprint="f", salt="")
        nodes = list(self.cache.match(keys, needs_state=False).nodes)
        self.cache.hold(nodes)
        block_ids = self.cache.blocks_of(nodes)
        block_ids += self.cache.allocate_blocks(
            -(-len(tokens) // BLOCK) - len(nodes), block_ids[-1] if block_ids else NULL_INDEX
        )
        self.cache.extend(nodes, keys, len(keys), block_ids)
        self._leases.append((nodes, block_ids))
        if len(self._leases) > LEASES:
            self._release(*self._leases.pop(0))
        return block_ids

    def _release(self, nodes: list[CachedBlock], block_ids: list[int]) -> None:
        cached = {node.block_id for node in nodes}
        self.blocks.free([index for index in block_ids if index not in cached])
        self.cache.release(reversed(nodes))


class Decode:
    """The pool of a decode server that keeps nothing behind an answer's end."""

    def __init__(self) -> None:
        self.blocks = IndexPool(NUM_BLOCKS, "block")
        self._rows: list[tuple[int, int, int, list[int], int]] = []
        """When a row has its next event, its number, tokens left, its blocks, and their number at its end."""
        self._spoken_for = 0
        """Blocks that the rows will own at their ends. A real server would preempt some instead."""

    def admit(self, number: int, num_tokens: int, num_answered: int) -> list[int]:
        """Run steps until there is room. Return the blocks for the prompt."""
        needed, at_end = -(-num_tokens // BLOCK), -(-(num_tokens + num_answered) // BLOCK) + 1
        while len(self._rows) >= ROWS or self._spoken_for + at_end > self.blocks.capacity:
            self._next_event()
        self._spoken_for += at_end
        block_ids = self.blocks.allocate(needed)
        now = self._rows[0][0] if self._rows else 0
        to_boundary = needed * BLOCK - num_tokens + 1
        row = (now + to_boundary, number, num_answered - to_boundary, block_ids, at_end)
        heapq.heappush(self._rows, row)
        return list(block_ids)

    def _next_event(self) -> None:
        """A row needs one more block, or ends."""
        now, number, left, block_ids, at_end = heapq.heappop(self._rows)
        if left <= 0:
            self.blocks.free(block_ids)
            self._spoken_for -= at_end
            return
        block_ids += self.blocks.allocate(1, behind=block_ids[-1])
        heapq.heappush(self._rows, (now + min(left, BLOCK), number, left - BLOCK, block_ids, at_end))


def num_ranges(source: Sequence[int], target: Sequence[int]) -> int:
    """Return how many ranges a read of blocks has to name."""
    steps = zip(source, source[1:], target, target[1:], strict=False)
    return 1 + sum((b - a, d - c) != (1, 1) for a, b, c, d in steps)


@dataclass(frozen=True)
class Figures:
    """Ranges of a handoff."""

    traffic: str
    blocks: float
    """Mean number of a handoff's blocks."""
    mean: float
    p95: float
    source: float
    """Mean number of ranges if only the prefill server's blocks were scattered."""
    target: float
    """The same for the decode server's blocks."""


def measure(traffic: Traffic, num_requests: int = NUM_REQUESTS) -> Figures:
    draw = random.Random(0)
    prefill, decode = Prefill(), Decode()
    beginnings = [[draw.randrange(1 << 20) for _ in range(traffic.shared)] for _ in range(traffic.num_shared)]
    ranges, sources, targets, sizes = [], [], [], []
    for number in range(num_requests):
        length = _length(draw, traffic.prompt, traffic.spread)
        tokens = [*(draw.choice(beginnings) if beginnings else ()), *_fresh(draw, length)]
        source = prefill.compute(tokens)
        target = decode.admit(number, len(tokens), _length(draw, traffic.answer, traffic.spread))
        if number < num_requests // 10:  # the pools fill
            continue
        line = range(len(source))
        ranges.append(num_ranges(source, target))
        sources.append(num_ranges(source, line))
        targets.append(num_ranges(line, target))
        sizes.append(len(source))
    return Figures(
        traffic.name,
        statistics.fmean(sizes),
        statistics.fmean(ranges),
        statistics.quantiles(ranges, n=20)[-1],
        statistics.fmean(sources),
        statistics.fmean(targets),
    )


def _length(draw: random.Random, median: int, spread: float) -> int:
    return min(20_000, max(1, round(median * draw.lognormvariate(0, spread))))


def _fresh(draw: random.Random, length: int) -> list[int]:
    """Tokens of which no block occurs twice."""
    first = draw.randrange(1 << 40)
    return [first + i for i in range(length)]


def table(figures: Sequence[Figures]) -> str:
    """Return the table of docs/network.md."""
    lines = [
        "| traffic | blocks of a handoff | ranges | 95 % have at most | on prefill's side | on decode's |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.traffic} | {one.blocks:.0f} | **{one.mean:.1f}** | {one.p95:.0f} | {one.source:.1f} "
        f"| {one.target:.1f} |"
        for one in figures
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--publish", action="store_true", help=f"write {RESULTS} and {DOCUMENT}")
    options = parser.parse_args()
    figures = [measure(traffic) for traffic in TRAFFIC]
    print(table(figures))
    if options.publish:
        write_json(RESULTS, {"requests": NUM_REQUESTS, "ranges": [asdict(one) for one in figures]})
        replace_between(DOCUMENT, BEGIN, END, table(figures))


if __name__ == "__main__":
    main()
