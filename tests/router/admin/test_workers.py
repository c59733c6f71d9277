"""Workers and pools: how they are shown, draining, and servers that appear and disappear."""

import asyncio
import dataclasses

import pytest

from testing.conditions import TIMEOUT_S, until
from testing.router.admin_calls import get, ids, post
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import (
    Scripted,
    ScriptedDecode,
    hanging,
    saying,
    server_info,
    server_stats,
)
from wire.rpc import SET_DRAINING


async def test_workers_and_pools_show_what_servers_and_the_router_know(make_admin_stack):
    stack = await make_admin_stack(num_prefill=1, num_decode=2)
    stack.decode[0].stats = server_stats(num_blocks=100, free_blocks=60, num_running=3, queued_tokens=7)
    stack.decode[0].script = hanging
    await stack.decode[1].stop()
    asked = asyncio.create_task(stack.complete(prompt=[5, 6, 7]))
    await until(lambda: stack.decode[0].submitted and stack.services.pool.num_connected()["decode"] == 1)

    async def shown():
        return {worker["address"]: worker for worker in (await get(stack, "/workers"))["workers"]}

    async with asyncio.timeout(TIMEOUT_S):
        while (await shown())[stack.decode[0].address]["stats"] is None or not (await shown())[
            stack.decode[0].address
        ]["stats"]["num_blocks"]:
            await asyncio.sleep(0.02)
    workers = await shown()
    assert workers.keys() == {server.address for server in (*stack.prefill, *stack.decode)}
    busy, gone = workers[stack.decode[0].address], workers[stack.decode[1].address]
    assert busy["id"].startswith("decode-")
    assert (busy["role"], busy["model"], busy["state"], busy["breaker"]) == (
        "decode",
        MODEL,
        "serving",
        "closed",
    )
    assert (busy["requests"], busy["incarnation"], busy["problem"]) == (1, "decode-1", "")
    assert (busy["stats"]["free_blocks"], busy["stats"]["num_running"], busy["added_by"]) == (60, 3, "flag")
    assert (gone["state"], gone["stats"], gone["model"], gone["requests"]) == ("unreachable", None, None, 0)
    assert gone["problem"]
    pools = {(pool["role"], pool["model"]): pool for pool in (await get(stack, "/pools"))["pools"]}
    decode = pools["decode", MODEL]
    assert (decode["size"], decode["serving"], decode["unreachable"], decode["requests"]) == (1, 1, 0, 1)
    assert (decode["num_blocks"], decode["free_blocks"]) == (100, 60)
    assert pools["decode", None]["unreachable"] == 1
    assert pools["prefill", MODEL]["size"] == 1
    asked.cancel()


async def test_nothing_new_goes_where_it_drains_until_that_is_taken_back(make_admin_stack):
    stack = await make_admin_stack(num_prefill=2, num_decode=2)
    for decode in stack.decode:
        decode.script = saying([300])
    drained = [(await ids(stack, role))[0] for role in ("prefill", "decode")]
    for worker in drained:
        assert (await post(stack, f"/workers/{worker}/drain"))["state"] == "draining"
    for _ in range(4):
        assert (await stack.complete(prompt=[5, 6, 7], max_tokens=1)).status_code == 200
    assert (len(stack.prefill[0].requests), len(stack.decode[0].submitted)) == (0, 0)
    stack.prefill[0].stats = stack.decode[0].stats = server_stats(drain="drained")
    for worker in drained:
        async with asyncio.timeout(TIMEOUT_S):
            while (await get(stack, "/workers"))["workers"] and {
                one["id"]: one["state"] for one in (await get(stack, "/workers"))["workers"]
            }[worker] != "drained":
                await asyncio.sleep(0.02)
        assert (await post(stack, f"/workers/{worker}/undrain"))["state"] == "serving"
    for _ in range(4):
        assert (await stack.complete(prompt=[5, 6, 7], max_tokens=1)).status_code == 200
    assert (len(stack.prefill[0].requests), len(stack.decode[0].submitted)) == (2, 2)
    assert [(one.is_draining, one.lets_go) for one in stack.decode[0].drains] == [
        (True, True),
        (False, False),
    ]
    assert [(one.is_draining, one.lets_go) for one in stack.prefill[0].drains] == [
        (True, False),
        (False, False),
    ]


