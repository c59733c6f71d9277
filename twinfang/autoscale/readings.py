"""The recent load of the pools, from their processes' metrics. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinfang.autoscale.histogram import Histogram, added
from twinfang.autoscale.metrics_page import PageChange
from twinfang.autoscale.page_window import PageWindow


@dataclass(frozen=True)
class RouterReading:
    """The recent load of all routers."""

    ttft: Histogram
    tpot: Histogram
    """Times between tokens."""
    queue: Histogram
    """Waits in routers, before a request is sent to any server."""
    num_queued: float = 0.0
    places_taken: float = 0.0
    """Share of the decode servers' places that are taken. Above 0.9, requests in routers wait for decode
    servers."""
    later_s: float = 0.0
    """Mean time from the end of a prompt's prefill to the first token."""


@dataclass(frozen=True)
class PrefillReading:
    """The recent load of all prefill servers that take requests."""

    num_servers: int
    busy_servers: float
    """Number of servers times the share of the time in which steps ran."""
    prompt_s: float
    """Step time that a prompt takes. If several prompts share a step, the step's time is divided among
    them."""
    waiting: float
    service: Histogram
    """Run times of prompts."""
    queue: Histogram
    """Waits on the servers."""


@dataclass(frozen=True)
class DecodeReading:
    """The recent load of all decode servers that take requests."""

    num_servers: int
    running: float
    """Average number of running requests, over all servers."""
    waiting: float
    max_rows: float
    """Maximum number of rows of one server."""
    used_blocks: float
    """Share of all blocks that is in use."""
    batch_rows: float
    """Average rows of a step."""
    queue: Histogram
    """Waits for room."""


def router_reading(window: PageWindow) -> RouterReading:
    changes = window.changes()
    ttft, queue = _all(changes, "time_to_first_token"), _all(changes, "request_queue")
    before = ("prefill_queue", "prefill")
    later_s = ttft.mean - queue.mean - sum(_all(changes, name).mean for name in before)
    places, taken = window.mean("twinfang_places"), window.mean("twinfang_places_taken")
    return RouterReading(
        ttft,
        _all(changes, "inter_token_latency"),
        queue,
        num_queued=window.mean("twinfang_requests_queued"),
        places_taken=taken / places if places else 0.0,
        later_s=max(0.0, later_s),
    )


def prefill_reading(window: PageWindow) -> PrefillReading:
    changes = serving(window)
    busy = [(change.sum("twinfang_step_seconds_sum"), change.seconds) for change in changes]
    service = _all(changes, "prefill")
    return PrefillReading(
        len(changes),
        sum(min(1.0, steps_s / seconds) for steps_s, seconds in busy if seconds),
        sum(steps_s for steps_s, _ in busy) / service.count if service.count else 0.0,
        window.mean("twinfang_requests_waiting"),
        service,
        _all(changes, "request_queue"),
    )


def decode_reading(window: PageWindow) -> DecodeReading:
    changes = serving(window)
    blocks, free = window.mean("twinfang_kv_blocks"), window.mean("twinfang_kv_blocks_free")
    rows = sum(change.now.sum("twinfang_rows") for change in changes)
    return DecodeReading(
        len(changes),
        window.mean("twinfang_requests_running"),
        window.mean("twinfang_requests_waiting"),
        rows / len(changes) if changes else 0.0,
        1 - free / blocks if blocks else 0.0,
        added([change.histogram("twinfang_batch_size") for change in changes]).mean,
        _all(changes, "request_queue"),
    )


def serving(window: PageWindow) -> list[PageChange]:
    """Returns the changes of servers that take requests now and were read at least twice."""
    return [change for change in window.changes() if change.now.sum("twinfang_server_state", state="serving")]


def _all(changes: Sequence[PageChange], name: str) -> Histogram:
    return added([change.histogram(f"twinfang_{name}_seconds") for change in changes])
