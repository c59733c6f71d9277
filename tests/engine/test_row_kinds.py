"""The kind of a row depends only on its number of new tokens and of tokens before them."""

import pytest

from engine.request import Request, StateBoundary
from engine.row_kinds import PlannedRow, decode_slots, is_decode_row
from wire.messages.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("num_new", "num_before", "expected"),
    [
        (1, 1, True),  # the recompute of token 2 of 2
        (1, 499, True),  # token N of a handed over prompt, or a last chunk of one token
        (1, 0, False),  # the first token of a prompt has no state to start from
        (2, 0, False),
        (2, 7, False),
        (512, 512, False),
    ],
)
def test_a_row_is_a_decode_row_exactly_if_it_is_one_token_with_a_state_before_it(
    num_new, num_before, expected
):
    assert is_decode_row(num_new=num_new, num_before=num_before) is expected


def test_one_token_last_chunk_is_not_a_prefill_row_vllm_42430():
    request = Request("r", [5, 6, 7], SamplingParams(max_tokens=4))
    assert PlannedRow(request, num_before=2, num_new=1).is_decode


def test_a_row_samples_from_the_prompts_last_token_on():
    request = Request("r", [5, 6, 7], SamplingParams(max_tokens=4))
    assert not PlannedRow(request, num_before=0, num_new=2).samples
    assert not PlannedRow(request, num_before=1, num_new=1).samples
    assert PlannedRow(request, num_before=2, num_new=1).samples
    assert PlannedRow(request, num_before=0, num_new=3).samples
    assert PlannedRow(request, num_before=3, num_new=1).samples, "though token 4 is still in flight"


def test_a_row_within_the_prompt_is_followed_by_the_prompts_token_and_samples_none():
    request = Request("r", [5, 6, 7], SamplingParams(max_tokens=4))
    assert PlannedRow(request, num_before=0, num_new=2).next_token == 7
    assert PlannedRow(request, num_before=1, num_new=1).next_token == 7
    assert PlannedRow(request, num_before=2, num_new=1).next_token == -1
    prefilled = Request("p", [5, 6, 7], params=None)
    assert PlannedRow(prefilled, num_before=0, num_new=2).next_token == 7


def test_a_request_that_is_only_prefilled_never_samples_and_stops_before_its_last_token():
    request = Request("r", [5, 6, 7], params=None)
    assert request.target == 2
    assert not PlannedRow(request, num_before=0, num_new=2).samples


def owner_of(*slots):
    request = Request("r", list(range(20)), SamplingParams(max_tokens=4))
    request.memory.slots = list(slots)
    return request


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (8, [1, 2, 3, 4]),  # passed in the step before, which this one was launched behind
        (9, [50, 2, 3, 4]),
        (11, [1, 2, 50, 4]),
        (12, [1, 2, 3, 50]),
        (13, [1, 2, 3, 4]),  # passed in a later step
    ],
)
def test_a_decode_row_leaves_a_state_that_is_kept_in_the_boundarys_slot(length, expected):
    row = PlannedRow(owner_of(1, 2, 3, 4), 8, 1, (StateBoundary(length, 50),))
    assert decode_slots(row, 4) == expected


@pytest.mark.parametrize(("length", "expected"), [(8, 1), (11, 1), (12, 50)])
def test_a_chunks_last_state_goes_to_a_boundarys_slot_only_if_it_ends_there(length, expected):
    row = PlannedRow(owner_of(1, 2), 4, 8, (StateBoundary(length, 50),))
    assert row.write_slot == expected


def test_the_newest_state_is_in_the_slot_to_read_else_in_the_accepted_positions():
    request = owner_of(1, 2, 3)
    request.memory.state_index = 2
    assert request.memory.state_slot == 3
    request.memory.read_slot = 50
    assert request.memory.state_slot == 50


def test_a_chunk_behind_one_in_flight_starts_from_the_slot_that_this_one_writes():
    request = owner_of(1, 2)
    request.planned_slot = 50
    assert request.next_state_slot == 1
    request.num_in_flight = 1
    assert request.next_state_slot == 50
