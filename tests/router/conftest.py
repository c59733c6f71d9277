"""A router over real HTTP in front of scripted servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import ModelSource, RouterConfig
from router.fleet.links import server_connection as connection
from router.fleet.links import server_drain
from router.models.tokenizer import Tokenizer
from router.policies.policy_names import POLICIES
from router.policies.round_robin import RoundRobin
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import (
    MODEL,
    NO_TLS,
    Stack,
    running_router,
)
from testing.router.scripted_servers import Scripted, ScriptedDecode, ScriptedPrefill, server_info
from testing.router.tokenizers import byte_level, write_model_dir

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
            marks: Sequence[str] = (),
            **config: Any,
        ) -> Stack:
            prefill = [ScriptedPrefill(server_info("prefill")) for _ in range(num_prefill)]
            decode = [ScriptedDecode(server_info(role)) for _ in range(num_decode)]
            servers: list[Scripted] = [*prefill, *decode]
            for server in servers:
                server.has_health = has_health
                exits.push_async_callback(server.stop)
                await server.start()
            folder = write_model_dir(
                tmp_path / "model", settings=tokenizer_settings, generation=generation, marks=marks
            )
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
