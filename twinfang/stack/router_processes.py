"""``twinfang router --workers N``: N routers on one port, kept running."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

from router.config import ProcessPlace
from router.http.sockets import kept_socket, shared_socket
from twinfang.flags import router as router_flags
from twinfang.flags import table, tls
from twinfang.flags.flag import as_arguments
from twinfang.process_secret import SECRET_VARIABLE, process_secret
from twinfang.stack.child import ChildSpec
from twinfang.stack.ports import LOOPBACK, free_ports, require_free
from twinfang.stack.readiness import until_answered
from twinfang.stack.stack import ROUTER_STOP_MARGIN_S, child_environment
from twinfang.stack.supervisor import Supervisor

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0


def run(values: argparse.Namespace) -> None:
    """Runs the routers until SIGTERM or SIGINT. Raises :class:`ConfigError` if the port is taken, and
    :class:`ChildFailedError` if a process can't start or dies too often."""
    if values.port:
        require_free(values.host, values.port)
    with _limit_store(values), shared_socket(values.host, values.port) as reserved:  # it never listens
        port = reserved.getsockname()[1]
        processes = plan_processes(values, port)
        with _kept_ports(processes):
            asyncio.run(_supervise(processes, child_environment(os.environ, values)))


@contextmanager
def _kept_ports(processes: list[ChildSpec]) -> Iterator[None]:
    """Keeps the processes' own ports from other users of the machine, also while a process restarts: whoever
    listened there would be shown the processes' secret."""
    with ExitStack() as exits:
        for process in processes:
            exits.enter_context(kept_socket(int(process.address.rpartition(":")[2])))
        yield


@contextmanager
def _limit_store(values: argparse.Namespace) -> Iterator[None]:
    """Makes the processes count limits of API keys together. Without ``--limit-store`` they share a file that
    ends with them."""
    if values.limit_store or (values.api_keys_file is None and values.jwt_issuer is None):
        yield
        return
    with TemporaryDirectory(prefix="twinfang-limits-") as folder:
        values.limit_store = f"sqlite:{folder}/limits.sqlite"
        log.info(
            "limits of API keys are counted in %s, which ends with this router: --limit-store keeps them",
            values.limit_store,
        )
        yield


def plan_processes(values: argparse.Namespace, port: int) -> list[ChildSpec]:
    own_ports = tuple(free_ports(values.workers))
    return [_process(values, port, ProcessPlace(i, own_ports)) for i in range(values.workers)]


def _process(values: argparse.Namespace, port: int, place: ProcessPlace) -> ChildSpec:
    given = (*router_flags.ROUTER_FLAGS, *tls.TLS_FLAGS, *table.TRACES.flags)
    flags = [flag for flag in given if flag is not router_flags.WORKERS]
    arguments = ["router", *as_arguments(flags, values)]
    arguments += ["--host", values.host, "--port", str(port), "--place", str(place)]
    name = f"{values.name or 'router'}-{place.index}"
    scheme = "http" if values.tls_cert is None else "https"
    arguments += ["--log-level", values.log_level, "--name", name]
    return ChildSpec(
        name,
        tuple(arguments),
        f"{LOOPBACK}:{place.own_port}",
        lambda: until_answered(f"{scheme}://{LOOPBACK}:{place.own_port}/healthz"),
        values.shutdown_grace + ROUTER_STOP_MARGIN_S,
    )


async def _supervise(processes: list[ChildSpec], environment: dict[str, str]) -> None:
    environment |= {SECRET_VARIABLE: process_secret()}
    supervisor = Supervisor([processes], environment=environment, start_timeout_s=START_TIMEOUT_S)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, supervisor.request_stop)
    log.info("%d router processes on one port", len(processes))
    await supervisor.run()
