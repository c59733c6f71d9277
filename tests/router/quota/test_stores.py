"""All stores follow the same rules, whoever calls them and however often."""

import asyncio
import random
import secrets

import pytest

from router.quota import sqlite_store
from router.quota.limit_store import Ask, Settlement
from router.quota.memory_store import MemoryStore
from router.quota.redis_store import RedisStore, _keys
from router.quota.sqlite_store import SqliteStore
from testing.conditions import until
from wire.errors import ConfigError

BIG = 10**12


def settlement(ask, verdict, num_tokens, **changes):
    standing = verdict.standing
    return Settlement(ask.id, ask.name, num_tokens, standing.day, standing.month, **changes)


async def used(store, ask):
    """Returns what the key has used and reserved, as a further request learns it."""
    standing = (await store.admit(ask(0, tokens_total=BIG))).standing
    assert standing.used_today == standing.used_this_month == standing.used_total
    return standing.used_total, standing.reserved


def test_a_redis_cluster_keeps_the_keys_of_each_tenant_together():
    """A cluster looks at what stands between the first { and the next }, if that is anything."""
    names = ("alice", "tenant:}", "tenant:{a}b", "tenant:%7D", "tenant:a}:live")
    keys = {name: _keys(name) for name in names}
    for name in names:
        assert len({key.partition("{")[2].partition("}")[0] for key in keys[name]}) == 1
        assert all(key.partition("{")[2].partition("}")[0] for key in keys[name])
    assert len({key for several in keys.values() for key in several}) == 4 * len(names)
    assert keys["alice"][0] == "twinfang:limits:{alice}"


async def test_callers_at_the_same_time_admit_what_one_would(open_store, ask):
    stores = [open_store() for _ in range(4)]
    limits = {"requests_per_minute": 25, "tokens_per_minute": BIG}
    verdicts = await asyncio.gather(*(stores[i % 4].admit(ask(10, **limits)) for i in range(100)))
    assert sum(verdict.refused_by is None for verdict in verdicts) == 25
    verdicts = await asyncio.gather(
        *(stores[i % 4].admit(ask(10, tokens_total=550)) for i in range(100)),
    )
    assert sum(verdict.refused_by is None for verdict in verdicts) == 30, "250 tokens are already reserved"


async def test_a_request_is_settled_once_however_often_it_is_told(open_store, ask):
    first, second = open_store(), open_store()
    one = ask(500, tokens_total=BIG)
    verdict = await first.admit(one)
    assert await used(second, ask) == (0, 500)
    for store in (first, second, first):
        await store.settle([settlement(one, verdict, 120)])
    assert await used(second, ask) == (120, 0)
    await first.settle([Settlement("never seen", one.name, 70, 0, 0)])
    assert await used(second, ask) == (120, 0)


@pytest.mark.parametrize("open_store", ["sqlite", "redis"], indirect=True)
async def test_a_charge_counts_once_for_each_id(open_store, ask):
    store, one = open_store(), ask(0, tokens_total=BIG)
    verdict = await store.admit(one)
    for charge in ("a", "b", "a"):
        known = Settlement(
            charge + one.name, one.name, 50, verdict.standing.day, verdict.standing.month, False
        )
        await store.settle([known, known])
    assert await used(store, ask) == (100, 0)


@pytest.mark.parametrize("open_store", ["sqlite", "redis"], indirect=True)
async def test_a_reservation_that_nobody_settles_lapses_and_may_be_settled_late(open_store, ask):
    died, store = open_store(), open_store()
    one = ask(900, lasts_s=0.05, tokens_total=1000)
    verdict = await died.admit(one)
    assert (await store.admit(ask(200, tokens_total=1000))).refused_by == "tokens_total"

    async def has_lapsed():
        return (await store.admit(ask(200, tokens_total=1000))).refused_by is None

    await until(has_lapsed)
    assert await used(store, ask) == (0, 200)
    for _ in range(2):
        await died.settle([settlement(one, verdict, 900)])
    assert await used(store, ask) == (900, 200)


async def test_stores_give_the_same_verdicts(tmp_path, shared_redis, ask):
    """Redis' clock counts; the others follow it."""
    now_s, draw = [0.0], random.Random(1)
    redis = RedisStore(shared_redis.url)
    others = [MemoryStore(lambda: now_s[0]), SqliteStore(tmp_path / "limits.sqlite", lambda: now_s[0])]
    limits = {"requests_per_minute": 4000, "tokens_per_minute": 60_000, "tokens_total": 20_000}
    running = []
    refused_by = set()
    for _ in range(300):
        chosen = {name: limits[name] for name in draw.sample(sorted(limits), draw.randint(1, 3))}
        one = ask(draw.choice([0, 1, 50, 2000]), **chosen)
        verdict = await redis.admit(one)
        now_s[0] = verdict.standing.now_s
        for store in others:
            assert_same(await store.admit(one), verdict)
        refused_by.add(verdict.refused_by)
        if verdict.refused_by is None and one.num_tokens:
            running.append((one, verdict))
        while len(running) > draw.randint(0, 8):
            ended, begun = running.pop(draw.randrange(len(running)))
            told = settlement(ended, begun, draw.randint(0, ended.num_tokens // 4))
            for store in (redis, *others):
                await store.settle([told])
    assert refused_by >= {None, "tokens_total"}
    for store in (redis, *others):
        await store.close()


def assert_same(verdict, expected):
    assert verdict.refused_by == expected.refused_by
    for name in ("day", "used_today", "month", "used_this_month", "used_total", "reserved"):
        assert getattr(verdict.standing, name) == getattr(expected.standing, name), name
    for name in ("requests_spent", "tokens_spent"):
        found, wanted = getattr(verdict.standing, name), getattr(expected.standing, name)
        assert found == pytest.approx(wanted, abs=1e-3), name


def test_a_file_that_is_something_else_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice sha256:00")
    with pytest.raises(ConfigError, match="can't be used: file is not a database"):
        SqliteStore(path)
    with pytest.raises(ConfigError, match="nowhere"):
        SqliteStore(tmp_path / "nowhere" / "limits")


async def test_rows_that_are_too_old_are_deleted(tmp_path, ask, monkeypatch):
    now_s = [1e9]
    store = SqliteStore(tmp_path / "limits.sqlite", lambda: now_s[0])
    monkeypatch.setattr(sqlite_store, "LAPSED_AT_ONCE", 4)
    for _ in range(10):
        one = ask(1, lasts_s=1, tokens_total=BIG)
        verdict = await store.admit(one)
        await store.settle(
            [settlement(Ask(secrets.token_hex(8), *ask_rest(one)), verdict, 1, was_reserved=False)]
        )

    async def num_rows():
        return await store._run(
            lambda connection: [
                connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("reservations", "charges")
            ]
        )

    assert await num_rows() == [10, 10]
    now_s[0] += 10
    for _ in range(3):
        assert await used(store, ask) is not None
    now_s[0] += 2 * 24 * 3600
    for _ in range(3):
        await store.admit(ask(0, tokens_total=BIG))
    assert await num_rows() == [0, 0]
    await store.close()


def ask_rest(one):
    return one.name, one.limits, one.num_tokens, one.lasts_s
