"""The router follows what servers report in gRPC's standard health service."""

import asyncio

import pytest

from testing.conditions import until
from testing.fleets.router_view import uses_all_servers
from testing.router.scripted_router import why_not_ready
from testing.router.scripted_servers import hanging, saying


@pytest.fixture
async def stack(make_stack):
    """Two servers of each role."""
    stack = await make_stack(num_prefill=2, num_decode=2, has_health=True)
    for server in stack.decode:
        server.script = saying([300])
    await until(lambda: stack.services.pool.num_connected() == {"prefill": 2, "decode": 2})
    return stack


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_that_says_it_does_not_serve_gets_no_new_requests(stack, role):
    first, second = getattr(stack, role)
    await first.health.set("draining")
    await until(lambda: stack.services.pool.num_connected()[role] == 1)
    for _ in range(4):
        assert (await stack.complete(prompt=[5, 6, 7])).status_code == 200
    asked = "requests" if role == "prefill" else "submitted"
    assert (len(getattr(first, asked)), len(getattr(second, asked))) == (0, 4)
    await first.health.set("serving")
    await until(lambda: stack.services.pool.num_connected()[role] == 2)
    for _ in range(4):
        assert (await stack.complete(prompt=[5, 6, 7])).status_code == 200
    assert len(getattr(first, asked)) == 2


async def test_readyz_says_why_nobody_serves(stack):
    await stack.decode[1].stop()
    await stack.decode[0].health.set("draining")
    await until(lambda: stack.services.pool.not_ready_reason() is not None)
    answer = await stack.client.get("/readyz")
    assert answer.status_code == 503
    assert "no decode server is ready" in answer.text
    assert "it says that it does not serve" in why_not_ready(stack)


async def test_a_router_is_ready_with_one_server_of_each_role_and_tests_wait_for_all(stack):
    """A test that stops the one before the other is there would wait in vain for answers to move."""
    other = stack.decode[1]
    await other.stop()
    await until(lambda: stack.services.pool.num_connected()["decode"] == 1)
    assert (await stack.client.get("/readyz")).status_code == 200
    assert not await asyncio.to_thread(uses_all_servers, stack.url)
    await other.start()
    await until(lambda: asyncio.to_thread(uses_all_servers, stack.url))


async def test_what_a_draining_server_has_already_ends_there(stack):
    decode, other = stack.decode
    await other.stop()
    await until(lambda: stack.services.pool.num_connected()["decode"] == 1)
    decode.script = hanging
    chunks = await stack.openai.completions.create(model="tiny", prompt=[5, 6, 7], stream=True)
    await anext(aiter(chunks))
    await decode.health.set("draining")
    await until(lambda: stack.services.pool.num_connected()["decode"] == 0)
    assert not decode.cancelled
    await chunks.close()
    await until(lambda: decode.cancelled)
