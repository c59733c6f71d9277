"""Which starts host memory keeps, in which pages, and what is copied. Lengths are in blocks."""

import pytest

from engine.memory.cached_start import CachedBlock, Match, Place
from engine.memory.host_tier import NO_COPIES, HostMemory, HostTier
from engine.memory.start_sizes import StartSizes
from wire.errors import ConfigError

STATE_PAGES = 2


def make(num_pages=20, state_pages=STATE_PAGES, has_kv=True, **settings):
    return HostTier(HostMemory(num_pages, 10, state_pages, has_kv), **settings)


def chain(text):
    """The device's nodes of a prompt, one for each letter. Block ids are the letters' codes."""
    nodes = []
    for index, letter in enumerate(text):
        key = text[: index + 1].encode()
        nodes.append(CachedBlock(key, nodes[-1] if nodes else None, index + 1, ord(letter)))
    return nodes


def demote(tier, text, slot=7):
    tier.demote(chain(text)[-1], slot, Place.END)


def demoted(tier):
    """What the plan copies to host memory: letters of blocks, and the number of pages of states."""
    return [("".join(map(chr, one.block_ids)), len(one.state_pages)) for one in tier.take().demoted]


def found(text, on_device=0):
    """What the device has of a prompt: KV and a state up to ``on_device`` blocks."""
    nodes = chain(text)
    return Match(nodes[:on_device], None, [], [node.key for node in nodes])


def length(tier, text, on_device=0, most=100):
    start = tier.find(found(text, on_device), most)
    return None if start is None else start.num_blocks


def test_a_start_comes_with_its_state_and_all_blocks_that_lead_to_it():
    tier = make()
    demote(tier, "abc", slot=5)
    (copy,) = tier.take().demoted
    assert copy.block_ids == tuple(map(ord, "abc"))
    assert (copy.slot, len(copy.state_pages)) == (5, STATE_PAGES)
    assert len({*copy.block_pages, *copy.state_pages}) == 3 + STATE_PAGES
    assert tier.figures.used_bytes == (3 + STATE_PAGES) * 10
    assert length(tier, "abcd") == 3
    assert length(tier, "ab") is None, "no state is there"
    assert tier.take() is NO_COPIES


def test_starts_share_blocks_and_only_what_is_missing_is_copied():
    tier = make()
    demote(tier, "abc")
    demote(tier, "abde")
    demote(tier, "ab")
    assert demoted(tier) == [("abc", 2), ("de", 2), ("", 2)]
    assert [length(tier, text) for text in ("abc", "abd", "abde", "ax")] == [3, 2, 4, None]
    assert tier._pages.num_free == 20 - 5 - 3 * STATE_PAGES


def test_the_start_used_least_recently_goes_first_and_blocks_of_others_stay():
    tier = make(num_pages=10)
    demote(tier, "abc")
    demote(tier, "abd")
    assert tier._pages.num_free == 2
    tier.take()
    tier.touch(b"abc")
    demote(tier, "abe")
    assert demoted(tier) == [("e", 2)]
    assert [length(tier, text) for text in ("abc", "abd", "abe")] == [3, None, 3]
    demote(tier, "xyz")
    assert demoted(tier) == [("xyz", 2)]
    assert [length(tier, text) for text in ("abc", "abe", "xyz")] == [None, 3, 3]


def test_a_start_inside_another_goes_without_its_blocks():
    tier = make(num_pages=9)
    demote(tier, "ab")
    demote(tier, "abcd")
    tier.take()
    demote(tier, "abcde")
    assert demoted(tier) == [("e", 2)]
    assert [length(tier, text) for text in ("ab", "abcd", "abcde")] == [None, 4, 5]


def test_room_for_a_start_is_not_made_by_giving_up_the_blocks_before_it():
    tier = make(num_pages=6)
    demote(tier, "abc")
    tier.take()
    demote(tier, "abcd")
    assert demoted(tier) == [("d", 2)]
    assert length(tier, "abcd") == 4


def test_a_start_that_is_larger_than_host_memory_drives_nothing_out():
    tier = make(num_pages=6)
    demote(tier, "ab")
    tier.take()
    demote(tier, "uvwxyz")
    assert demoted(tier) == []
    assert (length(tier, "ab"), length(tier, "uvwxyz"), tier.figures.dropped) == (2, None, 1)


def test_a_step_copies_at_least_one_start_and_no_more_than_its_bytes():
    tier = make(num_pages=100, step_bytes=80)
    demote(tier, "abcdefgh")
    demote(tier, "x")
    assert demoted(tier) == [("abcdefgh", 2)]
    for text in ("u", "vw", "x", "yz"):
        demote(tier, text)
    assert demoted(tier) == [("u", 2), ("vw", 2)]
    demote(tier, "yz")
    assert demoted(tier) == [("yz", 2)]
    assert tier.figures.dropped == 3


