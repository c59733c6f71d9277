"""A router over real HTTP in front of scripted servers, and its clients' requests."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import httpx
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from router.admission.gate import Gate
from router.app import create_app
from router.config import RouterConfig
from router.http.server import HttpServer
from router.models.tokenizer import Tokenizer
from router.serving.services import Services
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_servers import (
    ScriptedDecode,
    ScriptedPrefill,
)

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
        """Returns an OpenAI client. It reads all of the machine's certificates, so not every test should use
        it."""
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
        """Sends a chat in which the user and the assistant said these texts in turns."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said or ("hello",))]
        return await self.client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages} | body
        )

    async def metric(self, name: str, **labels: str) -> float:
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0


POLL_INTERVAL_S = 0.005
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of a router without TLS. By default each client would read all of the machine's
certificates."""


def why_not_ready(stack: Stack) -> str:
    """Returns why the router is not ready, as operators see it; empty if it is ready."""
    absence = stack.services.absence
    return "" if absence is None else absence.detail


async def events_of(stack: Stack, started: asyncio.Event | None = None, **body: Any) -> list[dict[str, Any]]:
    """Returns the data of a streamed completion's events, in order. ``started`` is set at the first event."""
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
    """Sends a POST on its own connection, possibly with a shorter body than it declares. ``head`` contains
    header lines."""
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    size = len(body) if content_length is None else content_length
    start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}"
    writer.write(f"{start}Content-Length: {size}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


class PromptServer(HttpServer):
    """A server that checks more than ten times a second whether it should stop, because hundreds of tests
    wait for its stop."""

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
        scheme = "http" if config.certificate is None else "https"
        yield f"{scheme}://127.0.0.1:{port}", app
    finally:
        server.should_exit = True
        await serving


async def samples_of(stack, headers: dict[str, str] | None = None) -> dict[tuple[str, ...], float]:
    """Returns the samples by name and label values."""
    text = (await stack.client.get("/metrics", headers=headers)).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def raw(url: str, *parts: bytes) -> bytes:
    """Sends the parts; returns all bytes until the connection is closed."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), TIMEOUT_S)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
