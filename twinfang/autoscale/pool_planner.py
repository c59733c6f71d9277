"""Decides when a pool's size changes, from the number of servers that it needs. Does no I/O.

| servers | the pool |
|---|---|
| fewer than are needed | grows at once, at most to double its size, and pauses |
| more than are needed with slack, for a while | shrinks to the maximum number needed in that time |
| some of which can't be read | does not shrink |
| a number between these two | stays |

``Needs.now`` is the number for the present load, ``Needs.slack`` the number for a load that is a quarter
higher. Between the two nothing changes, so a constant load moves a pool in only one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

SLACK = 1.25
"""A pool shrinks only if the remaining servers would be enough for this many times the load."""


@dataclass(frozen=True)
class PoolLimits:
    minimum: int
    maximum: int

    def within(self, num_servers: int) -> int:
        return min(self.maximum, max(self.minimum, num_servers))


@dataclass(frozen=True)
class PlannerPace:
    up_pause_s: float
    """Pause after a change before a pool grows again, so that metrics show the effect of the change first."""
    down_after_s: float
    """A pool shrinks only after fewer servers were enough for this long since its last change."""


@dataclass(frozen=True)
class PoolSize:
    wanted: int
    """Number of servers that the pool's Deployment asks for."""
    serving: int
    """Servers that take requests."""


@dataclass(frozen=True)
class Needs:
    now: int
    slack: int
    why: str
    unread: str = ""
    """The processes whose load is missing from these numbers. Empty if all could be read."""


@dataclass(frozen=True)
class PoolHistory:
    """What a planner remembers of a pool from one decision to the next."""

    changed_s: float | None = None
    looks: tuple[tuple[float, int], ...] = ()
    """Time of each look, and how many servers were needed with slack; only recent looks since the last
    change."""


Kind = Literal["grows", "shrinks", "fits", "waits", "partial", "unknown"]


@dataclass(frozen=True)
class Decision:
    kind: Kind
    num_servers: int
    """The new number of servers; the present number if nothing is to be done now."""
    why: str


def decide(
    now_s: float,
    size: PoolSize,
    needs: Needs | None,
    limits: PoolLimits,
    pace: PlannerPace,
    history: PoolHistory,
) -> tuple[Decision, PoolHistory]:
    """Returns what to do now, and the history to remember. ``needs`` is None while nothing is known."""
    bounded = limits.within(size.wanted)
    if bounded != size.wanted:
        why = f"the limits are {limits.minimum} to {limits.maximum}"
        return Decision("grows" if bounded > size.wanted else "shrinks", bounded, why), PoolHistory(now_s)
    if needs is None:
        return Decision("unknown", size.wanted, "its servers have no figures yet"), history
    up, down = limits.within(needs.now), limits.within(needs.slack)
    if needs.unread and up <= size.wanted:
        why = f"{needs.why}; that is not the whole load, as {needs.unread} can't be read"
        return Decision("partial", size.wanted, why), history
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
        said = f"{why}; {most} are enough if that stays so for {left_s:.0f} s more"
        return Decision("waits", size.wanted, said), history
    return Decision("shrinks", most, why), PoolHistory(now_s)


def _looked(history: PoolHistory, now_s: float, num_servers: int, keep_s: float) -> PoolHistory:
    """Adds a look and drops old looks. Of the looks that are at least ``keep_s`` old, it keeps the newest."""
    looks = (*history.looks, (now_s, num_servers))
    while len(looks) > 1 and looks[1][0] <= now_s - keep_s:
        looks = looks[1:]
    return replace(history, looks=looks)
