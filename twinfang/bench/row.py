"""The rounds of one case, and the row of their medians that is shown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from twinfang.bench.case import Case

HEADER = (
    f"{'':<50} {'descr':>5} {'moved':>12} {'copy µs':>10} {'GB/s':>6} {'raw µs':>10} {'GB/s':>6}"
    f" {'handoff µs':>10} {'GB/s':>6} {'ratio':>6} {'extra µs':>9}"
    f" {'behind µs':>10} {'ratio':>6}"
)


@dataclass(frozen=True)
class Round:
    """A copy, a raw read and a handoff, one after the other; in seconds."""

    copy_s: float
    raw_s: float
    handoff_s: float
    waited_s: float
    """How long this process was ready to run but had no core."""


@dataclass(frozen=True)
class Row:
    """Medians of one case, over the half of its rounds in which this process waited least for a core."""

    name: str
    num_bytes: int
    num_descriptors: int
    rounds: int
    copy_us: float
    """Time of a copy within one process."""
    raw_us: float
    handoff_us: float
    ratio: float
    """A handoff's time divided by that of the raw read in the same round."""
    extra_us: float
    """By how much a handoff takes longer than the raw read."""
    behind_us: float | None
    """Time that the rest of a handoff takes when all chunks except the last were read before; None if there
    is only one chunk."""
    behind_ratio: float | None
    best_raw_us: float
    """The shortest time of all rounds. A busy machine changes it less than the median."""
    best_handoff_us: float

    @classmethod
    def of(
        cls, case: Case, num_bytes: int, num_descriptors: int, rounds: list[Round], behind: list[Round]
    ) -> Row:
        quiet, quiet_behind = _quiet_half(rounds), _quiet_half(behind)
        return cls(
            case.name,
            num_bytes,
            num_descriptors,
            len(quiet),
            copy_us=_median_us(one.copy_s for one in quiet),
            raw_us=_median_us(one.raw_s for one in quiet),
            handoff_us=_median_us(one.handoff_s for one in quiet),
            ratio=_median_ratio(quiet),
            extra_us=_median_us(one.handoff_s - one.raw_s for one in quiet),
            behind_us=_median_us(one.handoff_s for one in quiet_behind) if behind else None,
            behind_ratio=_median_ratio(quiet_behind) if behind else None,
            best_raw_us=min(one.raw_s for one in rounds) * 1e6,
            best_handoff_us=min(one.handoff_s for one in rounds) * 1e6,
        )

    def figures(self) -> dict[str, object]:
        return {
            **asdict(self),
            "share_of_raw_bandwidth": 1 / self.ratio,
            "behind_share_of_raw_bandwidth": None if self.behind_ratio is None else 1 / self.behind_ratio,
            "ratio_to_copy": self.handoff_us / self.copy_us,
        }

    def __str__(self) -> str:
        times = "".join(
            f" {us:>10,.0f} {self.num_bytes / us / 1e3:>6.2f}"
            for us in (self.copy_us, self.raw_us, self.handoff_us)
        )
        return (
            f"{self.name:<50} {self.num_descriptors:>5} {self.num_bytes / 1e3:>9,.0f} KB{times}"
            f" {self.ratio:>6.2f} {self.extra_us:>9,.0f}"
            + ("" if self.behind_us is None else f" {self.behind_us:>10,.0f} {self.behind_ratio:>6.2f}")
        )


def _quiet_half(rounds: list[Round]) -> list[Round]:
    return sorted(rounds, key=lambda one: one.waited_s)[: -(-len(rounds) // 2)]


def _median_us(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1e6


def _median_ratio(rounds: list[Round]) -> float:
    return statistics.median(one.handoff_s / one.raw_s for one in rounds)
