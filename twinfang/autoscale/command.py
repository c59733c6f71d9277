"""Runs ``twinfang autoscale``."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector

from telemetry.identity_expiry import IdentityExpiry
from telemetry.probe_port import ProbePort
from twinfang.autoscale.autoscaler import Autoscaler
from twinfang.autoscale.needs import Objectives
from twinfang.autoscale.pool_planner import PlannerPace, PoolLimits
from twinfang.autoscale.settings import AutoscaleConfig, PoolSource, RouterIdentity
from twinfang.flags.tls import identity_files
from wire.open_files import raise_open_file_limit

if TYPE_CHECKING:
    from wire.tls.identity import Identity


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares the command. Raises :class:`ConfigError` for flags that contradict one another."""
    config = AutoscaleConfig(
        router_urls=values.router_metrics,
        prefill=_pool(values, "prefill"),
        decode=_pool(values, "decode"),
        objectives=Objectives(values.ttft, values.tpot, values.queue_time),
        pace=PlannerPace(values.up_pause, values.down_after),
        interval_s=values.interval,
        window_s=values.window,
        namespace=values.kubernetes_namespace or "",
        kubeconfig=values.kubeconfig,
        applies=values.apply,
        router_identity=RouterIdentity(values.router_ca_file, values.router_server_name or ""),
        host=values.host,
        metrics_port=values.metrics_port or 0,
        identity=identity_files(values),
        router_token_file=values.router_token_file,
    )
    if config.namespace and config.kubeconfig is None:
        from router.kubernetes.cluster import require_service_account  # needs an optional package

        require_service_account()
    return partial(_run, config)


def _pool(values: argparse.Namespace, role: str) -> PoolSource:
    given = vars(values)
    return PoolSource(
        role,
        given[f"{role}_metrics"],
        PoolLimits(given[f"min_{role}"], given[f"max_{role}"]),
        given[f"{role}_deployment"] or "",
    )


def _run(config: AutoscaleConfig) -> None:
    raise_open_file_limit()
    identity = _identity(config)
    autoscaler = Autoscaler(config, identity, say=lambda line: print(line, flush=True))
    port = _probe_port(config, autoscaler, identity)
    try:
        asyncio.run(_until_signal(autoscaler, identity))
    finally:
        if port is not None:
            port.close()


def _identity(config: AutoscaleConfig) -> Identity | None:
    if config.identity is None:
        return None
    from wire.tls.identity import Identity  # only with TLS, since its library takes a while to import

    return Identity(config.identity, "operator")


def _probe_port(
    config: AutoscaleConfig, autoscaler: Autoscaler, identity: Identity | None
) -> ProbePort | None:
    if not config.metrics_port:
        return None
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(autoscaler.figures)
    if identity is not None:
        registry.register(IdentityExpiry(identity))
    return ProbePort(config.host, config.metrics_port, registry, lambda: None, identity=identity)


async def _until_signal(autoscaler: Autoscaler, identity: Identity | None) -> None:
    loop, running = asyncio.get_running_loop(), asyncio.create_task(autoscaler.run())
    watching = None if identity is None else asyncio.create_task(identity.watch())
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        return
    finally:
        if watching is not None:
            watching.cancel()
