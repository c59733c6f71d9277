"""The metrics and probes that one server process shows to its operators."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telemetry.engine_metrics import Measures
from telemetry.families.vllm import VllmMetrics
from telemetry.identity_expiry import IdentityExpiry
from telemetry.loop_lag import LoopLag
from telemetry.probe_port import ProbePort
from telemetry.server_metrics import ServerFigures, StatsThen
from telemetry.start_up import StartUp
from wire.errors import ConfigError
from wire.health import ServerState
from wire.http.address import host_port
from wire.messages.generation import ServerInfo, ServerStats
from wire.server import GrpcServer

if TYPE_CHECKING:
    from wire.tls.identity import Identity

log = logging.getLogger(__name__)

METRICS_PORT_OFFSET = 10_000
"""The port for metrics is the server's own port plus this number, unless a flag says otherwise."""
ANSWER_TIMEOUT_S = 1.0
"""How long a scrape waits for an engine's stats. An engine answers between two steps. A scrape does not wait
for a longer step, or for an engine that hangs."""


class ServerTelemetry:
    """The port for metrics and probes, from before the model is loaded until after the last call.

    ``metrics_port``: 0 for no port; None derives the port from the server's own. ``vllm_metrics``: whether
    metrics have vLLM's names too.
    """

    def __init__(
        self,
        server: GrpcServer,
        *,
        host: str,
        port: int,
        metrics_port: int | None,
        vllm_metrics: bool = False,
        identity: Identity | None = None,
    ) -> None:
        self._vllm_metrics = vllm_metrics
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_State(server))
        if identity is not None:
            self._registry.register(IdentityExpiry(identity))
        self._server = server
        self._port: ProbePort | None = None
        self._lag: LoopLag | None = None
        """None until :meth:`show`. Before that, the model is loaded, which blocks the event loop."""
        self._engine_hang: Callable[[], str | None] | None = None
        """None until :meth:`show`."""
        if metrics_port != 0:
            wanted = metrics_port or _derived(port)
            self._port = ProbePort(
                host, wanted, self._registry, self._not_ready, hang=self._hang, identity=identity
            )
            log.info(
                "metrics and probes on %s://%s/metrics", self._port.scheme, host_port(host, self._port.port)
            )

    def show(
        self,
        info: ServerInfo,
        stats: Callable[[], Coroutine[Any, Any, ServerStats]],
        measures: Measures,
        start_up: StartUp,
        engine_hang: Callable[[], str | None],
    ) -> None:
        """Show the server's metrics from now on. ``stats`` is awaited on the running event loop.
        ``engine_hang`` returns, on any thread, how the engine hangs, or None if it does not."""
        self._lag = LoopLag()
        self._engine_hang = engine_hang
        self._registry.register(self._lag)
        reader = StatsReader(stats, asyncio.get_running_loop())
        version = importlib.metadata.version("twinfang")
        figures: Collector = ServerFigures(info, version, reader, measures, start_up)
        self._registry.register(VllmMetrics(figures, info) if self._vllm_metrics else figures)

    async def close(self) -> None:
        if self._lag is not None:
            self._lag.close()
            self._lag = None
        if self._port is not None:
            await asyncio.to_thread(self._port.close)

    def _hang(self) -> str | None:
        if self._lag is not None and self._lag.has_hung:
            return "the event loop hangs"
        return None if self._engine_hang is None else self._engine_hang()

    def _not_ready(self) -> str | None:
        state = self._server.health.state
        return None if state == "serving" else state


class _State(Collector):
    """The server's own state, shown from before its model is loaded."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        now = self._server.health.state
        state = GaugeMetricFamily(
            "twinfang_server_state",
            "1 for the state that this server is in, 0 for the others; serving: it takes requests.",
            labels=["state"],
        )
        for name in get_args(ServerState):
            state.add_metric([name], float(name == now))
        yield state


def _derived(port: int) -> int:
    """Return the port for metrics. If the server takes any free port (0), the port for metrics is 0, too."""
    derived = port + METRICS_PORT_OFFSET if port else 0
    if derived > 65535:
        raise ConfigError(
            f"--port {port}: its metrics would be on port {derived}, and the highest is 65535; "
            "set --metrics-port, or 0 for none"
        )
    return derived


class StatsReader:
    """Asks for stats on the event loop, from any other thread, and keeps the last answer."""

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, ServerStats]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._ask = ask
        self._loop = loop
        self._last: tuple[ServerStats, float] | None = None

    def __call__(self) -> StatsThen | None:
        """Return the stats now or, if there is no answer, the last ones. None if there never were any."""
        question = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        try:
            self._last = question.result(ANSWER_TIMEOUT_S), time.monotonic()
        except TimeoutError:
            question.cancel()
        if self._last is None:
            return None
        stats, at_s = self._last
        return StatsThen(stats, time.monotonic() - at_s)
