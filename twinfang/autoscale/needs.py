"""Computes how many servers a pool needs for its load. Does no I/O.

The arithmetic is that of ``twinfang plan`` (engine/cost/goodput.py), with measured times in place of computed
step costs: prompts wait for a prefill server as in an M/G/1 queue, and the number of rows of a decode server
is Poisson distributed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.cost.goodput import late_probability, mean_below
from twinfang.autoscale.histogram import Histogram
from twinfang.autoscale.readings import DecodeReading, PrefillReading, RouterReading
from twinfang.autoscale.step_line import StepLine, TpotPoint, step_line, tpot_rows

MAX_BUSY = 0.95
"""Maximum share of the time in which a prefill server may be busy, even if the objectives allow more."""
PLACES_FULL = 0.9
BACKLOG_S = 30.0
"""Time in which the servers should finish the waiting prompts."""


@dataclass(frozen=True)
class Objectives:
    """Limits for times of requests. For each limit, ``share`` of all requests should be within it."""

    ttft_s: float
    tpot_s: float
    queue_s: float
    """Limit for each wait before a server computes: in routers, on prefill servers, on decode servers."""
    share: float = 0.9


@dataclass(frozen=True)
class Need:
    num_servers: int
    why: str


def prefill_need(
    load: PrefillReading, routers: RouterReading, goals: Objectives, *, growth: float = 1.0
) -> Need:
    """Returns the number of prefill servers needed for ``growth`` times as many prompts as now."""
    if not load.service.count:
        return Need(1, "no prompts")
    waiting = load.waiting + (routers.num_queued if routers.places_taken < PLACES_FULL else 0.0)
    work = (load.busy_servers + waiting * load.prompt_s / BACKLOG_S) * growth
    num = _fewest(work, load.service.weighted(), routers.later_s, goals)
    why = f"prompts keep {load.busy_servers:.2f} servers busy"
    if waiting >= 0.5:
        why += f", {waiting:.1f} wait"
    late = routers.ttft.share_above(goals.ttft_s)
    alone = _hopeless_share(load.service, routers.later_s, goals)
    if alone > 1 - goals.share:
        why += f"; {alone:.0%} of them take longer than the TTFT objective even alone"
    waits = _long_wait(load.queue, goals, "on prefill servers")
    if routers.places_taken < PLACES_FULL:
        waits = waits or _long_wait(routers.queue, goals, "in routers")
    if waits:
        tells = f", TTFT is late for {late:.0%}" if late > 1 - goals.share else ""
        return Need(max(num, _more(load.num_servers)), f"{why}; {waits}{tells}")
    return Need(num, why)


def decode_need(
    load: DecodeReading,
    routers: RouterReading,
    goals: Objectives,
    seen: Sequence[TpotPoint],
    *,
    growth: float = 1.0,
) -> Need:
    """Returns the number of decode servers needed for ``growth`` times as many requests as now. ``seen`` has
    the measurements of earlier looks at the metrics and, as its last element, of the present look."""
    wanted = load.running + load.waiting
    why = f"{load.running:.1f} requests run"
    if load.waiting >= 0.5:
        why += f", {load.waiting:.1f} wait for room"
    if routers.places_taken >= PLACES_FULL and routers.num_queued:
        wanted += routers.num_queued
        why += f", {routers.num_queued:.1f} in routers"
    if not wanted or not load.num_servers:
        return Need(1, why)
    points = [point for point in seen if point.rows > 0 and point.tpot_s > 0]
    peak, bound = _peak_rows(load, goals, points)
    per_server = max(0.5, mean_below(peak, goals.share))
    line = step_line(points) or StepLine(1.0, 0.0)
    each = line.servers_each(load.running / load.num_servers, per_server)
    num = max(1, math.ceil(growth * wanted * each - 1e-9))
    why += f"; a server takes {per_server:.1f} on average, bound by {bound}"
    waits = _long_wait(load.queue, goals, "on decode servers")
    if waits:
        return Need(max(num, _more(load.num_servers)), f"{why}; {waits}")
    return Need(num, why)


def _fewest(work: float, runs: Sequence[tuple[float, float]], later_s: float, goals: Objectives) -> int:
    """Returns the smallest number of prefill servers with which waits are short enough.

    ``work`` is the number of servers that the load would keep busy all the time. ``runs`` are run times of
    prompts, each with its share of all prompts.
    """
    mean = sum(run * share for run, share in runs)
    square = sum(run * run * share for run, share in runs)
    rests = [(goals.ttft_s - later_s - run, share) for run, share in runs]
    in_time = [(rest, share) for rest, share in rests if rest >= 0]  # more servers don't help other prompts
    weight = sum(share for _, share in in_time) or 1.0

    def is_enough(num: int) -> bool:
        busy = work / num
        if busy < 1 - goals.share:
            return True  # so few prompts find the server busy at all
        wait_s = busy / (1 - busy) * square / (2 * mean)
        late = sum(share * late_probability(busy, wait_s, rest) for rest, share in in_time) / weight
        return max(late, late_probability(busy, wait_s, goals.queue_s)) <= 1 - goals.share

    num = max(1, math.ceil(work / MAX_BUSY))
    while not is_enough(num):
        num += 1
    return num


def _hopeless_share(service: Histogram, later_s: float, goals: Objectives) -> float:
    return sum(share for run, share in service.weighted() if run + later_s > goals.ttft_s)


def _peak_rows(load: DecodeReading, goals: Objectives, points: Sequence[TpotPoint]) -> tuple[float, str]:
    """Returns the maximum number of rows that one server can run at a time, and the name of the limit."""
    running = load.running / load.num_servers
    limits = {
        "--max-num-seqs": load.max_rows or math.inf,
        "KV blocks": running / load.used_blocks if load.used_blocks > 0 and running else math.inf,
        "TPOT": tpot_rows(goals.tpot_s, points),
    }
    bound = min(limits, key=lambda name: limits[name])
    return (limits[bound], bound) if math.isfinite(limits[bound]) else (1.0, "nothing that is known")


def _long_wait(queue: Histogram, goals: Objectives, where: str) -> str:
    if queue.share_above(goals.queue_s) <= 1 - goals.share:
        return ""
    return f"{goals.share:.0%} of waits {where} take up to {queue.quantile(goals.share):.2g} s"


def _more(num_servers: int) -> int:
    """Adds a quarter to the number, because requests wait although the arithmetic says that there are enough
    servers."""
    return num_servers + max(1, num_servers // 4)
