"""What a server shows of itself before and after it takes requests."""

from contextlib import asynccontextmanager
from typing import get_args

import httpx

from telemetry.server_telemetry import ServerTelemetry
from twinfang.stack.ports import free_ports
from wire.health import ServerState
from wire.server import GrpcServer


@asynccontextmanager
async def showing(server):
    (port,) = free_ports(1)
    telemetry = ServerTelemetry(server, host="127.0.0.1", port=server.port, metrics_port=port)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as client:
            yield client
    finally:
        await telemetry.close()


async def test_the_state_is_shown_from_before_the_model_is_loaded():
    server = GrpcServer("127.0.0.1", 0)
    async with showing(server) as client:
        for state in ("starting", "serving", "draining", "serving", "stopping"):
            if state != "starting":
                await server.health.set(state)
            lines = (await client.get("/metrics")).text.splitlines()
            for name in get_args(ServerState):
                assert f'twinfang_server_state{{state="{name}"}} {float(name == state)}' in lines
