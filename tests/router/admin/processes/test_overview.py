"""One process shows what all of them know."""

import asyncio
import json

import httpx
import pytest

from router.admin.processes import channel
from testing.conditions import TIMEOUT_S, until
from testing.router.admin_calls import TOKEN, get, get_whole, ids
from testing.router.router_processes import SECRET
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import hanging, server_stats


async def complete(sibling, **body):
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2} | body
    response = await sibling.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text


async def test_requests_and_figures_of_all_processes_are_one_view(make_siblings):
    stack = await make_siblings()
    for index, count in enumerate((1, 2, 3)):
        for _ in range(count):
            await complete(stack[index])
    for index in range(3):
        shown = await get_whole(stack[index], "/requests")
        assert [one["state"] for one in shown["requests"]] == ["finished"] * 6
        assert sorted(one["process"] for one in shown["requests"]) == [0, 1, 1, 2, 2, 2]
        times = [one["received_at"] for one in shown["requests"]]
        assert times == sorted(times, reverse=True)
        stats = await get_whole(stack[index], "/stats")
        assert sum(count for _, count in stats["ttft_ms"]["histogram"]) == 6
        rates = stats["throughput"]
        assert rates["prompt_tokens_per_s"] == pytest.approx(3 * rates["requests_per_s"], rel=0.01)
        assert 0 < stats["ttft_ms"]["p50"] <= stats["ttft_ms"]["p99"]
        about = (await get_whole(stack[index], "/processes"))["processes"]
        assert [one["process"] for one in about] == [0, 1, 2]
    assert len((await get(stack[0], "/requests?limit=4"))["requests"]) == 4


async def test_load_of_a_server_is_the_sum_and_its_stats_are_shown_once(make_siblings):
    stack = await make_siblings()
    for server in stack.decode:
        server.script = hanging
        server.stats = server_stats(num_blocks=100, free_blocks=60)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(complete(stack[i % 3])) for i in range(6)]
        await until(lambda: sum(len(server.submitted) for server in stack.decode) == 6)
        workers = (await get_whole(stack[1], "/workers"))["workers"]
        assert sum(worker["requests"] for worker in workers if worker["role"] == "decode") == 6
        assert {worker["state"] for worker in workers} == {"serving"}

        async def blocks():
            pools = (await get_whole(stack[1], "/pools"))["pools"]
            return next(pool["num_blocks"] for pool in pools if pool["role"] == "decode") == 200

        await until(blocks)
        (model,) = (await get_whole(stack[2], "/models"))["models"]
        assert (model["name"], model["in_flight"], model["queued"]) == (MODEL, 6, 0)
        assert (await get_whole(stack[2], "/stats"))["in_flight"] == 6
        for task in tasks:
            task.cancel()


async def test_a_request_is_found_and_ended_wherever_it_is(make_siblings):
    stack = await make_siblings()
    for server in stack.decode:
        server.script = hanging
    body = {"model": MODEL, "prompt": [5, 6, 7]}

    def ask(index, name):
        headers = {"X-Request-Id": name}
        return asyncio.create_task(stack[index].client.post("/v1/completions", json=body, headers=headers))

    one, same_id, other = ask(1, "twice"), ask(2, "twice"), ask(2, "other")
    await until(lambda: sum(len(server.submitted) for server in stack.decode) == 3)
    detail = await get(stack[0], "/requests/cmpl-other")
    assert detail["process"] == 2
    assert detail["timeline"][0]["name"] == "received"
    ended = await stack[0].client.post("/admin/v1/requests/cmpl-twice/abort", params={"process": 1})
    assert ended.json()["process"] == 1
    assert (await one).status_code == 499
    assert not same_id.done(), "a request of another process was meant"
    await stack[0].client.post("/admin/v1/requests/cmpl-twice/abort")
    assert (await same_id).status_code == 499
    assert not other.done()
    assert (await stack[1].client.get("/admin/v1/requests/nobody")).status_code == 404
    await stack[1].client.post("/admin/v1/requests/cmpl-other/abort")
    assert (await other).json()["error"]["code"] == "aborted"


async def test_keys_are_added_up(make_siblings, tmp_path):
    from router.access.api_keys import ApiKey, digest_of
    from router.access.key_file import key_line

    lines = [key_line(ApiKey(name, digest_of(f"key-of-{name}"))) for name in ("alice", "idle")]
    (tmp_path / "keys").write_text("\n".join(lines))
    stack = await make_siblings(api_keys_file=tmp_path / "keys")
    for index in range(3):
        stack[index].client.headers["x-api-key"] = "key-of-alice"
        headers = {"Authorization": "Bearer key-of-alice"}
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2}
        answer = await stack[index].client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    keys = {key["name"]: key for key in (await get_whole(stack[0], "/keys"))["keys"]}
    assert list(keys) == ["alice", "idle"]
    assert keys["alice"]["requests"] == {"completed": 3}
    assert (keys["alice"]["prompt_tokens"], keys["alice"]["generated_tokens"]) == (9, 6)
    assert keys["alice"]["cached_tokens"] == 3 * 4  # what the scripted prefill server says
    assert (keys["idle"]["requests"], keys["idle"]["prompt_tokens"]) == ({}, 0)


