"""``twinfang drain``: has a server take no new requests and waits until it has none left."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from functools import partial

from wire.errors import ConfigError, DeadlineError
from wire.generation import GetStats, ServerStats, SetDraining
from wire.rpc import GET_STATS, SET_DRAINING, call, open_channel

CALL_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.1
SETTLE_S = 3.0
"""Routers look every two seconds whether a prefill server drains: until all of them have, it is not over."""


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Raises :class:`ConfigError` without an address."""
    if values.server is None:
        raise ConfigError("which server is to be drained? Give its address: twinfang drain HOST:PORT")
    return partial(_run, values.server, values.timeout)


def _run(address: str, timeout_s: float) -> None:
    started_s = time.monotonic()
    asyncio.run(_drain(address, timeout_s))
    print(f"{address} is drained, after {time.monotonic() - started_s:.1f} s", flush=True)


async def _drain(address: str, timeout_s: float) -> None:
    """Raises :class:`DeadlineError` if there is something left, and what calls raise.

    Nothing is said of letting requests go: a router that knows who can go on with them says that.
    """
    async with open_channel(address) as channel:
        await call(channel, SET_DRAINING, SetDraining(True), timeout_s=CALL_TIMEOUT_S)
        told_s = time.monotonic()
        while True:
            stats: ServerStats = await call(channel, GET_STATS, GetStats(), timeout_s=CALL_TIMEOUT_S)
            waited_s = time.monotonic() - told_s
            if stats.drain == "drained" and waited_s >= SETTLE_S:
                return
            if waited_s >= timeout_s:
                raise DeadlineError(
                    f"{address} is not drained after {timeout_s:g} s: {stats.num_running} requests run, "
                    f"{stats.num_waiting} wait, {stats.leases_held} leases are held; what is left moves to "
                    "other servers when it is stopped, or fails: give it a longer --timeout"
                )
            await asyncio.sleep(POLL_INTERVAL_S)
