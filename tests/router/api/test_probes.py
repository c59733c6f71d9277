"""Requests that other systems send as probes: /health, /ping and /version, and HEAD wherever GET is
allowed."""

import asyncio

import httpx
import pytest

from router.access.api_keys import ApiKey, digest_of
from router.access.key_file import key_line
from telemetry.loop_lag import STARVED_S
from testing.conditions import TIMEOUT_S, until
from testing.repository import project_version
from testing.router.scripted_router import raw

TOKEN = "t" * 40
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
KEY = {"Authorization": "Bearer alice's key"}
PROBES = ("/health", "/ping", "/version", "/healthz", "/readyz", "/metrics")


@pytest.fixture
def admin_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


async def test_health_and_ping_are_200_when_a_request_can_be_served(make_stack):
    stack = await make_stack(ready=False)
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    for path in ("/health", "/ping"):
        assert (await stack.client.get(path)).status_code == 200
    assert (await stack.client.post("/ping")).status_code == 200
    await stack.decode[0].stop()
    await until(lambda: stack.services.pool.not_ready_reason() is not None)
    for path in ("/health", "/ping", "/readyz"):
        answer = await stack.client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_server_available")
        assert "Retry-After" in answer.headers
    stack.services.drain.num_running += 1  # else the router would end
    stack.services.drain.begin()
    for path in ("/health", "/ping"):
        assert "about to stop" in (await stack.client.get(path)).text
    assert (await stack.client.get("/version")).status_code == 200


async def test_version_is_the_projects(make_stack):
    stack = await make_stack(ready=False)
    assert (await stack.client.get("/version")).json() == {"version": project_version()}


async def test_probes_need_no_key_and_are_described(make_stack, tmp_path):
    (tmp_path / "keys").write_text(key_line(ApiKey("alice", digest_of("alice's key"))))
    stack = await make_stack(api_keys_file=tmp_path / "keys")
    for path in PROBES:
        assert (await stack.client.get(path)).status_code == 200
        assert (await stack.client.head(path)).status_code == 200
    assert (await stack.client.head("/v1/models")).status_code == 401
    described = (await stack.client.get("/openapi.json", headers=KEY)).json()["paths"]
    assert described.keys() >= set(PROBES)


async def test_head_says_what_get_would_without_the_body(make_stack, admin_token_file):
    stack = await make_stack(admin_token_file=admin_token_file)
    same = ("content-type", "content-length", "etag", "cache-control", "www-authenticate", "location")
    for path in (*PROBES, "/v1/models", "/v1/models/tiny", "/v1/models/none", "/v1/nothing", "/openapi.json",
                 "/admin/ui", "/admin/ui/main.js", "/admin/ui/", "/admin/v1/workers", "/admin/v1/nothing",
                 "/v1/completions"):  # fmt: skip
        for headers in ({}, ADMIN):
            got = await stack.client.get(path, headers=headers)
            head = await stack.client.head(path, headers=headers)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            if path != "/metrics":  # figures change
                assert [head.headers.get(n) for n in same] == [got.headers.get(n) for n in same], path


async def test_head_of_events_ends(make_stack, admin_token_file):
    stack = await make_stack(admin_token_file=admin_token_file)
    head = await stack.client.head("/admin/v1/events", headers=ADMIN)
    assert head.headers["content-type"].startswith("text/event-stream")
    feed = stack.app.state.event_feed
    await until(lambda: not feed._subscribers)


async def test_nothing_follows_the_head_on_the_wire(make_stack):
    stack = await make_stack()
    asked = b"HEAD /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    answer = await raw(stack.url, asked + b"\r\n" + asked + b"Connection: close\r\n\r\n")
    heads = answer.split(b"\r\n\r\n")
    assert [head[:12] for head in heads] == [b"HTTP/1.1 200", b"HTTP/1.1 200", b""]


async def test_a_refused_method_names_head_beside_get(make_stack):
    stack = await make_stack(ready=False)
    refused = await stack.client.put("/health")
    assert refused.status_code == 405
    assert set(refused.headers["Allow"].split(", ")) == {"GET", "HEAD"}
    async with httpx.AsyncClient(base_url=stack.url, timeout=TIMEOUT_S) as client:
        assert (await client.head("/v1/completions")).headers["Allow"] == "POST"


async def test_healthz_says_how_late_the_event_loop_is_and_is_503_while_it_starves(make_stack):
    stack = await make_stack(ready=False)
    answer = await stack.client.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    lag = stack.services.lag
    now_s = asyncio.get_running_loop().time()
    lag.saw(5.0, now_s)
    answer = await stack.client.get("/healthz")
    assert answer.status_code == 200
    assert answer.json()["event_loop_lag_s"] >= 5.0
    lag.close()  # no look of its own comes in between
    lag.saw(0.0, now_s)
    lag.saw(5.0, now_s - STARVED_S)
    lag.saw(5.0, now_s)
    answer = await stack.client.get("/healthz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_server_available")
    lag.saw(0.0, now_s)
    assert (await stack.client.get("/healthz")).status_code == 200
