from hypothesis import given
from hypothesis import strategies as st

from wire.messages.prefixes import KEY_BYTES, block_keys

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def keys(tokens, block_size=4, fingerprint="f", salt=""):
    return block_keys(tokens, block_size=block_size, fingerprint=fingerprint, salt=salt)


@given(TOKENS, TOKENS)
def test_prompts_share_as_many_keys_as_full_blocks_at_their_start(one, other):
    shared = next((i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) == 2), None)
    num_shared = min(len(one), len(other)) if shared is None else shared
    a, b = keys(one), keys(tuple(other))
    assert a[: num_shared // 4] == b[: num_shared // 4]
    assert not set(a[num_shared // 4 :]) & set(b[num_shared // 4 :])


def test_salt_model_and_block_size_are_part_of_every_key():
    tokens = list(range(16))
    variants = (keys(tokens), keys(tokens, salt="s"), keys(tokens, fingerprint="g"), keys(tokens, 8))
    every = [key for variant in variants for key in variant]
    assert len(set(every)) == len(every) == 4 + 4 + 4 + 2
    assert {len(key) for key in every} == {KEY_BYTES}


def test_a_block_that_is_not_full_has_no_key():
    assert keys([1, 2, 3]) == []
    assert keys([]) == []
