"""What other servers may keep in this server's host memory, and which starts a leaving server names first."""

import pytest

from engine.files.lending import BORROWER_SHARE, LENT_SHARE, MAX_LOANS, MAX_LOANS_EACH, Lending, Loan
from engine.memory.host_tier import HostMemory, HostTier
from engine.memory.index_pool import IndexPool
from engine.memory.prefix_cache import PrefixCache
from telemetry.engine_metrics import NeighbourCacheFigures

STATE_PAGES = 2


class World:
    """A prefix cache with host memory, and what is lent of both."""

    def __init__(self, num_pages=80, num_blocks=400, num_slots=200):
        self.tier = HostTier(HostMemory(num_pages, 10, STATE_PAGES))
        blocks, slots = IndexPool(num_blocks, "block"), IndexPool(num_slots, "slot")
        self.cache = PrefixCache(blocks, slots, block_size=1, fingerprint="fp", tier=self.tier)
        self.figures = NeighbourCacheFigures()
        self.lending = Lending(self.cache, self.figures)

    def keep(self, text):
        """Caches a start on the device; returns its keys."""
        keys, nodes = [], []
        self.cache.lengthen_keys(keys, [ord(letter) for letter in text], len(text), "")
        held = self.cache.match(keys, needs_state=False).nodes
        self.cache.hold(held)
        nodes += held
        new = self.cache.allocate_blocks(len(keys) - len(nodes))
        self.cache.extend(nodes, keys, len(keys), [0] * len(held) + new)
        state = self.cache.put_state(nodes[-1], self.cache.allocate_slot())
        self.cache.release_state(state)
        self.cache.release(reversed(nodes))
        return keys

    def lend(self, keys, num_blocks=None, borrower="a"):
        loan = self.lending.lend(borrower, keys[-1], len(keys) if num_blocks is None else num_blocks)
        self.copies = self.tier.take()
        return loan


def test_a_start_of_the_device_is_copied_and_stays_until_its_loan_ends():
    world = World(num_pages=20)
    keys = world.keep("abc")
    loan = world.lend(keys, num_blocks=2)
    assert len(loan.block_pages) == 2
    (copy,) = world.copies.demoted
    assert copy.block_pages[1:] == loan.block_pages
    assert copy.state_pages == loan.start.state_pages
    assert (world.figures.lent, world.figures.lent_bytes, world.figures.lent_now_bytes) == (1, 40, 50)
    for text in ("defg", "hijk", "lmno", "pqrs"):
        world.tier.demote(world.cache.start(world.keep(text)[-1]), 1)
        world.tier.take()
    assert world.tier.usable(keys[-1]) is loan.start
    world.lending.end(loan)
    assert world.figures.lent_now_bytes == 0
    for text in ("tuvw", "xyzt", "uvwx"):
        world.tier.demote(world.cache.start(world.keep(text)[-1]), 1)
        world.tier.take()
    assert world.tier.usable(keys[-1]) is None


def test_a_start_that_is_lent_twice_stays_until_both_loans_end():
    world = World()
    keys = world.keep("abc")
    first, second = world.lend(keys), world.lend(keys, borrower="b")
    assert first.start is second.start
    assert not world.copies.demoted, "it was there"
    world.lending.end(first)
    assert first.start.is_pinned
    world.lending.end(second)
    assert not first.start.is_pinned


def test_what_is_not_there_is_not_lent():
    world = World()
    keys = world.keep("abc")
    assert world.lend([b"?" * 16]) == "gone"
    assert world.lend(keys[:2]) == "gone", "there is no state"
    assert world.lend(keys, num_blocks=4) == "gone"


def test_one_borrower_can_keep_a_part_of_host_memory_and_all_together_a_larger_one():
    world = World(num_pages=80)
    kept = {"a": 0, "b": 0, "c": 0}
    for borrower in kept:
        for number in range(MAX_LOANS_EACH):
            loan = world.lend(world.keep(f"{borrower}{number}x"), borrower=borrower)
            if not isinstance(loan, Loan):
                assert loan == "limit"
                break
            kept[borrower] += loan.num_kept
    assert kept["a"] == kept["b"] == BORROWER_SHARE * 80
    assert kept["c"] == 0, f"{LENT_SHARE} is lent"


def test_the_number_of_loans_is_bounded():
    world = World(num_pages=8000)
    keys = world.keep("a")
    loans = [world.lend(keys, borrower=f"borrower {number // 8}") for number in range(MAX_LOANS + 1)]
    assert [isinstance(loan, Loan) for loan in loans] == [True] * MAX_LOANS + [False]
    for loan in loans[:-1]:
        world.lending.end(loan)
    again = [world.lend(keys) for _ in range(MAX_LOANS_EACH + 1)]
    assert [isinstance(loan, Loan) for loan in again] == [True] * MAX_LOANS_EACH + [False]


@pytest.mark.parametrize("num_pages", [0, 4])
def test_without_room_in_host_memory_nothing_is_lent(num_pages):
    world = World(num_pages=num_pages)
    assert world.lend(world.keep("abcdef")) == "limit"


def test_a_leaving_server_names_the_starts_of_its_device_first_newest_first():
    world = World()
    old, new, third = world.keep("abc"), world.keep("def"), world.keep("ghi")
    state = world.cache.state(old[-1])
    world.cache.hold_state(state)
    world.cache.release_state(state)
    world.lend(new)
    world.cache._evict(world.cache.state(new[-1]))
    assert world.lending.most_valuable() == [tuple(old), tuple(third), tuple(new)]
