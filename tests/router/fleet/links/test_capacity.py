"""How much room servers have, for one router and for several routers that don't know of each other."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.place import Residence
from router.fleet.links.capacity import GUARANTEED_BLOCKS, Capacity, Resource


def room(rows: float = 64, others: float = 0, *, prefill=(), blocks=(), num_routers: int = 1) -> Capacity:
    return Capacity((Resource(rows, others),), blocks, prefill, num_routers)


def test_a_router_alone_fills_all_rows_and_has_some_more_prompts_computed():
    assert room(64).places == 64
    assert room(64, prefill=(Resource(4096),)).places == 80
    assert room(4, prefill=(Resource(4096),) * 3).places == 4 + 6


def test_no_prompt_is_sent_while_prefill_servers_have_enough_to_do():
    busy, idle = Resource(4096, own=4096), Resource(4096, own=4095)
    assert room(prefill=(idle,)).lets_in(100_000)
    assert not room(prefill=(busy,)).lets_in(1)
    assert room(prefill=(busy, idle)).lets_in(1)
    assert not room(prefill=(busy, idle)).lets_in(1, just_sent=1)


def test_no_prompt_is_sent_that_finds_no_blocks():
    assert room(blocks=(Resource(1000, 300, 600),)).lets_in(100)
    assert not room(blocks=(Resource(1000, 300, 600),)).lets_in(101)
    assert room(blocks=(Resource(1000, 300, 600),) * 2).lets_in(101)
    assert room(blocks=(Resource(1000, 2000, 0),)).lets_in(int(1000 * GUARANTEED_BLOCKS))


@given(st.integers(1, 200), st.integers(2, 5), st.integers(0, 2**32))
@settings(max_examples=30)
def test_routers_that_all_want_more_come_to_have_equal_parts(rows, num_routers, seed):
    """Each sees the others as they were at its last look; one request ends, another begins where there is
    room."""
    own = [0] * num_routers
    seen = [0] * num_routers

    def fill(router: int) -> None:
        limit = Capacity((Resource(rows, seen[router]),), (), (), num_routers).places
        own[router] = max(own[router], limit)

    for router in range(num_routers):
        fill(router)  # all at once, before anybody knows of the others
    for _ in range(rows * num_routers):
        for router in range(num_routers):
            seen[router] = sum(own) - own[router]
            own[router] = max(0, own[router] - 1)
            fill(router)
    rng = random.Random(seed)
    for _ in range(200):
        router = rng.randrange(num_routers)
        if rng.random() < 0.5:
            seen[router] = sum(own) - own[router]
        fill(router)
    part = rows // num_routers
    assert all(part <= count <= part + 1 for count in own)


def test_one_that_wants_little_leaves_the_rest_to_the_others():
    assert room(64, others=4, num_routers=2).places == 60
    assert room(64, others=60, num_routers=2).places == 32


def test_a_wait_is_told_from_what_requests_took():
    residence = Residence()
    assert residence.retry_after_s(num_waiting=9, num_running=10) == 1
    for _ in range(400):
        residence.left(8.0)
    assert residence.retry_after_s(num_waiting=39, num_running=10) == 32
    assert residence.retry_after_s(num_waiting=0, num_running=100) == 1
    assert residence.retry_after_s(num_waiting=10**6, num_running=1) == 600
