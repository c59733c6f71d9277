"""The admin API: who may ask, and what it shows of workers, requests and the last minute."""

import asyncio
import dataclasses
import hashlib
import json
import sqlite3
from contextlib import closing

import httpx
import pytest
from fastapi.routing import APIRoute

from router.admin.admin_token import AdminToken
from router.admin.state_file import StateFile
from tests.router.conftest import MODEL, until
from tests.router.scripted_servers import ScriptedDecode, hanging, saying, server_info, server_stats
from wire.errors import ConfigError

TOKEN = "a-token-for-tests-0123456789"
WITH_BODY = {("POST", "/admin/v1/workers"), ("PATCH", "/admin/v1/config")}


@pytest.fixture
def make_admin_stack(make_stack, tmp_path):
    """``make_stack`` with an admin API; its client has the token in ``stack.admin``."""

    async def make(**config):
        path = tmp_path / "admin-token"
        path.write_text(TOKEN + "\n")
        stack = await make_stack(admin_token_file=path, **config)
        stack.client.headers["Authorization"] = f"Bearer {TOKEN}"
        return stack

    return make


async def get(stack, path):
    response = await stack.client.get(f"/admin/v1{path}")
    assert response.status_code == 200, response.text
    return response.json()


# --- the token -------------------------------------------------------------------------------------


def routes_of(app):
    """Paths, with something for their parameters, and methods of all routes, however they were added."""
    schema = app.openapi()
    return [
        (method.upper(), path.replace("{request_id}", "x").replace("{worker_id}", "x"))
        for path, methods in schema["paths"].items()
        for method in methods
        if path.startswith("/admin/v1")
    ]


async def test_no_admin_route_answers_without_its_token(make_admin_stack):
    stack = await make_admin_stack()
    found = routes_of(stack.app)
    assert len(found) >= 7
    assert not [
        route
        for route in stack.app.routes
        if isinstance(route, APIRoute) and "/admin/v1" in route.path and not route.include_in_schema
    ]
    bad = [
        {},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
    ]
    bad += [
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {hashlib.sha256(TOKEN.encode()).hexdigest()}"},
    ]
    async with httpx.AsyncClient(base_url=stack.url) as stranger:
        for method, path in [
            *found,
            ("GET", "/admin/v1"),
            ("GET", "/admin/v1/nothing"),
            ("PUT", "/admin/v1/stats"),
        ]:
            for headers in bad:
                response = await stranger.request(method, path, headers=headers, content=b"{")
                assert response.status_code == 401, (method, path, headers)
                assert response.json()["error"]["code"] == "invalid_admin_token"
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert TOKEN not in response.text
        twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")]
        assert (await stranger.get("/admin/v1/stats", headers=twice)).status_code == 401
        for path in ("//admin/v1/stats", "/admin/v1/../v1/stats", "/%61dmin/v1/stats", "/admin/v1/stats/"):
            assert (await stranger.get(path)).status_code in (401, 404)
    assert (
        await stack.client.get("/admin/v1/stats", headers={"Authorization": f"bearer {TOKEN}"})
    ).status_code == 200


