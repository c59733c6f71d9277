"""A router predicts exactly the hits that the server's prefix cache then has."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.index_pool import IndexPool
from engine.memory.prefix_cache import PrefixCache
from router.fleet.links.prefix_index import PrefixIndex
from router.policies.policy import Demand
from testing.router.scripted_servers import server_info
from wire.messages.prefixes import PrefixNews, TierNews, block_keys

BLOCK_SIZE = 4
PROMPTS = st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=24), st.sampled_from(["", "salt"]))


def serve(cache: PrefixCache, tokens: list[int], salt: str, states: set[int]) -> None:
    """Does what a request does until its end: it keeps states after some of its blocks."""
    keys = block_keys(tokens, block_size=BLOCK_SIZE, fingerprint="f", salt=salt)
    nodes = cache.match(keys[: (len(tokens) - 1) // BLOCK_SIZE], needs_state=True).nodes
    cache.hold(nodes)
    block_ids = [node.block_id for node in nodes]
    block_ids += cache.allocate_blocks(len(tokens) // BLOCK_SIZE - len(nodes))
    cache.extend(nodes, keys, len(keys), block_ids)
    for index, node in enumerate(nodes):
        if index in states and node.state is None:
            state = cache.put_state(node, cache.allocate_slot())
            assert state is not None
            cache.release_state(state)
    cache.release(nodes)
    owned = {node.block_id for node in nodes}
    cache._blocks.free([block_id for block_id in block_ids if block_id not in owned])


@settings(max_examples=60)
@given(st.lists(st.tuples(PROMPTS, st.sets(st.integers(0, 5)), st.booleans()), max_size=12), PROMPTS)
def test_it_knows_what_the_cache_finds_through_growth_and_eviction(lives, asked):
    blocks, slots = IndexPool(12, "block"), IndexPool(5, "slot")
    cache = PrefixCache(blocks, slots, block_size=BLOCK_SIZE, fingerprint="f")
    index = PrefixIndex()
    index.appeared(server_info("prefill", block_size=BLOCK_SIZE))
    for (tokens, salt), states, is_told in lives:
        serve(cache, tokens, salt, states)
        if is_told:
            index.update(cache.journal.news(index.version))
    index.update(cache.journal.news(index.version))
    for tokens, salt in [asked, *(prompt for prompt, _, _ in lives)]:
        keys = block_keys(tokens[:-1], block_size=BLOCK_SIZE, fingerprint="f", salt=salt)
        found = cache.match(keys, needs_state=True)
        assert index.cached_tokens(Demand(tuple(tokens), salt)) == len(found.nodes) * BLOCK_SIZE
    cache.clear()
    index.update(cache.journal.news(index.version))
    assert len(index) == 0


def test_kv_without_a_state_is_no_hit():
    cache = PrefixCache(IndexPool(20, "block"), IndexPool(5, "slot"), block_size=BLOCK_SIZE, fingerprint="f")
    tokens = [random.Random(0).randrange(100) for _ in range(17)]
    serve(cache, tokens, "", {1})
    index = PrefixIndex()
    index.appeared(server_info("prefill", block_size=BLOCK_SIZE))
    assert index.cached_tokens(Demand(tuple(tokens))) == 0
    index.update(cache.journal.news(None))
    assert index.cached_tokens(Demand(tuple(tokens))) == 8
    assert index.cached_tokens(Demand(tuple(tokens[:8]))) == 0, "the last token is computed in any case"
    assert index.cached_tokens(Demand(tuple(tokens), "salt")) == 0
    index.appeared(server_info("prefill", block_size=BLOCK_SIZE, incarnation="another"))
    assert index.cached_tokens(Demand(tuple(tokens))) == 0


def test_a_start_in_a_slower_tier_counts_less_than_one_on_the_device_and_more_than_none():
    tokens = tuple(range(41))
    keys = block_keys(tokens[:40], block_size=BLOCK_SIZE, fingerprint="f", salt="")
    index = PrefixIndex()
    index.appeared(server_info("prefill", block_size=BLOCK_SIZE))
    in_host = TierNews("host", (keys[4], keys[8]), start_cost=5.0, token_cost=0.25)
    index.update(PrefixNews(1, True, (), (), (in_host,)))
    assert index.cached_tokens(Demand(tokens)) == 36 - 5 - 9
    index.update(PrefixNews(2, False, (keys[4],)))
    assert index.cached_tokens(Demand(tokens)) == 36 - 5 - 4, "only the KV that the device lacks is read"
    index.update(PrefixNews(3, False, (keys[8],)))
    assert index.cached_tokens(Demand(tokens)) == 36
    index.update(PrefixNews(4, False, (), (keys[8],), (TierNews("files", (keys[8],), 500.0, 0.0),)))
    assert index.cached_tokens(Demand(tokens)) == 20, "reading takes longer than computing"
    assert index.cached_tokens(Demand(tokens[:37])) == 20
    index.update(PrefixNews(5, False, (), (keys[4], keys[8]), (TierNews("host", (keys[8],), 5.0, 0.0),)))
    assert index.cached_tokens(Demand(tokens)) == 31
    assert index.cached_tokens(Demand(tokens[:37])) == 0, (
        "a server computes one more token behind such a start"
    )
    index.update(PrefixNews(6, False, (), (keys[8],)))
    assert len(index) == 0


def test_what_a_server_says_that_reading_costs_never_makes_a_start_longer():
    tokens = tuple(range(9))
    keys = block_keys(tokens[:8], block_size=BLOCK_SIZE, fingerprint="f", salt="")
    for cost in (-100.0, float("nan"), float("inf"), float("-inf")):
        index = PrefixIndex()
        index.appeared(server_info("prefill", block_size=BLOCK_SIZE))
        index.update(PrefixNews(1, True, (), (), (TierNews("host", (keys[0],), cost, cost),)))
        assert 0 <= index.cached_tokens(Demand(tokens)) <= 4
