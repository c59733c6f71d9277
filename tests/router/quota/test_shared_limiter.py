"""What happens while a store is down, and after it."""

import asyncio
import contextlib
import logging
import time

from prometheus_client import CollectorRegistry

from router.quota import shared_limiter
from router.quota.metrics import StoreMetrics
from router.quota.redis_store import RedisStore
from router.quota.shared_limiter import DEADLINE_S, SharedLimiter
from router.quota.sqlite_store import SqliteStore
from testing.conditions import TIMEOUT_S, until

BIG = 10**12


@contextlib.asynccontextmanager
async def limiting(store):
    """Yields a running limiter and the registry of its metrics."""
    registry = CollectorRegistry()
    limiter = SharedLimiter(store, StoreMetrics(registry))
    running = asyncio.create_task(limiter.run())
    try:
        yield limiter, registry
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await limiter.close()


def is_up(registry):
    return registry.get_sample_value("twinfang_limit_store_up") == 1


async def used(url, ask):
    """Returns what the store knows of the key."""
    store = RedisStore(url)
    try:
        standing = (await store.admit(ask(0, tokens_total=BIG))).standing
        return standing.used_total, standing.reserved
    finally:
        await store.close()


async def test_a_killed_store_stops_no_request_and_misses_no_token(redis, ask, caplog):
    caplog.set_level(logging.INFO)
    async with limiting(RedisStore(redis.url)) as (limiter, registry):
        begun_before = await limiter.admit(ask(300, tokens_total=1000))
        redis.kill()
        admitted = [await limiter.admit(ask(100, tokens_total=1000)) for _ in range(9)]
        refused_by = [one.verdict.refused_by for one in admitted]
        assert refused_by == [None] * 7 + ["tokens_total"] * 2, "the 300 that run are counted"
        assert not is_up(registry)
        admitted[0].settle(60)
        begun_before.settle(200)
        redis.start()
        await until(lambda: is_up(registry))
        admitted[1].settle(50)  # let in while the store was down, ended after it

        async def is_booked():
            return await used(redis.url, ask) == (310, 0)

        await until(is_booked)
        assert (await limiter.admit(ask(690, tokens_total=1000))).verdict.refused_by is None
    assert registry.get_sample_value("twinfang_limit_store_failures_total") == 1
    assert caplog.text.count("store is down") == caplog.text.count("store is back") == 1


async def test_a_frozen_store_is_waited_for_once(redis, ask):
    async with limiting(RedisStore(redis.url)) as (limiter, registry):
        assert (await limiter.admit(ask(100, tokens_total=BIG))).verdict.standing.reserved == 100
        redis.freeze()
        started = time.monotonic()
        asked = [limiter.admit(ask(100, tokens_total=BIG)) for _ in range(50)]
        for admission in await asyncio.gather(*asked):
            admission.settle(40)
        assert time.monotonic() - started < 2 * DEADLINE_S + 2
        started = time.monotonic()
        (await limiter.admit(ask(100, tokens_total=BIG))).settle(40)
        assert time.monotonic() - started < DEADLINE_S / 2
        redis.thaw()  # it now runs what was sent to it before
        await until(lambda: is_up(registry))

        async def is_booked():
            return await used(redis.url, ask) == (51 * 40, 100)

        await until(is_booked)


async def test_a_call_of_a_frozen_store_ends_wherever_it_is_cancelled(redis, ask):
    store = RedisStore(redis.url)
    await store.check()
    redis.freeze()
    for turns in range(60):
        calling = asyncio.create_task(store.admit(ask(100, tokens_total=BIG)))
        for _ in range(turns):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling], timeout=TIMEOUT_S)
        assert calling.cancelled(), f"after {turns} turns of the loop"
    await store.close()


async def test_a_store_that_was_never_there_stops_no_request(redis, ask):
    redis.kill()
    async with limiting(RedisStore(redis.url)) as (limiter, registry):
        verdicts = [(await limiter.admit(ask(requests_per_minute=2))).verdict for _ in range(3)]
        assert [verdict.refused_by for verdict in verdicts] == [None, None, "requests_per_minute"]
        redis.start()
        await until(lambda: is_up(registry))


async def test_a_locked_file_is_waited_for_within_the_deadline_and_blocks_no_loop(tmp_path, ask, monkeypatch):
    monkeypatch.setattr(shared_limiter, "DEADLINE_S", 0.2)
    path = tmp_path / "limits.sqlite"
    other = SqliteStore(path)
    async with limiting(SqliteStore(path)) as (limiter, registry):
        (await limiter.admit(ask(5, tokens_total=BIG))).settle(5)

        def lock(connection):
            time.sleep(0.9)  # within a transaction, as a disk that hangs would

        locking = asyncio.create_task(other._run(lock))
        await until(lambda: other._thread._work_queue.empty())
        await asyncio.sleep(0)
        ticks = asyncio.create_task(num_ticks())
        admitted = [await limiter.admit(ask(100, tokens_total=BIG)) for _ in range(20)]
        for one in admitted:
            one.settle(1)
        assert await ticks > 5, "the loop ran meanwhile"
        await locking
        await until(lambda: is_up(registry))

        async def is_booked():
            standing = (await other.admit(ask(0, tokens_total=BIG))).standing
            return (standing.used_total, standing.reserved) == (25, 0)

        await until(is_booked)
    await other.close()


async def num_ticks():
    """Returns how often the loop comes round in a quarter of a second, at most every 10 ms."""
    ends, number = time.monotonic() + 0.25, 0
    while time.monotonic() < ends:
        await asyncio.sleep(0.01)
        number += 1
    return number


async def test_a_request_whose_client_goes_away_while_the_store_is_asked_keeps_nothing(shared_redis, ask):
    async with limiting(RedisStore(shared_redis.url)) as (limiter, _):
        await limiter.admit(ask(0, tokens_total=BIG))
        for turns in range(6):
            asking = asyncio.create_task(limiter.admit(ask(100, tokens_total=BIG)))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await asking).settle(0)

        async def is_free():
            return await used(shared_redis.url, ask) == (0, 0)

        await until(is_free)


async def test_what_is_left_is_booked_when_the_process_ends(shared_redis, ask):
    async with limiting(RedisStore(shared_redis.url)) as (limiter, _):
        admitted = [await limiter.admit(ask(100, tokens_total=BIG)) for _ in range(5)]
        for one in admitted:
            one.settle(30)
    assert await used(shared_redis.url, ask) == (150, 0)