async def test_a_process_that_does_not_answer_is_named_and_holds_nothing_up(make_siblings, monkeypatch):
    stack = await make_siblings()
    await stack.routers.stop(2)
    shown = await get(stack[0], "/workers")
    assert len(shown["workers"]) == 3
    (missing,) = shown["missing"]
    assert missing["process"] == 2
    assert "can't be reached" in missing["problem"]
    refused = await stack[0].client.get("/admin/v1/requests/cmpl-nobody")
    assert refused.status_code == 503
    assert "router process 2 can't be reached" in refused.json()["error"]["message"]


async def test_a_process_that_takes_connections_and_says_nothing_is_given_up(make_siblings, monkeypatch):
    """As one that is frozen: the kernel still takes connections for it."""
    monkeypatch.setattr(channel, "TIMEOUT_S", 0.2)
    stack = await make_siblings()
    port = stack.routers.places[2].own_port
    await stack.routers.stop(2)
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)
    try:
        (missing,) = (await get(stack[0], "/stats"))["missing"]
        assert missing == {"process": 2, "problem": "did not answer within 0.2 s"}
        (worker, _) = await ids(stack[0])
        drained = (await stack[0].client.post(f"/admin/v1/workers/{worker}/drain")).json()
        assert drained["missing"][0]["process"] == 2
        assert "router process 2 did not answer" in drained["warning"]
        assert drained["draining"]
        async with asyncio.timeout(TIMEOUT_S), stack[0].client.stream("GET", "/admin/v1/events") as stream:
            lines = [line async for line in _until(stream, '"problem":"does not answer"')]
        assert any('"process":2' in line for line in lines)
    finally:
        silent.close()


async def _until(stream, part):
    """Yields lines up to the first one that contains ``part``."""
    async for line in stream.aiter_lines():
        yield line
        if part in line:
            return


async def test_events_of_all_processes_come_in_one_stream(make_siblings):
    stack = await make_siblings()
    seen = []
    (worker, _) = await ids(stack[0])
    async with asyncio.timeout(TIMEOUT_S), stack[0].client.stream("GET", "/admin/v1/events") as stream:
        name, stage = "", 0
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: "):
                seen.append((name, json.loads(line.removeprefix("data: "))))
            all_there = [one for event, one in seen if event == "processes"][-1:]
            if stage == 0 and all_there and len(all_there[0]["processes"]) == 3:
                stage = 1
                await complete(stack[2])
                await stack[1].client.post(f"/admin/v1/workers/{worker}/drain")
            ended = [one for event, one in seen if event == "request" and one["process"] == 2]
            drains = [one for event, one in seen if event == "worker" and one["draining"]]
            if stage == 1 and ended and ended[-1]["state"] == "finished" and drains:
                stage = 2
                await stack.routers.stop(2)
            if stage == 2 and all_there[0]["missing"]:
                break
    assert all_there[0]["missing"][0]["process"] == 2
    assert [one["process"] for one in all_there[0]["processes"]] == [0, 1]
    assert not [one for event, one in seen if event == "counts"], "for siblings alone"


async def test_only_siblings_may_ask_and_only_with_their_secret(make_siblings):
    stack = await make_siblings(count=2)
    async with httpx.AsyncClient(base_url=str(stack[0].client.base_url), timeout=TIMEOUT_S) as stranger:
        for method, path in [
            ("GET", "/report"),
            ("GET", "/events"),
            ("GET", "/requests/x"),
            ("POST", "/requests/x/abort"),
            ("POST", "/ledger"),
            ("POST", "/ledger/newer"),
            ("GET", "/nothing"),
            ("GET", ""),
        ]:
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer x"}):
                response = await stranger.request(method, f"/admin/process{path}", headers=headers)
                assert response.status_code == 401, path
                assert SECRET not in response.text
        allowed = {"Authorization": f"Bearer {SECRET}"}
        assert (await stranger.get("/admin/process/report", headers=allowed)).status_code == 200
        assert (await stranger.get("/admin/v1/stats", headers=allowed)).status_code == 401
        schema = (await stranger.get("/openapi.json")).json()
        assert not [path for path in schema["paths"] if "process/" in path]
