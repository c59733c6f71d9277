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
from wire.messages.prefixes import block_keys

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
