"""Prefix caches of models without states (full blocks are enough for a hit) and without KV (states are
enough)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.index_pool import IndexPool
from engine.schedule.one_part_caches import BlockPrefixCache, StatePrefixCache
from wire.messages.prefixes import block_keys

BLOCK = 4
TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=28)


def block_cache(num_blocks):
    return BlockPrefixCache(
        IndexPool(num_blocks, "block"), IndexPool(1, "slot"), block_size=BLOCK, fingerprint="f"
    )


def state_cache(num_slots):
    return StatePrefixCache(
        IndexPool(1, "block"), IndexPool(num_slots, "slot"), block_size=BLOCK, fingerprint="f"
    )


def keys_of(tokens):
    return block_keys(tokens, block_size=BLOCK, fingerprint="f", salt="")


def look_up(cache, tokens):
    """Looks up all tokens but the last, which has to be computed."""
    return cache.match(keys_of(tokens[:-1]), needs_state=True)


def hit(cache, tokens):
    """Tokens that a request for ``tokens`` need not compute; at least one is left."""
    return len(look_up(cache, tokens).nodes) * BLOCK


def serve_blocks(cache, tokens):
    """One request's life; returns what it found in the cache."""
    found = look_up(cache, tokens)
    nodes = found.nodes
    cache.hold(nodes)
    held = cache.blocks_of(nodes) + cache.allocate_blocks(-(-len(tokens) // BLOCK) - len(nodes))
    cache.extend(nodes, keys_of(tokens), len(tokens) // BLOCK, held)
    free = [one for i, one in enumerate(held) if i >= len(nodes) or nodes[i].block_id != one]
    cache._blocks.free(free)
    cache.release(reversed(nodes))
    return found


def serve_states(cache, tokens, lengths):
    """The same with states kept at ``lengths``, given in blocks."""
    found = look_up(cache, tokens)
    nodes = found.nodes
    cache.hold(nodes)
    if found.state is not None:
        cache.hold_state(found.state)
    cache.extend(nodes, keys_of(tokens), len(tokens) // BLOCK, [])
    for length in sorted(lengths):
        if length <= len(nodes) and cache.num_available_slots:
            slot = cache.allocate_slot()
            state = cache.put_state(nodes[length - 1], slot)
            if state is None:
                cache._slots.free([slot])
            else:
                cache.release_state(state)
    if found.state is not None:
        cache.release_state(found.state)
    cache.release(reversed(nodes))
    return found


@settings(deadline=None)
@given(lives=st.lists(TOKENS, max_size=12), asked=TOKENS)
def test_without_states_a_prefix_hits_up_to_its_last_full_block(lives, asked):
    """A pool that holds all: the longest common beginning of whole blocks, one token left to compute."""
    cache = block_cache(200)
    for tokens in lives:
        if tokens:
            serve_blocks(cache, tokens)
    if not asked:
        return
    longest = 0
    for tokens in lives:
        full = tokens[: len(tokens) // BLOCK * BLOCK]
        common = next(i for i in range(len(full), -1, -1) if full[:i] == asked[:i])
        longest = max(longest, min(common, len(asked) - 1) // BLOCK * BLOCK)
    assert hit(cache, asked) == longest


@settings(deadline=None)
@given(lives=st.lists(TOKENS.filter(bool), max_size=20))
def test_without_states_a_small_pool_is_never_overdrawn_and_its_journal_names_all_it_has(lives):
    cache = block_cache(9)
    for tokens in lives:
        serve_blocks(cache, tokens)
        nodes = cache._nodes.values()
        assert cache._blocks.num_free + len(nodes) == cache._blocks.capacity
        assert all(node.parent is None or node.parent.key in cache._nodes for node in nodes)
        assert set(cache.journal.news(None).added) == set(cache._nodes)
    cache.clear()
    assert cache._blocks.num_free == cache._blocks.capacity
    assert not cache.journal.news(None).added


def test_without_states_the_least_recently_used_leaf_goes_first():
    cache = block_cache(7)
    first, second, third = ([kind] * 8 for kind in (1, 2, 3))
    for tokens in (first, second, third, first):
        serve_blocks(cache, tokens)
    serve_blocks(cache, [4] * 4)
    assert [hit(cache, [*tokens, 0]) for tokens in (first, second, third)] == [8, 4, 8]
    serve_blocks(cache, [5] * 8)
    assert [hit(cache, [*tokens, 0]) for tokens in (first, second, third)] == [8, 0, 4]


@settings(deadline=None)
@given(
    lives=st.lists(st.tuples(TOKENS.filter(bool), st.sets(st.integers(1, 7))), max_size=20),
    num_slots=st.integers(1, 6),
)
def test_without_kv_only_what_leads_to_a_state_is_remembered(lives, num_slots):
    cache = state_cache(num_slots)
    for tokens, lengths in lives:
        serve_states(cache, tokens, lengths)
        nodes = cache._nodes.values()
        assert all(node.num_children > 0 or node.state is not None for node in nodes)
        assert len(cache._states) <= num_slots - 1
        assert (cache.num_available_blocks, cache.num_cached_blocks) == (0, 0)
        assert set(cache.journal.news(None).added) == {n.key for n in nodes if n.state is not None}
        found = look_up(cache, tokens)
        assert (found.state is None) == (not found.nodes)
    cache.clear()
    assert not cache._nodes
    assert cache._slots.num_free == cache._slots.capacity


def test_without_kv_a_state_of_a_very_long_prompt_is_forgotten_with_all_that_led_to_it():
    cache = state_cache(2)
    long, other = [0] * 40_000, [1] * 8
    serve_states(cache, long, {10_000})
    assert hit(cache, [*long, 5]) == 40_000
    serve_states(cache, other, {2})
    assert hit(cache, [*long, 5]) == 0
    assert len(cache._nodes) == 2