async def test_without_a_token_file_there_is_no_admin_api(make_stack):
    stack = await make_stack()
    response = await stack.client.get("/admin/v1/workers", headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 404
    assert not routes_of(stack.app)


def test_a_token_is_kept_as_its_digest_and_may_come_as_one(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"sha256:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    token = AdminToken.from_file(path)
    assert token.matches(TOKEN.encode())
    assert not token.matches(path.read_bytes().strip())
    assert TOKEN not in str(vars(token))


@pytest.mark.parametrize("text", ["", "short", "two words that are long", b"\xff\xfe" * 10])
def test_a_token_that_could_be_guessed_is_refused_at_the_start(tmp_path, text):
    path = tmp_path / "token"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=str(path)):
        AdminToken.from_file(path)


# --- what it shows ---------------------------------------------------------------------------------


async def test_workers_and_pools_show_what_servers_and_the_router_know(make_admin_stack):
    stack = await make_admin_stack(num_prefill=1, num_decode=2)
    stack.decode[0].stats = server_stats(num_blocks=100, free_blocks=60, num_running=3, queued_tokens=7)
    stack.decode[0].script = hanging
    await stack.decode[1].stop()
    asked = asyncio.create_task(stack.complete(prompt=[5, 6, 7]))
    await until(lambda: stack.decode[0].submitted and stack.services.pool.num_connected()["decode"] == 1)

    async def shown():
        return {worker["address"]: worker for worker in (await get(stack, "/workers"))["workers"]}

    async with asyncio.timeout(10):
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


async def test_a_request_is_shown_from_its_arrival_with_a_timeline(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = hanging
    asked = asyncio.create_task(
        stack.client.post("/v1/completions", json={"prompt": [5, 6, 7]}, headers={"X-Request-Id": "mine"})
    )
    await until(
        lambda: (
            stack.services.requests.in_flight() and stack.services.requests.in_flight()[0].state == "decode"
        )
    )
    (shown,) = (await get(stack, "/requests"))["requests"]
    assert (shown["model"], shown["state"], shown["prompt_tokens"], shown["generated_tokens"]) == (
        MODEL,
        "decode",
        3,
        1,
    )
    assert shown["prefill_worker"].startswith("prefill-")
    assert shown["decode_worker"].startswith("decode-")
    assert shown["age_s"] > 0
    detail = await get(stack, f"/requests/{shown['id']}")
    assert [event["duration_s"] for event in detail["timeline"] if event["name"] == "decode"] == [None]
    assert (await stack.client.post(f"/admin/v1/requests/{shown['id']}/abort")).status_code == 200
    answer = await asked
    assert answer.status_code == 499
    assert answer.json()["error"]["code"] == "aborted"
    await until(lambda: stack.decode[0].cancelled)
    (shown,) = (await get(stack, "/requests?limit=1"))["requests"]
    assert (shown["state"], shown["error"], shown["generated_tokens"]) == ("cancelled", "aborted", 1)
    assert await stack.metric("twinfang_requests_total", outcome="cancelled") == 1


async def test_a_finished_request_says_where_its_time_went(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = saying([300, 301, 302])
    assert (await stack.complete(prompt=[5, 6, 7], n=2, max_tokens=3)).status_code == 200
    (shown,) = (await get(stack, "/requests"))["requests"]
    assert (shown["state"], shown["generated_tokens"], shown["choices"]) == ("finished", 6, 2)
    timeline = (await get(stack, f"/requests/{shown['id']}"))["timeline"]
    first = [event for event in timeline if event["choice"] == 0]
    names = [event["name"] for event in first]
    assert names[:2] == ["received", "queued"]
    assert set(names) == {
        *(
            "received",
            "queued",
            "prefill_queue",
            "prefill",
            "decode_queue",
            "transfer",
            "first_token",
            "decode",
            "done",
        )
    }
    assert names[-1] == "done"
    assert [event["at_s"] for event in timeline] == sorted(event["at_s"] for event in timeline)
    assert all(
        event["duration_s"] >= 0 and event["at_s"] + event["duration_s"] <= shown["age_s"] + 1e-5
        for event in timeline
    )
    durations = {event["name"]: event["duration_s"] for event in first}
    assert durations["prefill"] <= 0.002 + 1e-6, "the server's own figure"
    assert {event["worker"].split("-")[0] for event in first if event["name"] == "prefill"} == {"prefill"}


async def test_a_retry_stands_in_the_timeline(make_admin_stack):
    stack = await make_admin_stack(num_prefill=2)
    await stack.prefill[0].stop()
    stack.decode[0].script = saying([300])
    assert (await stack.complete(prompt=[5, 6, 7], max_tokens=1)).status_code == 200
    assert (await stack.complete(prompt=[5, 6, 7], max_tokens=1)).status_code == 200
    details = [
        await get(stack, f"/requests/{one['id']}") for one in (await get(stack, "/requests"))["requests"]
    ]
    retries = [event for detail in details for event in detail["timeline"] if event["name"] == "retry"]
    if retries:  # unless the router had noticed before
        assert retries[0]["detail"] == "no_server_available"
        assert [e["attempt"] for d in details for e in d["timeline"] if e["name"] == "done"].count(1) == 1


async def test_what_ids_and_limits_are_wrong_is_said(make_admin_stack):
    stack = await make_admin_stack()
    unknown = await stack.client.get("/admin/v1/requests/nobody")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    for limit in ("0", "x", "99999999"):
        refused = await stack.client.get(f"/admin/v1/requests?limit={limit}")
        assert refused.status_code == 400
        assert "limit" in refused.json()["error"]["message"]


async def test_stats_are_of_the_last_minute(make_admin_stack):
    stack = await make_admin_stack()
    empty = await get(stack, "/stats")
    assert (empty["ttft_ms"]["p50"], empty["ttft_ms"]["histogram"], empty["cache_hit_rate"]) == (
        None,
        [],
        None,
    )
    stack.decode[0].script = saying([300, 301, 302])
    for _ in range(4):
        assert (await stack.complete(prompt=[5, 6, 7, 8], max_tokens=3)).status_code == 200
    stats = await get(stack, "/stats")
    assert (stats["window_s"], stats["in_flight"], stats["queued"]) == (60, 0, 0)
    rates = stats["throughput"]
    assert rates["prompt_tokens_per_s"] == pytest.approx(4 * rates["requests_per_s"], rel=0.01)
    assert rates["generated_tokens_per_s"] == pytest.approx(3 * rates["requests_per_s"], rel=0.01)
    for latency in (stats["ttft_ms"], stats["tpot_ms"]):
        assert sum(count for _, count in latency["histogram"]) == 4
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    assert stats["cache_hit_rate"] == 1.0
    assert stats["transfer"]["bytes_per_s"] > 0


# --- events ----------------------------------------------------------------------------------------


async def test_events_tell_what_there_is_and_what_changes(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = saying([300])
    seen = []
    async with asyncio.timeout(20), stack.client.stream("GET", "/admin/v1/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name, has_asked = "", False
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: "):
                seen.append((name, json.loads(line.removeprefix("data: "))))
            if not has_asked and [event for event, _ in seen].count("stats") == 2:
                has_asked = True
                await stack.complete(prompt=[5, 6], max_tokens=1)
                await stack.decode[0].stop()
            states = [data["state"] for event, data in seen if event == "worker" and data["role"] == "decode"]
            ended = [data for event, data in seen if event == "request" and data["state"] == "finished"]
            if ended and states[-1] == "unreachable":
                break
    assert {event for event, _ in seen} == {"worker", "request", "config", "stats"}
    assert states[0] == "serving"
    await until(lambda: not stack.app.state.event_feed._subscribers)


# --- draining --------------------------------------------------------------------------------------


async def post(stack, path, status=200, **body):
    response = await stack.client.post(f"/admin/v1{path}", json=body or None)
    assert response.status_code == status, response.text
    return response.json()


async def ids(stack, role="decode"):
    return [worker["id"] for worker in (await get(stack, "/workers"))["workers"] if worker["role"] == role]


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
        async with asyncio.timeout(10):
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
    assert "/undrain" in refused.json()["error"]["message"]
    assert (await stack.client.get("/readyz")).status_code == 503
    (prefill,) = await ids(stack, "prefill")
    await post(stack, f"/workers/{worker}/undrain")
    await post(stack, f"/workers/{prefill}/drain")
    assert "every prefill server" in (await stack.complete()).json()["error"]["message"]


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


async def test_what_another_router_drains_is_seen(make_admin_stack):
    stack = await make_admin_stack()
    stack.prefill[0].info = dataclasses.replace(stack.prefill[0].info, is_draining=True)
    await until(lambda: stack.services.pool.not_ready_reason() is not None)
    stack.prefill[0].info = dataclasses.replace(stack.prefill[0].info, is_draining=False)
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    assert (await stack.client.post("/admin/v1/workers/nobody/drain")).status_code == 404


# --- changes ---------------------------------------------------------------------------------------


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


async def patch(stack, status=200, **values):
    response = await stack.client.patch("/admin/v1/config", json=values)
    assert response.status_code == status, response.text
    return response.json()


async def test_policies_and_limits_change_while_it_runs(make_admin_stack):
    stack = await make_admin_stack(num_prefill=2)
    before = await get(stack, "/config")
    assert (before["prefill_policy"], before["request_timeout_s"]) == ("round_robin", 20.0)
    shown = await patch(stack, prefill_policy="prefix_affinity", max_choices=2, session_header="X-Session")
    assert shown == before | {
        "prefill_policy": "prefix_affinity",
        "max_choices": 2,
        "session_header": "X-Session",
    }
    assert await get(stack, "/config") == shown
    stack.decode[0].script = saying([300])
    too_many = await stack.complete(n=3)
    assert too_many.status_code == 400
    assert "the limit is 2" in too_many.json()["error"]["message"]
    known = [worker.assignments for worker in stack.services.pool.workers()]
    await until(
        lambda: [one.prefixes.version for one in known] == [1, 1, None]
    )  # only prefill servers are asked
    for _ in range(4):
        headers = {"X-Session": "same"}
        body = {"prompt": [5, 6, 7], "max_tokens": 1}
        assert (await stack.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert sorted(len(server.requests) for server in stack.prefill) == [0, 4]
    await patch(stack, prefill_policy="round_robin", session_header="")
    assert known[0].prefixes.version is None
    for _ in range(4):
        assert (await stack.complete(prompt=[5, 6, 7], max_tokens=1)).status_code == 200
    assert sorted(len(server.requests) for server in stack.prefill) == [2, 6]
    await patch(stack, request_timeout_s=0.1)
    stack.decode[0].script = hanging
    assert (await stack.complete()).status_code == 504


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"max_choices": 0}, "max_choices must be positive, got 0"),
        ({"max_choices": "3"}, "max_choices"),
        ({"request_timeout_s": -1}, "request_timeout_s must be positive"),
        ({"prefill_policy": "fastest"}, "'round_robin'"),
        ({"session_header": "a b"}, "session_header"),
        ({"port": 1}, "port"),
        ({"max_choices": 4, "request_timeout_s": 0}, "stay as they were"),
    ],
    ids=str,
)
async def test_a_setting_that_can_not_work_changes_nothing(make_admin_stack, values, part):
    stack = await make_admin_stack()
    before = await get(stack, "/config")
    assert part in (await patch(stack, 400, **values))["error"]["message"]
    assert await get(stack, "/config") == before


async def test_changes_survive_a_restart(make_admin_stack, tmp_path):
    state_file = tmp_path / "state.db"
    first = await make_admin_stack(num_decode=3, state_file=state_file)
    kept, drained, removed = await ids(first)
    addresses = {worker["id"]: worker["address"] for worker in (await get(first, "/workers"))["workers"]}
    await post(first, f"/workers/{drained}/drain")
    await first.client.delete(f"/admin/v1/workers/{removed}")
    added = await post(first, "/workers", 201, address="127.0.0.1:9", role="prefill")
    await patch(first, max_choices=7, decode_policy="least_loaded")
    flags = tuple(addresses[one] for one in (kept, drained, removed))
    second = await make_admin_stack(num_decode=0, decode_addresses=flags, state_file=state_file, ready=False)
    workers = {worker["id"]: worker for worker in (await get(second, "/workers"))["workers"]}
    assert removed not in workers
    assert (workers[drained]["draining"], workers[kept]["draining"]) == (True, False)
    assert (workers[added["id"]]["added_by"], workers[kept]["added_by"]) == ("api", "flag")
    config = await get(second, "/config")
    assert (config["max_choices"], config["decode_policy"], config["prefill_policy"]) == (
        7,
        "least_loaded",
        "round_robin",
    )
    await post(second, f"/workers/{drained}/undrain")
    await post(second, "/workers", 201, address=addresses[removed], role="decode")
    third = await make_admin_stack(num_decode=0, decode_addresses=flags, state_file=state_file, ready=False)
    assert set(await ids(third)) == {kept, drained, removed}
    assert not any(worker["draining"] for worker in (await get(third, "/workers"))["workers"])
    await post(third, f"/workers/{kept}/drain")
    fewer = (addresses[drained],)
    fourth = await make_admin_stack(num_decode=0, decode_addresses=fewer, state_file=state_file, ready=False)
    assert kept not in await ids(fourth), "what a flag no longer names does not come back"
    assert removed in await ids(fourth), "what was added through the API does"


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be one" * 40, b"another"])
async def test_a_state_file_that_is_none_is_refused_at_the_start(tmp_path, content):
    path = tmp_path / "state.db"
    if content == b"another":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE things (name TEXT)")
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        StateFile(path).load()


async def test_a_change_that_can_not_be_saved_says_so_and_holds(make_admin_stack, tmp_path):
    state_file = tmp_path / "state.db"
    stack = await make_admin_stack(state_file=state_file)
    state_file.unlink()
    state_file.mkdir()
    failed = await patch(stack, 500, max_choices=3)
    assert str(state_file) in failed["error"]["message"]
    assert (await get(stack, "/config"))["max_choices"] == 3


async def test_a_stream_that_is_aborted_ends_with_an_error_event(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = hanging
    body = {"prompt": [5, 6, 7], "stream": True}
    async with asyncio.timeout(10), stack.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                break
        (shown,) = (await get(stack, "/requests"))["requests"]
        await post(stack, f"/requests/{shown['id']}/abort")
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "aborted"


async def test_the_schema_describes_every_route(make_admin_stack):
    stack = await make_admin_stack()
    schema = (await stack.client.get("/openapi.json")).json()
    for method, path in routes_of(stack.app):
        named = path.replace("/x", "/{worker_id}" if "workers" in path else "/{request_id}")
        route = schema["paths"][named][method.lower()]
        assert route["security"] == [{"HTTPBearer": []}], path
        assert route["responses"]["401"]["content"]["application/json"]["schema"], path
        assert "422" not in route["responses"], "what can't work is a 400"
        (success,) = [answer for code, answer in route["responses"].items() if code.startswith("2")]
        ((_, content),) = success["content"].items()
        assert content["schema"], path
        assert ("requestBody" in route) == ((method, path) in WITH_BODY), path


async def test_what_is_queued_is_shown_and_can_be_aborted_and_the_limits_change(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = hanging
    await patch(stack, max_requests_in_flight=1, max_queue=1)
    running, queued = (asyncio.create_task(stack.complete(prompt=[5, 6, 7])) for _ in range(2))
    log = stack.services.requests
    await until(lambda: (log.num_in_flight, log.num_queued) == (1, 1) and stack.decode[0].submitted)
    assert (await stack.complete()).status_code == 429
    stats = await get(stack, "/stats")
    assert (stats["in_flight"], stats["queued"]) == (1, 1)
    shown = (await get(stack, "/requests"))["requests"]
    assert [one["state"] for one in shown] == ["queued", "decode"], "the one that was refused is not shown"
    await post(stack, f"/requests/{shown[0]['id']}/abort")
    answer = await queued
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "aborted")
    assert (await get(stack, f"/requests/{shown[0]['id']}"))["timeline"][1]["duration_s"] > 0
    more = asyncio.create_task(stack.complete(prompt=[5, 6, 7]))
    await until(lambda: log.num_queued == 1)
    await patch(stack, max_requests_in_flight=2)
    await until(lambda: log.num_in_flight == 2)
    for task in (running, more):
        task.cancel()
