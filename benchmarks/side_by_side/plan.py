"""The order and size of the measurements: a pure function of the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testing.checkpoints.random_model import LARGE, BenchmarkModel

LEFT_OUT = {("vllm-pair", LARGE.name)}
"""These would take as long as all others together."""


@dataclass(frozen=True)
class Visit:
    """One arrangement, started with one model, measured at each concurrency, and stopped."""

    round: int
    model: BenchmarkModel
    arrangement: str


def visits(models: Sequence[BenchmarkModel], arrangements: Sequence[str], rounds: int) -> list[Visit]:
    """Returns every arrangement once per model and round, so that a machine that slows down slows all of
    them.

    Each round begins with a different arrangement, so that none always follows the same one or runs on a cold
    machine.
    """
    found = []
    for number in range(rounds):
        first = number % len(arrangements)
        order = [*arrangements[first:], *arrangements[:first]]
        found += [
            Visit(number, model, name)
            for model in models
            for name in order
            if (name, model.name) not in LEFT_OUT
        ]
    return found


def num_requests(model: BenchmarkModel, concurrency: int, scale: float) -> int:
    """Returns the number of requests of one measurement: never fewer than those in flight."""
    return max(concurrency, round(model.requests[concurrency] * scale))


def expected_s(models: Sequence[BenchmarkModel], rounds: int, scale: float) -> float:
    """Returns a rough estimate for two idle cores. The time of starts does not depend on the scale."""
    return sum(rounds * (model.starts_s + scale * model.load_s) for model in models)
