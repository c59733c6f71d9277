"""Several routers that are siblings on one port: in this event loop, or real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from router.app import create_app
from router.config import ProcessPlace, RouterConfig
from router.http.sockets import shared_socket, sockets_of
from testing.conditions import TIMEOUT_S, until
from testing.router.admin_calls import TOKEN
from testing.router.scripted_router import NO_TLS, PromptServer
from testing.router.tokenizers import write_model_dir
from twinfang.stack.ports import free_ports

SECRET = "a-secret-of-siblings"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Sibling:
    """One of several routers, and a client of its own port."""

    app: Any
    client: httpx.AsyncClient
    server: PromptServer

    @property
    def ledger(self) -> dict[tuple[str, ...], tuple[Any, ...]]:
        entries = self.app.state.changes._ledger.entries()
        return {entry.place: entry.values for entry in entries}


@dataclass
class Siblings:
    """Routers that share a port. Any of them can be stopped and started again."""

    config: RouterConfig
    places: list[ProcessPlace]
    exits: AsyncExitStack
    running: dict[int, tuple[Sibling, AsyncExitStack]]

    def __getitem__(self, index: int) -> Sibling:
        return self.running[index][0]

    async def start(self, index: int) -> Sibling:
        exits = AsyncExitStack()
        sibling = await exits.enter_async_context(_running(replace(self.config, place=self.places[index])))
        self.running[index] = (sibling, exits)
        return sibling

    async def stop(self, index: int) -> None:
        _, exits = self.running.pop(index)
        await exits.aclose()


@asynccontextmanager
async def siblings(config: RouterConfig, count: int) -> AsyncIterator[Siblings]:
    """Run ``count`` routers in this event loop. They ask one another over HTTP."""
    ports = tuple(free_ports(count))
    places = [ProcessPlace(index, ports, SECRET) for index in range(count)]
    with shared_socket("127.0.0.1", 0) as reserved:
        config = replace(config, host="127.0.0.1", port=reserved.getsockname()[1])
        async with AsyncExitStack() as exits:
            found = Siblings(config, places, exits, {})
            try:
                for index in range(count):
                    await found.start(index)
                yield found
            finally:
                for index in list(found.running):
                    await found.stop(index)


@asynccontextmanager
async def _running(config: RouterConfig) -> AsyncIterator[Sibling]:
    assert config.place is not None
    app = create_app(config)
    server = PromptServer(app, config, app.state.drain)
    server.config.timeout_graceful_shutdown = 1
    serving = asyncio.create_task(server.serve(sockets_of(config)))
    try:
        await until(lambda: server.started or serving.done())
        url = f"http://127.0.0.1:{config.place.own_port}"
        async with httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT_S, verify=NO_TLS, headers=HEADERS
        ) as client:
            yield Sibling(app, client, server)
    finally:
        server.should_exit = True
        await serving


@dataclass
class RealProcesses:
    """``twinfang router --workers N`` with an admin API."""

    url: str
    parent: psutil.Process

    def process(self, index: int) -> psutil.Process | None:
        """Return the present process with this index; None while it does not run."""
        mark = f"{index}:"
        for child in self.parent.children():
            try:
                arguments = child.cmdline()
            except psutil.Error:  # it has just ended
                continue
            if "--place" in arguments and arguments[arguments.index("--place") + 1].startswith(mark):
                return child
        return None

    def own_url(self, index: int) -> str:
        """Return the address of one process."""
        child = self.process(index)
        assert child is not None
        arguments = child.cmdline()
        ports = arguments[arguments.index("--place") + 1].partition(":")[2].split(",")
        return f"http://127.0.0.1:{ports[index]}"


@contextmanager
def real_processes(folder: Path, count: int, flags: Sequence[str]) -> Iterator[RealProcesses]:
    """Start the processes, and end them with the block. They may not be ready yet."""
    model = write_model_dir(folder / "tiny")
    (model / "config.json").write_text("{}")
    (folder / "admin-token").write_text(TOKEN)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "twinfang", "router", "--workers", str(count), "--port", str(port)]
    command += ["--model", str(model), "--admin-token-file", str(folder / "admin-token"), *flags]
    parent = subprocess.Popen(command)
    try:
        yield RealProcesses(f"http://127.0.0.1:{port}", psutil.Process(parent.pid))
    finally:
        parent.terminate()
        try:
            parent.wait(TIMEOUT_S)
        finally:
            parent.kill()
            parent.wait()
