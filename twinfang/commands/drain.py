"""``twinfang drain``: tells servers to take no new requests and waits until they have none left."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from twinfang.flags.tls import identity_files
from wire.channels import Channels, TlsChannels
from wire.errors import ConfigError, DeadlineError, TwinfangError, UnavailableError
from wire.messages.generation import GetStats, ServerStats, SetDraining
from wire.rpc import GET_STATS, SET_DRAINING, call, open_channel
from wire.tls.identity_files import IdentityFiles

CALL_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.1
SETTLE_S = 3.0
"""Routers check, by default every two seconds, whether a prefill server drains. The drain is complete only
when all routers have checked."""


class NotDrainedError(TwinfangError):
    """At least one of several servers is not drained; the message gives the reason for each such server."""

    code = "not_drained"


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares the command. Raises :class:`ConfigError` if no address is given."""
    addresses = [address for several in values.server for address in several]
    if not addresses:
        raise ConfigError("which server is to be drained? Give its address: twinfang drain HOST:PORT")
    files = identity_files(values)
    channels = open_channel if files is None else _channels(files)
    return partial(_run, addresses, values.timeout, channels)


def _channels(files: IdentityFiles) -> Channels:
    from wire.tls.identity import Identity

    return TlsChannels(Identity(files, "operator"))


def _run(addresses: Sequence[str], timeout_s: float, channels: Channels) -> None:
    asyncio.run(_drain_all(addresses, timeout_s, channels))


async def _drain_all(addresses: Sequence[str], timeout_s: float, channels: Channels) -> None:
    """Drains all servers at the same time. If one drain fails, the other drains are still completed. A
    failure raises the error of :func:`_drain` if there is one server, and :class:`NotDrainedError` if there
    are several."""
    outcomes = await asyncio.gather(
        *(_drain(address, timeout_s, channels) for address in addresses), return_exceptions=True
    )
    failures = [outcome for outcome in outcomes if outcome is not None]
    for failure in failures:
        if len(addresses) == 1 or not isinstance(failure, TwinfangError):
            raise failure
    if failures:
        said = "; ".join(map(str, failures))
        raise NotDrainedError(f"{len(failures)} of {len(addresses)} servers are not drained: {said}")


async def _drain(address: str, timeout_s: float, channels: Channels) -> None:
    try:
        await _until_drained(address, timeout_s, channels)
    except UnavailableError as error:
        raise UnavailableError(f"{address}: {error.message}") from error


async def _until_drained(address: str, timeout_s: float, channels: Channels) -> None:
    """Starts the drain and waits for its end. Raises :class:`DeadlineError` if requests or leases are left
    after ``timeout_s``, and the errors of the calls.

    This command asks no server to give requests up: only a router knows another server that can continue
    them.
    """
    async with channels(address) as channel:
        await call(channel, SET_DRAINING, SetDraining(True), timeout_s=CALL_TIMEOUT_S)
        told_s = time.monotonic()
        while True:
            stats: ServerStats = await call(channel, GET_STATS, GetStats(), timeout_s=CALL_TIMEOUT_S)
            waited_s = time.monotonic() - told_s
            if stats.drain == "drained" and waited_s >= SETTLE_S:
                print(f"{address} is drained, after {waited_s:.1f} s", flush=True)
                return
            if waited_s >= timeout_s:
                raise DeadlineError(
                    f"{address} is not drained after {timeout_s:g} s: {stats.num_running} requests run, "
                    f"{stats.num_waiting} wait, {stats.leases_held} leases are held; when the server is "
                    "stopped, the rest moves to other servers or fails: give a longer --timeout"
                )
            await asyncio.sleep(POLL_INTERVAL_S)
