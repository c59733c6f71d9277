"""A router over real HTTP in front of scripted servers."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from router import connection, server_drain
from router.admission.gate import Gate
from router.app import create_app
from router.config import ModelSource, RouterConfig
from router.http_server import HttpServer
from router.policies.policy_names import POLICIES
from router.policies.round_robin import RoundRobin
from router.services import Services
from router.tokenizer import Tokenizer
from tests.router.scripted_servers import Scripted, ScriptedDecode, ScriptedPrefill, server_info
from tests.router.tokenizers_for_tests import byte_level, write_model_dir

MODEL = "tiny"


@dataclass
class Stack:
    """A router that is ready, the servers behind it and a client in front of it."""

    url: str
    client: httpx.AsyncClient
    app: Any
    prefill: list[ScriptedPrefill]
    decode: list[ScriptedDecode]
    exits: AsyncExitStack

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """Not for every test: it reads all of the machine's certificates."""
        made = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.exits.push_async_callback(made.close)
        return made

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    @property
    def tokenizer(self) -> Tokenizer:
        return self.services.models.find(MODEL).tokenizer

    @property
    def gate(self) -> Gate:
        return self.services.models.find(MODEL).gate

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "hello"} | body)

    async def chat(self, *said: str, **body: Any) -> httpx.Response:
        """What the user and the assistant said, in turns."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said or ("hello",))]
        return await self.client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages} | body
        )

    async def metric(self, name: str, **labels: str) -> float:
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0


TIMEOUT_S = 60.0
"""Of what is over in milliseconds on a machine that has time for it."""
POLL_INTERVAL_S = 0.005
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Of clients of a router that has none: else each would read all of the machine's certificates."""


async def until(condition: Callable[[], Any], *, timeout_s: float = TIMEOUT_S) -> None:
    """Waits until ``condition()`` is true; fails after ``timeout_s``.

    Servers, router and client share this event loop: where it stood still for long, it gets a second's turns.
    """
    deadline, turns_left = time.monotonic() + timeout_s, 1 / POLL_INTERVAL_S
    while not condition():
        assert time.monotonic() < deadline or turns_left > 0, "the condition did not come true in time"
        turns_left -= 1
        await asyncio.sleep(POLL_INTERVAL_S)


def why_not_ready(stack: Stack) -> str:
    """As operators are told; empty if it is ready."""
    absence = stack.services.absence
    return "" if absence is None else absence.detail


async def events_of(stack: Stack, started: asyncio.Event | None = None, **body: Any) -> list[dict[str, Any]]:
    """The data of a streamed completion's events, in order; ``started`` is set at the first."""
    request = {"model": MODEL, "prompt": "hello", "stream": True} | body
    async with stack.client.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        lines = []
        async for line in response.aiter_lines():
            lines += [line] if line else []
            if started is not None:
                started.set()
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def raw_request(
    stack: Stack,
    body: bytes = b"",
    *,
    content_length: int | None = None,
    path: str = "/v1/completions",
    head: str = "",
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A POST on a connection of its own, perhaps with less of a body than it says; ``head`` has lines."""
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    size = len(body) if content_length is None else content_length
    start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
    writer.write(f"{start}Content-Length: {size}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


class PromptServer(HttpServer):
    """Looks more often than ten times a second whether it is to stop: hundreds of tests wait for that."""

    async def main_loop(self) -> None:
        while not await self.on_tick(counter=0):
            await asyncio.sleep(POLL_INTERVAL_S)


@asynccontextmanager
async def running_router(config: RouterConfig) -> AsyncIterator[tuple[str, Any]]:
    """Serves an app from this event loop; yields its URL and the app."""
    app = create_app(config)
    server = PromptServer(app, replace(config, port=0), app.state.drain)
    server.config.timeout_graceful_shutdown = 1
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or serving.done())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", app
    finally:
        server.should_exit = True
        await serving


MakeStack = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def make_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeStack]:
    """Builds a stack: ``make_stack(num_prefill=1, num_decode=1, role="decode", ready=True, **config)``."""
    monkeypatch.setitem(POLICIES, "round_robin", lambda: RoundRobin(first_turn=0))
    for module, name in ((connection, "DESCRIBE_TIMEOUT_S"), (server_drain, "TIMEOUT_S")):
        monkeypatch.setattr(module, name, TIMEOUT_S)
    async with AsyncExitStack() as exits:

        async def make(
            *,
            num_prefill: int = 1,
            num_decode: int = 1,
            role: str = "decode",
            has_health: bool = False,
            ready: bool = True,
            generation: dict[str, Any] | None = None,
            tokenizer_settings: dict[str, Any] | None = None,
            **config: Any,
        ) -> Stack:
            prefill = [ScriptedPrefill(server_info("prefill")) for _ in range(num_prefill)]
            decode = [ScriptedDecode(server_info(role)) for _ in range(num_decode)]
            servers: list[Scripted] = [*prefill, *decode]
            for server in servers:
                server.has_health = has_health
                exits.push_async_callback(server.stop)
                await server.start()
            folder = write_model_dir(tmp_path / "model", settings=tokenizer_settings, generation=generation)
            settings = {
                "models": (ModelSource(MODEL, folder),),
                "prefill_addresses": tuple(server.address for server in prefill),
                "decode_addresses": tuple(server.address for server in decode),
                "probe_interval_s": 0.1,
                "prefill_policy": "round_robin",  # tests know whose turn it is
                "decode_policy": "round_robin",
                "request_timeout_s": TIMEOUT_S,
                "hold_s": 0.0,  # a test of waits for servers says how long
            }
            url, app = await exits.enter_async_context(running_router(RouterConfig(**(settings | config))))
            client = await exits.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=NO_TLS)
            )
            stack = Stack(url, client, app, prefill, decode, exits)
            if ready:
                pool = stack.services.pool
                await until(lambda: pool.num_connected() == pool.num_configured())
                await until(lambda: pool.not_ready_reason() is None)
            return stack

        yield make


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    return byte_level()
