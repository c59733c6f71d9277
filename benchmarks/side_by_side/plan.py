"""Who is measured when, and on how much: a pure function of what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testing.checkpoints.random_model import LARGE, BenchmarkModel

LEFT_OUT = {("vllm-pair", LARGE.name)}
"""They would take as long as all others together."""


@dataclass(frozen=True)
class Visit:
    """One arrangement is started with one model, measured at each concurrency and stopped."""

    round: int
    model: BenchmarkModel
    arrangement: str


def visits(models: Sequence[BenchmarkModel], arrangements: Sequence[str], rounds: int) -> list[Visit]:
    """Every arrangement once a model and round, so that a machine which slows down slows all of them.

    Another one begins each round: none always follows the same one, or runs on a cold machine.
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
    """Of one measurement: never fewer than shall be in flight."""
    return max(concurrency, round(model.requests[concurrency] * scale))


def expected_s(models: Sequence[BenchmarkModel], rounds: int, scale: float) -> float:
    """Roughly, on two quiet cores; starts take as long whatever the scale."""
    return sum(rounds * (model.starts_s + scale * model.load_s) for model in models)
