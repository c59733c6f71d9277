"""Progress messages of a followed prompt become parts: each block once, in its own place, no cached block."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.reads.part_plan import Destination, PartPlan
from testing.kv_transfer.early_tickets import BLOCK_SIZE, SLOT, THEIR_SLOT, early_ticket, ticket_of
from wire.errors import TransferError
from wire.messages.handoff import Progress


def plan_of(num_tokens, *, num_cached=0):
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    early = early_ticket(num_tokens)
    ours = list(range(100, 100 + num_blocks + 1))  # a request owns a block more than its ticket covers
    return early, PartPlan(early, Destination(ours, num_cached, SLOT, BLOCK_SIZE)), num_blocks


@given(num_tokens=st.integers(1, 60), data=st.data())
def test_all_parts_together_read_what_is_not_cached_once_and_in_place(num_tokens, data):
    num_full = num_tokens // BLOCK_SIZE
    num_cached = data.draw(st.integers(0, num_full))
    early, plan, num_blocks = plan_of(num_tokens, num_cached=num_cached)
    theirs = data.draw(st.permutations(range(1, num_blocks + 1)))
    num_told = data.draw(st.integers(0, num_full))
    cuts = sorted(data.draw(st.sets(st.integers(0, num_told))) | {0, num_told})
    read = []
    for start, end in pairwise(cuts):
        part = plan.part(Progress(tuple(theirs[start:end])))
        assert part is None or (part.local_blocks and not part.local_slots)
        read += [] if part is None else list(zip(part.local_blocks, part.remote_blocks, strict=True))
    last = plan.last_part(ticket_of(early, theirs))
    read += list(zip(last.local_blocks, last.remote_blocks, strict=True))
    assert read == [(100 + i, theirs[i]) for i in range(num_cached, num_blocks)]
    assert (list(last.local_slots), list(last.remote_slots)) == ([SLOT], [THEIR_SLOT])


def test_more_full_blocks_than_the_prompt_has_are_refused():
    _, plan, _ = plan_of(9)
    plan.part(Progress((1, 2)))
    with pytest.raises(TransferError, match="prompt of 9 tokens has 2"):
        plan.part(Progress((3,)))


@pytest.mark.parametrize(
    "change",
    [{"lease_id": 6}, {"epoch": 3}, {"incarnation": "bb"}, {"num_tokens": 10}],
    ids=str,
)
def test_a_ticket_of_another_lease_is_refused(change):
    early, plan, _ = plan_of(9)
    with pytest.raises(TransferError, match="belongs to another lease"):
        plan.last_part(ticket_of(early, (1, 2, 3), **change))


@pytest.mark.parametrize("block_ids", [(1, 2), (1, 2, 3, 4)])
def test_a_ticket_with_too_few_or_too_many_blocks_is_refused(block_ids):
    early, plan, _ = plan_of(9)
    with pytest.raises(TransferError, match="expected 3"):
        plan.last_part(ticket_of(early, block_ids))


def test_a_ticket_that_contradicts_earlier_news_is_refused():
    early, plan, _ = plan_of(9)
    plan.part(Progress((1, 2)))
    with pytest.raises(TransferError, match="other blocks than were reported"):
        plan.last_part(ticket_of(early, (1, 3, 4)))
