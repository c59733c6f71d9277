"""Accounts in a Redis server, which the routers of several hosts share. Its clock alone counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from router.quota.limit_store import KEPT_S, Ask, LimitStoreError, Settlement, Standing, Verdict
from router.quota.redis_scripts import ADMIT, SETTLE

MAX_CONNECTIONS = 32
"""Further calls wait for a connection."""


class RedisStore:
    """A :class:`LimitStore`. It connects at its first call. Each call waits for the server until its caller
    cancels it."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL that is none of Redis."""
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,
            socket_timeout=None,  # with one, sends use asyncio.wait_for, which may lose a cancellation
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),  # whoever calls decides what is tried again
            decode_responses=True,
        )
        self._redis = Redis(connection_pool=self._pool)
        self._admit = self._redis.register_script(ADMIT)
        self._settle = self._redis.register_script(SETTLE)

    async def admit(self, ask: Ask) -> Verdict:
        limits = ["" if limit is None else limit for limit in astuple(ask.limits)]
        try:
            answer = await self._admit(
                keys=_keys(ask.name), args=[ask.id, ask.num_tokens, ask.lasts_s, *limits]
            )
        except (RedisError, OSError) as error:
            raise _failure(error) from error
        refused_by, now_s, requests, tokens, *counts = answer
        standing = Standing(float(now_s), float(requests), float(tokens), *(int(float(n)) for n in counts))
        return Verdict(standing, refused_by or None)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        try:
            try:
                await self._send(settlements)
            except NoScriptError:  # the server has restarted: nothing was booked
                await self._redis.script_load(SETTLE)
                await self._send(settlements)
        except (RedisError, OSError) as error:
            raise _failure(error) from error

    async def _send(self, settlements: Sequence[Settlement]) -> None:
        """Send all of ``settlements`` at once. Each of them is booked by itself."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for one in settlements:
                keys = [*_keys(one.name), f"{_key(one.name)}:charge:{one.id}"]
                reserved = "reserved" if one.was_reserved else ""
                arguments: list[str | int] = [
                    one.id,
                    one.num_tokens,
                    one.day,
                    one.month,
                    reserved,
                    int(KEPT_S),
                ]
                pipeline.evalsha(self._settle.sha, len(keys), *keys, *arguments)
            await pipeline.execute()

    async def check(self) -> None:
        try:
            await self._redis.ping()
        except (RedisError, OSError) as error:
            raise _failure(error) from error

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()


def _key(name: str) -> str:
    """Return the key of an account. Braces say which keys a cluster keeps together; those in the name of a
    tenant would say otherwise."""
    escaped = name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return f"twinfang:limits:{{{escaped}}}"


def _keys(name: str) -> list[str]:
    key = _key(name)
    return [key, f"{key}:reservations", f"{key}:live", f"{key}:lapsed"]


def _failure(error: Exception) -> LimitStoreError:
    return LimitStoreError(f"Redis: {type(error).__name__}: {error}")