def test_what_a_plan_moves_is_not_given_up_by_the_same_plan():
    tier = make(num_pages=10)
    demote(tier, "abc")
    demote(tier, "xyz")
    tier.take()
    start = tier.find(found("abc"), 3)
    tier.hold(start)
    demote(tier, "uvw")
    assert length(tier, "xyz") is None, "it went, although it was used later"
    demote(tier, "rst")
    assert length(tier, "rst") is None, "what the plan demotes stays, too"
    tier.promote(start, [41, 42, 43], 6, 30)
    copies = tier.take()
    assert [one.block_ids for one in copies.promoted] == [(41, 42, 43)]
    assert copies.promoted[0].block_pages == tuple(tier._blocks[key].page for key in (b"a", b"ab", b"abc"))
    assert copies.promoted[0].state_pages == start.state_pages
    used = {page for one in copies.demoted for page in (*one.block_pages, *one.state_pages)}
    assert not used & {*copies.promoted[0].block_pages, *copies.promoted[0].state_pages}
    assert (tier.figures.promoted, tier.figures.promoted_tokens, tier.figures.dropped) == (1, 30, 1)


def test_a_start_that_was_promoted_is_demoted_again_without_a_copy():
    tier = make()
    demote(tier, "abc")
    tier.take()
    start = tier.find(found("abc"), 3)
    tier.hold(start)
    tier.promote(start, [43], 6, 10)
    (copy,) = tier.take().promoted
    assert (copy.block_ids, copy.block_pages) == ((43,), (start.page,)), "the device still has the others"
    demote(tier, "abc")
    assert tier.take() is NO_COPIES
    assert length(tier, "abc") == 3


def test_the_longest_start_counts_that_a_request_may_use_and_the_device_has_not():
    tier = make()
    demote(tier, "ab")
    demote(tier, "abcd")
    tier.take()
    assert [length(tier, "abcde", most=most) for most in (5, 4, 3, 1)] == [4, 4, 2, None]
    assert [length(tier, "abcde", on_device) for on_device in (1, 2, 3, 4)] == [4, 4, 4, None]
    assert length(tier, "abc", on_device=2) is None


def test_a_start_is_promoted_only_if_that_is_cheaper_than_computing():
    sizes = StartSizes(block_tokens=16, block_bytes=100, slot_bytes=1000, token_flops=50.0, pair_flops=0.0)
    assert sizes.is_worth_copying(0, 4, 2, flops_per_byte=2.0)  # 3200 FLOP, 1200 bytes
    assert not sizes.is_worth_copying(0, 4, 2, flops_per_byte=3.0)
    asked = []

    def pays(*lengths):
        asked.append(lengths)
        return len(asked) > 1

    tier = make(pays=pays)
    demote(tier, "abcd")
    tier.take()
    assert length(tier, "abcd", on_device=1) is None
    assert length(tier, "abcd", on_device=2) == 4
    assert asked == [(1, 4, 3), (2, 4, 2)]


def test_cleared_host_memory_has_nothing_and_copies_nothing():
    tier = make()
    demote(tier, "abc")
    tier.clear()
    assert tier.take() is NO_COPIES
    assert (length(tier, "abc"), tier.figures.used_bytes, tier.figures.demoted) == (None, 0, 0)
    assert tier._pages.num_free == 20


def test_without_pages_nothing_is_kept():
    tier = HostTier()
    demote(tier, "abc")
    assert tier.take() is NO_COPIES
    assert (length(tier, "abc"), tier.figures.dropped) == (None, 0)


def test_every_block_serves_a_model_without_states():
    tier = make(num_pages=4, state_pages=0)
    demote(tier, "abc")
    assert demoted(tier) == [("abc", 0)]
    assert length(tier, "abx") == 2
    demote(tier, "ab")
    assert demoted(tier) == []
    demote(tier, "uv")
    assert demoted(tier) == [("uv", 0)]
    assert [length(tier, text) for text in ("abc", "uv")] == [2, 2], "the end of the older one went"


def test_a_model_without_kv_has_states_alone():
    tier = make(num_pages=2, state_pages=1, has_kv=False)
    for text in ("abc", "ab", "x"):
        demote(tier, text)
        tier.take()
    assert [length(tier, text) for text in ("abc", "ab", "x")] == [2, 2, 1]
    assert tier._pages.num_free == 0


def test_host_memory_is_divided_into_pages_of_a_block_or_of_a_state():
    assert HostMemory.within(1000, block_bytes=30, slot_bytes=100) == HostMemory(33, 30, 4, True)
    assert HostMemory.within(1000, block_bytes=0, slot_bytes=100) == HostMemory(10, 100, 1, False)
    assert HostMemory.within(1000, block_bytes=30, slot_bytes=0) == HostMemory(33, 30, 0, True)
    assert HostMemory.within(0, block_bytes=30, slot_bytes=100).num_bytes == 0
    with pytest.raises(ConfigError, match=r"`host_cache_bytes` 149 .* take 150 bytes; raise it"):
        HostMemory.within(149, block_bytes=30, slot_bytes=100)
