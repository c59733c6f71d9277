"""Stores of every kind, and a Redis server of their own for tests that stop it."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from router.access.key_limits import KeyLimits
from router.quota.limit_store import Ask, LimitStore
from router.quota.memory_store import MemoryStore
from router.quota.redis_store import RedisStore
from router.quota.sqlite_store import SqliteStore
from testing.conditions import TIMEOUT_S
from testing.router.redis_server import RedisServer, running_redis

OpenStore = Callable[[], LimitStore]
"""Opens one more connection to the same store."""


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that tests leave alone: each uses keys of its own."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may kill."""
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenStore]:
    memory = MemoryStore(time.time)
    async with AsyncExitStack() as exits:

        def open_one() -> LimitStore:
            store: LimitStore = memory
            if request.param == "sqlite":
                store = SqliteStore(tmp_path / "limits.sqlite")
            elif request.param == "redis":
                store = RedisStore(request.getfixturevalue("shared_redis").url)
            exits.push_async_callback(store.close)
            return store

        yield open_one


@pytest.fixture
def ask() -> Callable[..., Ask]:
    """Makes requests of one key, which no other test uses."""
    name = f"key-{secrets.token_hex(8)}"

    def make(num_tokens: int = 0, lasts_s: float = TIMEOUT_S, **limits: int) -> Ask:
        return Ask(secrets.token_hex(8), name, KeyLimits(**limits), num_tokens, lasts_s)

    return make
