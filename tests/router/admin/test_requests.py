"""Requests in the admin API: how they are shown from arrival to end, and how they are aborted."""

import asyncio
import json

from testing.conditions import TIMEOUT_S, until
from testing.router.admin_calls import get, patch, post
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import hanging, saying


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


async def test_a_stream_that_is_aborted_ends_with_an_error_event(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = hanging
    body = {"prompt": [5, 6, 7], "stream": True}
    async with (
        asyncio.timeout(TIMEOUT_S),
        stack.client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                break
        (shown,) = (await get(stack, "/requests"))["requests"]
        await post(stack, f"/requests/{shown['id']}/abort")
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "aborted"


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
