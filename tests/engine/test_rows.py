"""Rows are classified by new tokens and tokens before, and by nothing else."""

import pytest

from engine.request import Request
from engine.rows import PlannedRow, is_decode_row
from wire.sampling_params import SamplingParams


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


def test_a_row_samples_only_at_the_newest_known_token():
    request = Request("r", [5, 6, 7], SamplingParams(max_tokens=4))
    assert not PlannedRow(request, num_before=0, num_new=2).samples
    assert PlannedRow(request, num_before=2, num_new=1).samples
    request.tokens.append(8)
    assert not PlannedRow(request, num_before=2, num_new=1).samples
    assert PlannedRow(request, num_before=3, num_new=1).samples


def test_a_request_that_is_only_prefilled_never_samples_and_stops_before_its_last_token():
    request = Request("r", [5, 6, 7], params=None)
    assert request.target == 2
    assert not PlannedRow(request, num_before=0, num_new=2).samples
