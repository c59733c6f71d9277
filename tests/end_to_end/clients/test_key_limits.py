"""Limits of API keys hold for all processes of all routers together. A store that dies stops no request.

A quick representative is in ``tests/router/quota/test_router_processes.py``.
"""

import asyncio
import contextlib
import time

import httpx
import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.access.key_limits import KeyLimits
from testing.conditions import TIMEOUT_S, until
from testing.fleets.clients import greedy_body
from testing.fleets.stack import running_router
from testing.router.redis_server import running_redis

pytestmark = pytest.mark.exhaustive

KEY = new_key()
BODY = greedy_body([9, 8, 7, 6, 5], 20)
TOKENS = 25
NUM_AT_ONCE = 24


@pytest.fixture
def keys(tmp_path):
    """Returns a function that writes the file of the only key; what that returns is a router's flags."""

    def write(**limits):
        path = tmp_path / "keys"
        path.write_text(key_line(ApiKey("alice", digest_of(KEY), limits=KeyLimits(**limits), role="view")))
        return ["--api-keys-file", str(path)]

    return write


@pytest.fixture
def servers(stacks):
    """Flags that name the servers of a running stack."""
    processes = stacks("up", "--max-num-seqs", "16").processes().values()
    return [f"--{p.name.partition('-')[0]}={p.address}" for p in processes if "-" in p.name]


@pytest.fixture(params=["sqlite", "redis"])
def store(request, tmp_path):
    """Flags that name a store."""
    if request.param == "sqlite":
        yield ["--limit-store", f"sqlite:{tmp_path / 'limits.sqlite'}"]
        return
    with running_redis(tmp_path) as redis:
        yield ["--limit-store", redis.url]


async def ask(url):
    """Sends a request to any process at ``url``: each request has a connection of its own."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        return await client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {KEY}"})


async def ask_all(urls, number):
    """Sends requests to the routers in turn, some at a time; returns the answers."""
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask_one(url):
        async with room:
            return await ask(url)

    return await asyncio.gather(*(ask_one(urls[i % len(urls)]) for i in range(number)))


async def metric(url, name):
    """Returns the values of a metric in all processes of a router."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        lines = (await client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})).text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name]


async def check_rate(urls, per_minute):
    """Checks that the routers admit what one would, within one request."""
    started = time.monotonic()
    answers = await ask_all(urls, 4 * per_minute)
    passed_s = time.monotonic() - started
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 429}
    num_admitted, could_be = statuses.count(200), per_minute + per_minute * passed_s / 60
    assert per_minute <= num_admitted <= could_be + 1, (num_admitted, could_be)


async def test_two_routers_of_two_processes_admit_what_one_would(servers, keys, store):
    flags = ["--workers", "2", *servers, *keys(requests_per_minute=60), *store]
    with running_router(*flags) as first, running_router(*flags) as second:
        await check_rate([first, second], 60)
        answered = [await metric(url, "twinfang_key_requests_total") for url in (first, second)]
    assert all(len(values) >= 2 for values in answered), "every process had a part"


async def test_a_budget_is_not_overrun_by_two_routers_of_two_processes(servers, keys, store):
    budget = 40 * TOKENS + TOKENS - 1
    flags = ["--workers", "2", *servers, *keys(tokens_total=budget), *store]
    with running_router(*flags) as first, running_router(*flags) as second:
        answers = await ask_all([first, second], 120)
        used = sum(a.json()["usage"]["total_tokens"] for a in answers if a.status_code == 200)
        while (last := await ask(first)).status_code == 200:  # some were refused for what ran beside them
            used += last.json()["usage"]["total_tokens"]
        assert last.json()["error"]["code"] == "insufficient_quota"
        assert used == 40 * TOKENS
    with running_router(*flags) as url:  # and the budget outlives the routers
        assert (await ask(url)).json()["error"]["code"] == "insufficient_quota"


async def test_a_store_that_dies_under_load_stops_no_request_and_misses_no_token(servers, keys, tmp_path):
    with contextlib.ExitStack() as exits:
        redis = exits.enter_context(running_redis(tmp_path))
        flags = ["--workers", "2", *servers, *keys(tokens_per_month=10**9), "--limit-store", redis.url]
        urls = [exits.enter_context(running_router(*flags)) for _ in range(2)]
        answers, is_over = [], asyncio.Event()

        async def load(url):
            while not is_over.is_set():
                answers.append(await asyncio.wait_for(ask(url), 10))

        loads = [asyncio.create_task(load(urls[i % 2])) for i in range(8)]
        try:
            for _ in range(2):
                answered = len(answers)
                await until(lambda: len(answers) > answered + 40)  # noqa: B023 - awaited here
                redis.kill()
                await until_up(urls, 0)
                answered = len(answers)
                await until(lambda: len(answers) > answered + 40)  # noqa: B023
                redis.start()
                await until_up(urls, 1)
        finally:
            is_over.set()
            await asyncio.gather(*loads)
        assert {answer.status_code for answer in answers} == {200}
        used = sum(answer.json()["usage"]["total_tokens"] for answer in answers)

        async def all_are_booked():
            return await booked(redis) == (used, 0)

        await until(all_are_booked)


async def until_up(urls, up):
    """Waits until every process of the routers says that its store is up, or that it is down."""

    async def are():
        values = [value for url in urls for value in await metric(url, "twinfang_limit_store_up")]
        return values == [up] * 4

    await until(are, f"the store's metric is {up}")


async def booked(redis):
    from redis.asyncio import Redis

    async with Redis.from_url(redis.url, decode_responses=True) as client:
        account = await client.hgetall("twinfang:limits:{alice}")
    return int(account["used_this_month"]), int(account["reserved"])