async def test_requests_are_let_go_only_where_another_server_can_take_them(make_admin_stack):
    stack = await make_admin_stack()
    (worker,) = await ids(stack)
    await post(stack, f"/workers/{worker}/drain")
    assert not stack.decode[0].drains[0].lets_go
    refused = await stack.complete()
    assert refused.status_code == 503
    assert "no decode server is ready" in refused.json()["error"]["message"]
    assert "/undrain" in (await get(stack, "/pools"))["problem"]
    assert (await stack.client.get("/readyz")).status_code == 503
    (prefill,) = await ids(stack, "prefill")
    await post(stack, f"/workers/{worker}/undrain")
    await post(stack, f"/workers/{prefill}/drain")
    assert "no prefill server is ready" in (await stack.complete()).json()["error"]["message"]
    assert "every prefill server" in (await get(stack, "/pools"))["problem"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_that_is_held_back_is_told_that_it_drains(make_admin_stack, role):
    """As a pod that is not ready: nothing new goes there, and it can be reached."""
    stack = await make_admin_stack()
    worker = (await ids(stack, role))[0]
    server = {"decode": stack.decode, "prefill": stack.prefill}[role][0]
    pool = stack.services.pool
    held = next(one for one in pool.workers() if one.worker_id == worker)
    held.hold_back("it is not ready")
    assert held.info is None
    await post(stack, f"/workers/{worker}/drain")
    assert [one.is_draining for one in server.drains] == [True]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_new_life_of_a_server_that_drains_is_told_so(make_admin_stack, role):
    stack = await make_admin_stack()
    (server,) = getattr(stack, role)
    (worker,) = await ids(stack, role)
    await server.stop()
    await until(lambda: stack.services.pool.num_connected()[role] == 0)
    shown = await post(stack, f"/workers/{worker}/drain")  # out of reach: told when it is there
    assert shown["state"] == "unreachable"
    assert shown["draining"]
    for incarnation in ("second", "third"):
        server.info = dataclasses.replace(server.info, incarnation=incarnation, is_draining=False)
        num_told = len(server.drains)
        await server.start()
        await until(lambda told=num_told: len(server.drains) > told)
        assert server.drains[-1].is_draining
        await server.stop()
        await until(lambda: stack.services.pool.num_connected()[role] == 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_that_is_about_to_stop_is_told_when_it_is_back(make_admin_stack, role):
    """It takes no new calls, and its stream is open until its requests have ended."""
    stack = await make_admin_stack()
    (server,) = getattr(stack, role)
    (worker,) = await ids(stack, role)
    stopping = asyncio.create_task(server.server.stop(TIMEOUT_S))
    await until(lambda: stack.services.pool.num_connected()[role] == 0)
    link = next(one for one in stack.services.pool.workers() if one.worker_id == worker)
    assert link.is_connected
    assert (await post(stack, f"/workers/{worker}/drain"))["draining"]
    await server.stop()
    await stopping
    assert not server.drains
    await server.start()
    await until(lambda: server.drains)
    assert server.drains[-1].is_draining


async def test_a_server_that_answers_but_does_not_take_the_call_is_no_success(make_admin_stack, monkeypatch):
    """Nothing would tell it until its next stream, and that may be never."""
    monkeypatch.setattr(Scripted, "unknown_calls", {SET_DRAINING.name})
    stack = await make_admin_stack()
    (worker,) = await ids(stack, "decode")
    reply = await post(stack, f"/workers/{worker}/drain", status=503)
    assert "the worker and other routers do not know" in reply["error"]["message"]


async def test_what_another_router_drains_is_seen(make_admin_stack):
    stack = await make_admin_stack()
    stack.prefill[0].drained_elsewhere(True)
    await until(lambda: stack.services.pool.not_ready_reason() is not None)
    stack.prefill[0].drained_elsewhere(False)
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    assert (await stack.client.post("/admin/v1/workers/nobody/drain")).status_code == 404


async def test_servers_come_and_go_while_it_runs(make_admin_stack):
    stack = await make_admin_stack()
    other = ScriptedDecode(server_info("decode", incarnation="other"), script=hanging)
    await other.start()
    (flagged,) = await ids(stack)
    added = await post(stack, "/workers", 201, address=other.address, role="decode")
    assert (added["added_by"], added["state"]) == ("api", "unreachable")
    assert (await post(stack, "/workers", 409, address=other.address, role="both"))["error"][
        "code"
    ] == "conflict"
    removed = await stack.client.delete(f"/admin/v1/workers/{flagged}")
    assert removed.status_code == 200
    assert await ids(stack) == [added["id"]]
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    asked = asyncio.create_task(stack.complete(prompt=[5, 6]))
    await until(lambda: other.submitted)
    assert (await stack.client.delete(f"/admin/v1/workers/{added['id']}")).status_code == 200
    assert (await stack.complete()).status_code == 503
    assert not other.cancelled, "what is under way there ends there"
    asked.cancel()
    await until(lambda: other.cancelled)
    await post(stack, "/workers", 201, address=other.address, role="decode")
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    await other.stop()


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"address": "nowhere", "role": "decode"}, "host:port"),
        ({"address": "a:99999", "role": "decode"}, "host:port"),
        ({"address": "http://a/b:80", "role": "decode"}, "host:port"),
        ({"address": "a:80", "role": "router"}, "'prefill', 'decode' or 'both'"),
        ({"address": "a:80"}, "role"),
        ({"address": "a:80", "role": "decode", "model": "x"}, "model"),
    ],
    ids=str,
)
async def test_a_server_that_can_not_be_one_is_refused(make_admin_stack, body, part):
    stack = await make_admin_stack()
    refused = await post(stack, "/workers", 400, **body)
    assert part in refused["error"]["message"]
    assert len((await get(stack, "/workers"))["workers"]) == 2
