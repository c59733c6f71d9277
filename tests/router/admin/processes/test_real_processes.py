"""``twinfang router --workers N`` with an admin API: real processes, killed and frozen."""

import asyncio
import json
import signal
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from testing.conditions import TIMEOUT_S, until
from testing.router.router_processes import HEADERS, real_processes
from testing.router.scripted_servers import ScriptedDecode, saying, server_info

NUM_PROCESSES = 4


@pytest.fixture
async def decode():
    servers = [ScriptedDecode(server_info("both"), script=saying([300, 301])) for _ in range(2)]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


@asynccontextmanager
async def admin(url):
    """A client on one connection: all that it asks goes to the same process."""
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=TIMEOUT_S) as client:
        yield client


async def until_all_answer(url, count=NUM_PROCESSES):
    async def all_answer():
        try:
            async with admin(url) as client:
                shown = (await client.get("/admin/v1/processes")).json()
                ready = (await client.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False
        return ready and len(shown["processes"]) == count

    await until(all_answer, timeout_s=4 * TIMEOUT_S, interval_s=0.05)


async def settings_of_all(found, count=NUM_PROCESSES):
    """What each process itself uses, asked at its own port."""
    queues = set()
    for index in range(count):
        async with admin(found.own_url(index)) as client:
            queues.add((await client.get("/admin/v1/config")).json()["max_queue"])
    return queues


async def draining_of_all(found, count=NUM_PROCESSES):
    shown = []
    for index in range(count):
        async with admin(found.own_url(index)) as client:
            workers = (await client.get("/admin/v1/workers")).json()["workers"]
            shown.append({one["id"] for one in workers if one["draining"]})
    return shown


@pytest.mark.exhaustive
async def test_four_processes_are_one_router_to_its_operators(tmp_path, decode):
    flags = [part for server in decode for part in ("--decode", server.address)]
    with real_processes(tmp_path, NUM_PROCESSES, flags) as found:
        await until_all_answer(found.url)

        async def ask():
            async with httpx.AsyncClient(base_url=found.url, timeout=TIMEOUT_S) as client:
                body = {"prompt": [5, 6, 7], "max_tokens": 2}
                assert (await client.post("/v1/completions", json=body)).status_code == 200

        await asyncio.gather(*(ask() for _ in range(40)))
        async with admin(found.url) as client:
            requests = (await client.get("/admin/v1/requests")).json()["requests"]
            assert len(requests) == 40
            assert {one["process"] for one in requests} == set(range(NUM_PROCESSES))
            stats = (await client.get("/admin/v1/stats")).json()
            assert sum(count for _, count in stats["ttft_ms"]["histogram"]) == 40

            # changes reach all
            assert (await client.patch("/admin/v1/config", json={"max_queue": 77})).json()["missing"] == []
            workers = (await client.get("/admin/v1/workers")).json()["workers"]
            worker = workers[0]["id"]
            assert (await client.post(f"/admin/v1/workers/{worker}/drain")).json()["missing"] == []
        assert await settings_of_all(found) == {77}
        assert await draining_of_all(found) == [{worker}] * NUM_PROCESSES

        await _kill_one(found, worker)
        await _freeze_one(found)
        await _change_at_the_same_time(found)


async def _kill_one(found, worker):
    """It comes back with the changes, without a state file."""
    killed = found.process(2)
    killed.kill()
    await until(lambda: found.process(2) not in (None, killed), timeout_s=TIMEOUT_S)
    await until_all_answer(found.url)
    assert await settings_of_all(found) == {77}
    assert await draining_of_all(found) == [{worker}] * NUM_PROCESSES


async def _freeze_one(found):
    """It is named, holds nothing up for long, and gets what it missed."""
    frozen = found.process(3)
    frozen.send_signal(signal.SIGSTOP)
    try:
        async with admin(found.own_url(0)) as client:
            for limit_s in (4.0, 1.5):  # the second time, it is not waited for as long
                started = time.monotonic()
                shown = (await client.get("/admin/v1/workers")).json()
                assert time.monotonic() - started < limit_s
                assert [one["process"] for one in shown["missing"]] == [3]
                assert "did not answer within" in shown["missing"][0]["problem"]
            changed = (await client.patch("/admin/v1/config", json={"max_queue": 88})).json()
            assert [one["process"] for one in changed["missing"]] == [3]
            assert "router process 3 did not answer" in changed["warning"]
            assert changed["max_queue"] == 88
            name, events = "", client.stream("GET", "/admin/v1/events")
            async with asyncio.timeout(TIMEOUT_S), events as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    if name == "processes" and line.startswith("data: "):
                        told = json.loads(line.removeprefix("data: "))
                        if told["missing"]:
                            break
            assert [one["process"] for one in told["missing"]] == [3]
    finally:
        frozen.send_signal(signal.SIGCONT)

    async def has_caught_up():
        return await settings_of_all(found) == {88}

    await until(has_caught_up)


async def _change_at_the_same_time(found):
    async def change(index, value):
        async with admin(found.own_url(index)) as client:
            response = await client.patch("/admin/v1/config", json={"max_queue": value})
            assert response.status_code == 200

    for turn in range(5):
        await asyncio.gather(*(change(index, 100 * turn + index) for index in range(NUM_PROCESSES)))
        assert len(await settings_of_all(found)) == 1, "two processes have different settings"


async def test_the_secret_is_on_no_command_line_and_changes_reach_both(tmp_path, decode):
    with real_processes(tmp_path, 2, ["--decode", decode[0].address]) as found:
        await until_all_answer(found.url, 2)
        for index in range(2):
            child = found.process(index)
            secret = child.environ()["TWINFANG_PROCESS_SECRET"]
            assert len(secret) == 64
            assert not any(secret in part for part in [*child.cmdline(), *found.parent.cmdline()])
        async with admin(found.url) as client:
            assert (await client.patch("/admin/v1/config", json={"max_queue": 7})).json()["missing"] == []
        assert await settings_of_all(found, 2) == {7}
