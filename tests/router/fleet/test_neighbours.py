"""Routers tell a prefill server which other one has more of a prompt, and a leaving one who stays."""

import pytest

from router.policies.policy import Candidate
from router.policies.session_affinity import home_of
from testing.conditions import until
from testing.router.scripted_servers import saying
from wire.messages.neighbours import Neighbour
from wire.messages.prefixes import PrefixNews, TierNews, block_keys

PROMPT = list(range(5, 105))
KEYS = block_keys(PROMPT, block_size=16, fingerprint="f", salt="")


def news(device=(), host=()):
    """What a server with host memory says that it has cached."""
    return PrefixNews(9, True, tuple(device), (), (TierNews("host", tuple(host), 8.0, 0.1),))


async def shared(make_stack, *told, **settings):
    """A stack whose prefill servers say this of their caches, once the router knows it."""
    settings = {"prefill_policy": "prefix_affinity", "session_header": "x-chat", **settings}
    stack = await make_stack(num_prefill=len(told), **settings)
    stack.decode[0].script = saying([50])
    for server, prefixes in zip(stack.prefill, told, strict=True):
        server.prefixes = prefixes
    known = {address: one.prefixes for _, address, one in stack.services.pool.assignments()}
    if settings["prefill_policy"] == "prefix_affinity":
        await until(lambda: all(known[one.address].version == 9 for one in stack.prefill))
    return stack


async def named(stack, server, prompt=PROMPT):
    """Sends a request to this prefill server; returns the neighbour that the router named."""
    candidates = [Candidate(one.address) for one in stack.prefill]
    chat = next(str(i) for i in range(1000) if home_of(str(i), candidates).address == server.address)
    response = await stack.client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 1},
        headers={"x-chat": chat},
    )
    assert response.status_code == 200, response.text
    return server.requests[-1].neighbour


async def test_the_server_with_the_longest_start_is_named(make_stack):
    stack = await shared(make_stack, news(), news(host=[KEYS[2]]), news(device=[KEYS[4]]))
    first, second, third = stack.prefill
    assert await named(stack, first) == Neighbour(third.address, 80)
    assert await named(stack, second) == Neighbour(third.address, 80)
    assert await named(stack, third) is None
    assert await named(stack, first, prompt=list(range(200, 260))) is None


async def test_a_start_that_leaves_nothing_to_compute_is_not_named(make_stack):
    stack = await shared(make_stack, news(), news(device=[KEYS[1], KEYS[4]]))
    first, second = stack.prefill
    assert await named(stack, first, prompt=PROMPT[:81]) == Neighbour(second.address, 32)
    assert await named(stack, first, prompt=PROMPT[:82]) == Neighbour(second.address, 80)


@pytest.mark.parametrize("way", ["the lender", "the reader", "the policy"])
async def test_nobody_is_named_where_starts_are_not_shared(make_stack, way):
    has_none = PrefixNews(9, True, (KEYS[4],))
    told = {"the lender": (news(), has_none), "the reader": (PrefixNews(9, True), news(device=[KEYS[4]]))}
    policy = "round_robin" if way == "the policy" else "prefix_affinity"
    stack = await shared(make_stack, *told.get(way, (news(), news(device=[KEYS[4]]))), prefill_policy=policy)
    assert await named(stack, stack.prefill[0]) is None


async def test_a_leaving_server_is_told_who_stays(make_stack):
    stack = await shared(make_stack, news(device=[KEYS[4]]), news(), PrefixNews(9, True), news())
    leaving, heir, has_no_host_memory, drained = stack.prefill
    workers = {worker.address: worker for worker in stack.services.pool.workers()}
    pool = stack.services.pool
    workers[drained.address].drain.wish(True, heirs=pool.heirs(workers[drained.address]))
    assert await workers[drained.address].drain.tell()
    worker = workers[leaving.address]
    worker.drain.wish(True, heirs=pool.heirs(worker))
    assert await worker.drain.tell()
    assert leaving.drains[-1].heirs == (heir.address,)
    assert set(drained.drains[-1].heirs) == {leaving.address, heir.address}
    assert await named(stack, heir) == Neighbour(leaving.address, 80), "it is still there"
    assert pool.heirs(workers[stack.decode[0].address]) == []
    assert has_no_host_memory.address not in drained.drains[-1].heirs
