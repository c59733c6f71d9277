"""The fleets of a soak: their servers, what clients ask them, and what happens to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.faults import DEADLINE_S, WEIGHTS
from benchmarks.soak.file_faults import FILE_WEIGHTS
from benchmarks.soak.questions import Question, make_questions, make_turns

_MODEL = ("--max-model-len", "1024", "--threads", "1", "--speculative", "2", "--state-block-size", "64")
_LEASES = ("--lease-ttl", str(DEADLINE_S))
_CHUNKS = ("--max-batch-tokens", "192")
"""With this flag long prompts run in several chunks, and are read meanwhile."""
_PREFILL = ("prefill", *_MODEL, *_LEASES, *_CHUNKS)
_DECODE = ("decode", *_MODEL, "--transfer-deadline", str(DEADLINE_S))
_DECODES = {
    "decode-a": (*_DECODE, "--max-num-seqs", "3", "--cache-memory", "0.004"),
    "decode-b": (*_DECODE, "--max-num-seqs", "8", "--cache-memory", "0.008", "--local-prefill"),
}
"""Little memory, so that freed memory soon belongs to another request, and late bytes would show."""
YARDSTICK = {"yardstick": (*_DECODE, "--role", "both", "--max-num-seqs", "8", "--cache-memory", "0.1")}

_FEW = ("--max-num-seqs", "6", "--cached-states", "4", "--cache-memory", "0.006")
_TIERS = ("--host-cache-size", "3M", "--file-cache-size", "12M", "--file-cache-wait", "0.5")
"""A device with room for two long prompts, host memory for about five, files for about thirty."""


@dataclass(frozen=True)
class Lineup:
    """One fleet. ``questions(seed)`` makes the pool of requests; ``salted`` is the share of those that no
    cache helps."""

    name: str
    servers: Mapping[str, tuple[str, ...]]
    questions: Callable[[int], list[Question]]
    weights: Mapping[str, float]
    salted: float
    tiered: Sequence[str] = ()
    """Servers with files. Each gets a directory of its own."""

    def started(self, directories: Mapping[str, Path]) -> dict[str, tuple[str, ...]]:
        """Returns the servers' command lines."""
        return {
            name: (*flags, "--file-cache-dir", str(directories[name])) if name in directories else flags
            for name, flags in self.servers.items()
        }

    @property
    def routers(self) -> dict[str, tuple[str, ...]]:
        """Returns the names of each router's servers."""
        return {"router-a": tuple(self.servers), "router-b": tuple(self.servers)}


_WHOLE = (*_PREFILL, "--max-num-seqs", "16", "--cache-memory", "0.012")
_TIERED = (*_PREFILL, *_FEW, *_TIERS)
PLAIN = Lineup(
    "plain", {"prefill-a": _WHOLE, "prefill-b": _WHOLE, **_DECODES}, make_questions, WEIGHTS, salted=0.5
)
TIERS = Lineup(
    "tiers",
    {"prefill-a": _TIERED, "prefill-b": _TIERED, **_DECODES},
    lambda seed: [*make_questions(seed), *make_turns(seed)],
    WEIGHTS | FILE_WEIGHTS,
    salted=0.1,
    tiered=("prefill-a", "prefill-b"),
)
