"""The order and size of the measurements: a pure function of the options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.side_by_side.loads import DRAFTS, LARGE, LOADS, PLAIN, Load

LEFT_OUT = {("vllm-pair", LARGE), ("llama.cpp", "drafts")}
"""vLLM's pair would take as long with the large model as all others together."""

START_S = {"up": 6.0, "serve": 4.0, "vllm": 42.0, "vllm-pair": 102.0, "transformers": 6.0, "llama.cpp": 3.0}
"""About how long each takes to start and to stop, on two idle cores."""
SLOWNESS = {"vllm": 1.0, "up": 0.7, "serve": 0.6, "vllm-pair": 2.0, "transformers": 1.2, "llama.cpp": 1.0}
"""About how long each takes for a load, in multiples of ``Load.seconds``."""


@dataclass(frozen=True)
class Point:
    """One measurement of a visit."""

    load: Load
    at: int
    """Requests in flight, conversations in flight, or requests per second."""


@dataclass(frozen=True)
class Visit:
    """One contender, started with one model, measured under each load, and stopped."""

    round: int
    model: str
    contender: str
    variant: str
    points: tuple[Point, ...]

    @property
    def expected_s(self) -> float:
        """A rough estimate for two idle cores, at scale 1, with nothing measured yet."""
        loads = {point.load.name: point.load for point in self.points}
        load_s = sum(load.seconds[self.model] for load in loads.values())
        return START_S[self.contender] + SLOWNESS[self.contender] * load_s


def visits(
    models: Sequence[str], contenders: Sequence[str], loads: Iterable[str], rounds: int
) -> list[Visit]:
    """Returns every contender once per model, way of starting and round, so that a machine that slows down
    slows all of them.

    Each round begins with a different contender, so that none always follows the same one or runs on a cold
    machine.
    """
    chosen = [LOADS[name] for name in loads]
    found = []
    for number in range(rounds):
        first = number % len(contenders)
        order = [*contenders[first:], *contenders[:first]]
        for model in models:
            for variant in (PLAIN, DRAFTS):
                for contender in order:
                    if points := points_of(chosen, model, contender, variant):
                        found.append(Visit(number, model, contender, variant, points))
    return found


def points_of(loads: Iterable[Load], model: str, contender: str, variant: str) -> tuple[Point, ...]:
    """Returns what is measured of a contender that was started in this way."""
    if LEFT_OUT & {(contender, model), (contender, variant)}:
        return ()
    return tuple(
        Point(load, at)
        for load in loads
        if load.variant == variant and contender in load.contenders
        for at in load.requests.get(model, {})
    )


def expected_s(plan: Iterable[Visit]) -> float:
    return sum(visit.expected_s for visit in plan)
