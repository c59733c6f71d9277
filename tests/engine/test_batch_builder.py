"""A plan becomes a batch whose metadata says, row by row, what the plan said."""

import torch

from engine.batch_builder import BatchBuilder
from engine.request import Request
from engine.row_table import RowTable
from engine.rows import PlannedRow, StateBoundary
from engine.scheduler import StepPlan
from wire.sampling_params import SamplingParams

BLOCK_SIZE = 4


def build(*lives):
    """A batch of requests given as ``(num_tokens, num_before, num_new, block_ids, slot, *boundaries)``."""
    rows = RowTable(len(lives) + 2, 8)
    planned = []
    for i, (num_tokens, num_before, num_new, block_ids, slot, *boundaries) in enumerate(lives):
        request = Request(f"r{i}", list(range(100 * i, 100 * i + num_tokens)), SamplingParams(max_tokens=4))
        request.row, request.block_ids, request.slot = i + 1, block_ids, slot
        rows.fill(request)
        planned.append(PlannedRow(request, num_before, num_new, tuple(boundaries)))
    plan = StepPlan([r for r in planned if r.is_decode], [r for r in planned if not r.is_decode])
    return BatchBuilder(rows, block_size=BLOCK_SIZE, device=torch.device("cpu")).build(plan)


def test_token_n_of_a_two_token_prompt_is_one_decode_row_and_no_prefill_row():
    batch = build((2, 1, 1, [3], 5))
    assert batch.decode.num_rows == 1
    assert batch.prefill is None
    assert batch.input_ids.tolist() == [1]
    assert batch.positions.tolist() == [1]
    assert batch.slot_mapping.tolist() == [3 * BLOCK_SIZE + 1]
    assert batch.decode.seq_lens.tolist() == [2]
    assert batch.decode.read_slots.tolist() == [5]
    assert batch.decode.write_slots.tolist() == [[5]]
    assert batch.logits_indices.tolist() == [0]


def test_a_one_token_prompt_is_one_prefill_row_from_the_zero_state():
    batch = build((1, 0, 1, [3], 5))
    assert batch.decode is None
    assert batch.prefill.num_rows == 1
    assert batch.prefill.has_initial.tolist() == [False]
    assert batch.logits_indices.tolist() == [0]


def test_decode_rows_stand_before_ragged_prefill_rows():
    batch = build((6, 0, 6, [1, 2], 1), (9, 8, 1, [3, 4, 5], 2), (20, 5, 7, [6, 7, 8, 9, 10], 3))
    assert batch.input_ids.tolist() == [108, *range(6), *range(205, 212)]
    assert batch.positions.tolist() == [8, *range(6), *range(5, 12)]
    assert batch.slot_mapping.tolist() == [
        5 * 4,
        *(4, 5, 6, 7, 8, 9),
        *(7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 8 * 4, 8 * 4 + 1, 8 * 4 + 2, 8 * 4 + 3),
    ]
    assert batch.decode.block_table.tolist() == [[3, 4, 5]]
    assert batch.prefill.cu_seqlens.tolist() == [0, 6, 13]
    assert batch.prefill.seq_lens.tolist() == [6, 12]
    assert batch.prefill.has_initial.tolist() == [False, True]
    assert batch.prefill.read_slots.tolist() == batch.prefill.write_slots.tolist() == [1, 3]
    assert (batch.prefill.max_query_len, batch.prefill.max_seq_len) == (7, 12)
    assert batch.logits_indices.tolist() == [0, 6], "a chunk in the middle of a prompt samples nothing"


def test_boundaries_count_from_the_start_of_their_rows_new_tokens():
    kept = [StateBoundary(8, 11), StateBoundary(12, 12)]
    batch = build((6, 0, 6, [1, 2], 1), (9, 8, 1, [3, 4, 5], 2), (20, 5, 9, [6, 7, 8, 9, 10], 3, *kept))
    boundaries = batch.prefill.boundaries
    assert boundaries.rows.tolist() == [1, 1], "decode rows are not counted"
    assert boundaries.offsets.tolist() == [3, 7]
    assert boundaries.slots.tolist() == [11, 12]
    assert boundaries.segments.cu_seqlens.tolist() == [0, 6, 9, 13, 15]


def test_a_cleared_row_holds_null_indices_and_greedy_sampling():
    rows = RowTable(2, 4)
    request = Request("r", [1, 2], SamplingParams(max_tokens=4, top_k=3, top_p=0.5, min_p=0.1), seed=9)
    request.row, request.block_ids, request.slot = 1, [5, 6], 7
    rows.fill(request)
    rows.clear(1)
    fresh = RowTable(2, 4)
    for name, table in vars(fresh).items():
        assert (getattr(rows, name) == table).all(), name
