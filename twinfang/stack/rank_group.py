"""``twinfang decode --data-parallel-size D``: the ranks of one host, kept running."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from twinfang.flags import table, tls
from twinfang.flags.file_cache import FILE_CACHE
from twinfang.flags.flag import as_arguments
from twinfang.flags.host_cache import HOST_CACHE_SIZE
from twinfang.flags.tls import identity_files
from twinfang.stack.child import Child, ChildSpec
from twinfang.stack.ports import LOOPBACK, free_ports
from twinfang.stack.rank_place import RankPlace
from twinfang.stack.rank_probes import probing
from twinfang.stack.readiness import until_serving
from twinfang.stack.stack import SERVER_STOP_GRACE_S, child_environment, rank_arguments, threads_each
from twinfang.stack.supervisor import Supervisor
from wire.errors import ConfigError
from wire.http.address import host_port
from wire.open_files import raise_open_file_limit

if TYPE_CHECKING:
    from wire.tls.identity import Identity
    from wire.tls.identity_files import IdentityFiles

log = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0
"""Long enough for a rank that loads a large model from a slow disk."""
METRICS_OFFSET = 10_000
MAX_PORT = 65_535
_ANY_ADDRESS = {"0.0.0.0": LOOPBACK, "::": "::1"}

_FLAGS = (
    *table.MODEL_FLAGS.flags,
    *table.CAPACITY,
    HOST_CACHE_SIZE,
    *FILE_CACHE,
    *table.DECODING.flags,
    *table.CHECKS.flags,
    *table.TRACES.flags,
    *(table.ROLE, table.NICE, table.ADVERTISE_HOST, table.TRANSFER_DEADLINE, table.LOCAL_PREFILL),
    *(table.VLLM_METRICS, table.VERIFY_HANDOFFS),
    *tls.TLS_FLAGS,
)


def run(values: argparse.Namespace, place: RankPlace) -> None:
    """Runs the ranks until SIGTERM or SIGINT. Raises :class:`ConfigError` for ports above 65,535 or
    conflicting ports, and :class:`ChildFailedError` if a rank can't start or dies too often."""
    raise_open_file_limit()
    ranks = plan_ranks(values, place)
    files = identity_files(values)
    identity = None if files is None else _identity(files)
    probes = (
        probing(values.host, values.probe_port, _probed(ranks), identity)
        if values.probe_port
        else nullcontext()
    )
    with probes:
        asyncio.run(_supervise(ranks, identity))


def plan_ranks(values: argparse.Namespace, place: RankPlace) -> list[ChildSpec]:
    """Plans one process for each rank of this host."""
    port, metrics_port = values.port, values.metrics_port
    ports = free_ports(place.count, values.host) if port == 0 else range(port, port + place.count)
    if metrics_port is None:
        metrics_ports: Sequence[int] = [one + METRICS_OFFSET for one in ports]
    else:
        metrics_ports = [metrics_port and metrics_port + i for i in range(place.count)]
    if max(*ports, *metrics_ports) > MAX_PORT:
        raise ConfigError(
            f"--data-parallel-size {place.size} needs {place.count} ports from {ports[0]} on and "
            f"{place.count} metrics ports from {metrics_ports[0]} on, but ports end at {MAX_PORT}; choose "
            "lower ports"
        )
    _check_probe_port(values, {*ports, *metrics_ports})
    address = place.address or f"{LOOPBACK}:{free_ports(1)[0]}"
    num_threads = threads_each(values, place.count * values.tensor_parallel)
    specs = []
    for i in range(place.count):
        name = f"{values.name or 'decode'}-{place.first + i}"
        arguments = ["decode", *as_arguments(_FLAGS, values)]
        arguments += rank_arguments(values, place.first + i, address, local_rank=i)
        arguments += ["--threads", str(num_threads), "--host", values.host, "--port", str(ports[i])]
        arguments += ["--metrics-port", str(metrics_ports[i])]
        arguments += ["--log-level", values.log_level, "--name", name]
        specs.append(_spec(name, arguments, values, ports[i], metrics_ports[i]))
    return specs


def _check_probe_port(values: argparse.Namespace, taken: set[int]) -> None:
    port = values.probe_port
    if not port:
        return
    if 0 in taken:
        raise ConfigError(
            f"--probe-port {port} asks ranks on their metrics ports: give --metrics-port PORT too"
        )
    if port in taken:
        raise ConfigError(f"--probe-port {port} is a port of a rank, or of its metrics: choose another one")


def _probed(ranks: Sequence[ChildSpec]) -> dict[str, str]:
    return {
        rank.name: rank.metrics_url.removesuffix("/metrics") for rank in ranks if rank.metrics_url is not None
    }


def _spec(
    name: str, arguments: list[str], values: argparse.Namespace, port: int, metrics_port: int
) -> ChildSpec:
    host = _ANY_ADDRESS.get(values.host, values.host)
    address = host_port(host, port)
    files = identity_files(values)
    scheme = "http" if files is None else "https"
    return ChildSpec(
        name,
        tuple(arguments),
        address,
        lambda: until_serving(address, files),
        SERVER_STOP_GRACE_S,
        metrics_url=f"{scheme}://{host_port(host, metrics_port)}/metrics" if metrics_port else None,
        fate="ranks" if values.enable_expert_parallel else "",
    )


def _identity(files: IdentityFiles) -> Identity:
    from wire.tls.identity import Identity  # only with TLS, since its library takes a while to import

    return Identity(files, "server")


async def _supervise(ranks: list[ChildSpec], identity: Identity | None) -> None:
    def report(child: Child) -> None:
        if child.is_ready and supervisor.is_ready:
            log.info("%d ranks ready: %s", len(ranks), ", ".join(rank.address for rank in ranks))

    supervisor = Supervisor(
        [ranks],
        environment=child_environment(os.environ),
        start_timeout_s=START_TIMEOUT_S,
        on_change=report,
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, supervisor.request_stop)
    async with asyncio.TaskGroup() as tasks:
        watching = None if identity is None else tasks.create_task(identity.watch())
        await supervisor.run()
        if watching is not None:
            watching.cancel()
