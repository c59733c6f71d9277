"""Metrics pages of fake processes over HTTP, with values that a test sets."""

from __future__ import annotations

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TIMES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Pages:
    """Serves metrics pages on one port, each at its own path."""

    def __init__(self):
        self.registries = []
        self.are_shown = True
        self.tokens = {}
        """By URL: what a caller has to show there."""
        self._runner = None
        self._port = 0

    async def start(self):
        app = web.Application()
        app.router.add_get("/{index}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self):
        await self._runner.cleanup()

    def add(self, registry):
        self.registries.append(registry)
        return f"http://127.0.0.1:{self._port}/{len(self.registries) - 1}"

    async def _answer(self, request):
        if not self.are_shown:
            return web.Response(status=503)
        token = self.tokens.get(str(request.url))
        if token is not None and request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401)
        return web.Response(body=generate_latest(self.registries[int(request.match_info["index"])]))


class FakeProcess:
    """A process with the metric names of docs/metrics.md that a planner reads. An end-to-end test checks the
    names."""

    def __init__(self, pages):
        self.registry = CollectorRegistry()
        self.url = pages.add(self.registry)
        Gauge("process_start_time_seconds", "", registry=self.registry).set(1000.0)

    def gauge(self, name, value):
        Gauge(f"twinfang_{name}", "", registry=self.registry).set(value)

    def histogram(self, name, buckets=TIMES):
        return Histogram(f"twinfang_{name}", "", buckets=buckets, registry=self.registry)


class FakeRouter(FakeProcess):
    def __init__(self, pages):
        super().__init__(pages)
        self.ttft = self.histogram("time_to_first_token_seconds")
        self.tpot = self.histogram("inter_token_latency_seconds")
        self.queue = self.histogram("request_queue_seconds")
        for name in ("requests_queued", "places_taken"):
            self.gauge(name, 0.0)
        self.gauge("places", 100.0)


class FakeServer(FakeProcess):
    def __init__(self, pages, *, rows=8.0):
        super().__init__(pages)
        state = Gauge("twinfang_server_state", "", ["state"], registry=self.registry)
        self.state = {one: state.labels(one) for one in ("starting", "serving")}
        self.state["serving"].set(1.0)
        self.steps = self.histogram("step_seconds")
        self.prefill = self.histogram("prefill_seconds")
        self.queue = self.histogram("request_queue_seconds")
        self.batch = self.histogram("batch_size", (1, 2, 4, 8, 16, 32))
        self.running = Gauge("twinfang_requests_running", "", registry=self.registry)
        self.gauge("requests_waiting", 0.0)
        self.gauge("rows", rows)
        self.gauge("kv_blocks", 1000.0)
        self.gauge("kv_blocks_free", 990.0)
        Counter("twinfang_preemptions", "", registry=self.registry)


@pytest.fixture
async def pages():
    shown = Pages()
    await shown.start()
    yield shown
    await shown.stop()
