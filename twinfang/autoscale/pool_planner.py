"""When a pool's size changes, given how many servers it needs. Pure.

| servers | the pool |
|---|---|
| fewer than are needed | grows at once, to double at most, and pauses |
| more than are needed with slack, for a while | shrinks to the most that were needed meanwhile |
| between | stays |

``Needs.slack`` is the need of a load that is a quarter higher. Between the two lies the band in which nothing
changes, so a load that does not change moves a pool in one direction only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

SLACK = 1.25
"""A pool shrinks only if what is left would do for a load so many times as high."""


@dataclass(frozen=True)
class PoolLimits:
    minimum: int
    maximum: int

    def within(self, num_servers: int) -> int:
        return min(self.maximum, max(self.minimum, num_servers))


@dataclass(frozen=True)
class PlannerPace:
    up_pause_s: float
    """After a change, before a pool grows again: what was asked for has to be seen to work."""
    down_after_s: float
    """How long fewer servers have to be enough before a pool shrinks, and after any change."""


@dataclass(frozen=True)
class PoolSize:
    wanted: int
    """What its Deployment is told to have."""
    serving: int
    """Those that take requests."""


@dataclass(frozen=True)
class Needs:
    now: int
    slack: int
    why: str


@dataclass(frozen=True)
class PoolHistory:
    """What a planner remembers of a pool from one decision to the next."""

    changed_s: float | None = None
    looks: tuple[tuple[float, int], ...] = ()
    """When, and how many servers were needed with slack: since the last change, and of the last while."""


Kind = Literal["grows", "shrinks", "fits", "waits", "unknown"]


@dataclass(frozen=True)
class Decision:
    kind: Kind
    num_servers: int
    """What there is, where nothing is to be done now."""
    why: str


def decide(
    now_s: float,
    size: PoolSize,
    needs: Needs | None,
    limits: PoolLimits,
    pace: PlannerPace,
    history: PoolHistory,
) -> tuple[Decision, PoolHistory]:
    """What to do now, and what to remember. ``needs``: None while nothing is known."""
    bounded = limits.within(size.wanted)
    if bounded != size.wanted:
        why = f"the limits are {limits.minimum} to {limits.maximum}"
        return Decision("grows" if bounded > size.wanted else "shrinks", bounded, why), PoolHistory(now_s)
    if needs is None:
        return Decision("unknown", size.wanted, "its servers have no figures yet"), history
    up, down = limits.within(needs.now), limits.within(needs.slack)
    history = _looked(history, now_s, down, pace.down_after_s)
    if up > size.wanted:
        return _grown(now_s, size, up, needs.why, pace, history)
    if down < size.wanted:
        return _shrunk(now_s, size, needs.why, pace, history)
    return Decision("fits", size.wanted, f"{needs.why}; that is enough for now"), history


def _grown(
    now_s: float, size: PoolSize, up: int, why: str, pace: PlannerPace, history: PoolHistory
) -> tuple[Decision, PoolHistory]:
    missing = size.wanted - size.serving
    if missing > 0:
        said = f"{why}; {up} are needed, and {missing} do not serve yet"
        return Decision("waits", size.wanted, said), history
    left_s = 0.0 if history.changed_s is None else history.changed_s + pace.up_pause_s - now_s
    if left_s > 0:
        said = f"{why}; {up} are needed, in {left_s:.0f} s: the last change was a moment ago"
        return Decision("waits", size.wanted, said), history
    return Decision("grows", min(up, 2 * max(1, size.wanted)), why), PoolHistory(now_s)


def _shrunk(
    now_s: float, size: PoolSize, why: str, pace: PlannerPace, history: PoolHistory
) -> tuple[Decision, PoolHistory]:
    since_s = history.looks[0][0]
    most = max(num for _, num in history.looks)
    if most >= size.wanted:
        return Decision("fits", size.wanted, f"{why}; {most} were needed a while ago"), history
    left_s = since_s + pace.down_after_s - now_s
    if left_s > 0:
        said = f"{why}; {most} will do, if that is so for {left_s:.0f} s more"
        return Decision("waits", size.wanted, said), history
    return Decision("shrinks", most, why), PoolHistory(now_s)


def _looked(history: PoolHistory, now_s: float, num_servers: int, keep_s: float) -> PoolHistory:
    """The oldest look that is kept is as old as ``keep_s`` at least, once there was one."""
    looks = (*history.looks, (now_s, num_servers))
    while len(looks) > 1 and looks[1][0] <= now_s - keep_s:
        looks = looks[1:]
    return replace(history, looks=looks)
