"""Settings that change while the router runs."""

import pytest

from testing.conditions import TIMEOUT_S, until
from testing.router.admin_calls import get, patch
from testing.router.scripted_servers import hanging, saying


async def test_policies_and_limits_change_while_it_runs(make_admin_stack):
    stack = await make_admin_stack(num_prefill=2)
    before = await get(stack, "/config")
    assert (before["prefill_policy"], before["request_timeout_s"]) == ("round_robin", TIMEOUT_S)
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
        ({"hold_s": 1e308}, "hold_s must be at most 604800, got 1e+308: give less"),
        ({"request_timeout_s": 604801}, "request_timeout_s must be at most 604800, got 604801.0"),
        ({"max_queue": 10**40}, f"max_queue must be at most 1000000000, got {10**40}"),
        ({"max_requests_in_flight": 10**10}, "max_requests_in_flight must be at most"),
        ({"max_choices": 10**10}, "max_choices must be at most"),
        ({"max_choices": 4, "request_timeout_s": 0}, "stay as they were"),
    ],
    ids=str,
)
async def test_a_setting_that_can_not_work_changes_nothing(make_admin_stack, values, part):
    stack = await make_admin_stack()
    before = await get(stack, "/config")
    assert part in (await patch(stack, 400, **values))["error"]["message"]
    assert await get(stack, "/config") == before
