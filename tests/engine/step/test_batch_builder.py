"""A plan becomes a step whose metadata agree with the plan, row by row."""

import random

import torch

from engine.request import Request
from engine.row_kinds import PlannedRow, StateBoundary
from engine.sampling.sampling_table import SamplingNeeds
from engine.schedule.step_plan import StepPlan
from engine.step.batch_builder import BatchBuilder
from engine.step.buffers import StepBuffers
from engine.step.row_progress import RowState
from engine.step.row_table import RowTable
from wire.messages.sampling_params import SamplingParams

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def build(*lives, drafts=()):
    """The step of requests ``(num_tokens, num_before, num_new, block_ids, slots, *boundaries)``.

    Request i is in row i + 1 and starts with token ``100 * i``. Each decode row has room for ``drafts``.
    """
    rows = RowTable(len(lives) + 2, 8, 1 + len(drafts))
    state = RowState(rows.num_rows, 1 + len(drafts), CPU)
    buffers = StepBuffers(rows, state, block_size=BLOCK_SIZE, device=CPU)
    planned = []
    for i, (num_tokens, num_before, num_new, block_ids, slots, *boundaries) in enumerate(lives):
        request = Request(f"r{i}", list(range(100 * i, 100 * i + num_tokens)), SamplingParams(max_tokens=4))
        request.row, request.memory.block_ids, request.memory.slots = i + 1, block_ids, slots
        request.num_computed = request.num_planned = num_before
        rows.fill(request)
        state.fill(request)
        state.tokens[request.row, 1:] = torch.tensor(drafts)
        planned.append(PlannedRow(request, num_before, num_new, tuple(boundaries)))
    plan = StepPlan([r for r in planned if r.is_decode], [r for r in planned if not r.is_decode])
    builder = BatchBuilder(rows, buffers, block_size=BLOCK_SIZE, device=CPU)
    buffers.load(plan.decode_rows, len(plan.decode_rows))
    if plan.prefill_rows:
        return builder.mixed_step(plan, SamplingNeeds(), max_seq_len=32, reads_hidden=True)
    return builder.decode_step(len(plan.decode_rows), SamplingNeeds(), max_seq_len=32, samples=True)


def test_token_n_of_a_two_token_prompt_is_one_decode_row_and_no_prefill_row():
    step = build((2, 1, 1, [3], [5]))
    batch = step.batch
    assert batch.decode.num_rows == 1
    assert batch.prefill is None
    assert batch.input_ids.tolist() == [1]
    assert batch.positions.tolist() == [1]
    assert batch.slot_mapping.tolist() == [3 * BLOCK_SIZE + 1]
    assert batch.decode.seq_lens.tolist() == [2]
    assert batch.decode.read_slots.tolist() == [5]
    assert batch.decode.write_slots.tolist() == [[5]]
    assert step.rows.tolist() == [1]
    assert step.forced.tolist() == [-1], "it samples"


def test_a_one_token_prompt_is_one_prefill_row_from_the_zero_state():
    step = build((1, 0, 1, [3], [5]))
    assert step.batch.decode is None
    assert step.batch.prefill.num_rows == 1
    assert step.batch.prefill.has_initial.tolist() == [False]
    assert step.ends.last_tokens.tolist() == step.ends.sampling.places.tolist() == [0]


def test_decode_rows_stand_before_ragged_prefill_rows():
    step = build((6, 0, 6, [1, 2], [1]), (9, 8, 1, [3, 4, 5], [2]), (20, 5, 7, [6, 7, 8, 9, 10], [3]))
    batch = step.batch
    assert batch.input_ids.tolist() == [108, *range(6), *range(205, 212)]
    assert batch.positions.tolist() == [8, *range(6), *range(5, 12)]
    assert batch.slot_mapping.tolist() == [
        5 * 4,
        *(4, 5, 6, 7, 8, 9),
        *(7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 8 * 4, 8 * 4 + 1, 8 * 4 + 2, 8 * 4 + 3),
    ]
    assert batch.decode.block_table.tolist() == [[3, 4, 5, 0, 0, 0, 0, 0]]
    assert batch.prefill.cu_seqlens.tolist() == [0, 6, 13]
    assert batch.prefill.seq_lens.tolist() == [6, 12]
    assert batch.prefill.has_initial.tolist() == [False, True]
    assert batch.prefill.read_slots.tolist() == batch.prefill.write_slots.tolist() == [1, 3]
    assert (batch.prefill.max_query_len, batch.prefill.max_seq_len) == (7, 12)


def test_a_mixed_step_says_of_each_row_what_follows_it():
    step = build((6, 0, 6, [1, 2], [1]), (9, 8, 1, [3, 4, 5], [2]), (20, 5, 7, [6, 7, 8, 9, 10], [3]))
    assert step.rows.tolist() == [2, 1, 3]
    assert step.forced.tolist() == [-1, -1, 212], "a chunk in the middle of a prompt samples nothing"
    assert step.write_slots.tolist() == [[2], [1], [3]]
    assert step.block_table[:, :3].tolist() == [[3, 4, 5], [1, 2, 0], [6, 7, 8]]
    assert step.ends.last_tokens.tolist() == [6, 13]
    assert step.ends.last_positions.tolist() == [5, 11]
    sampling = step.ends.sampling
    assert (sampling.places.tolist(), sampling.rows.tolist(), sampling.tokens.tolist()) == ([1], [1], [6])
    assert (sampling.positions.tolist(), sampling.input_ids.tolist()) == ([[5]], [[5]])
    assert step.ends.next_ids.tolist() == [1, 2, 3, 4, 5, 0, *range(206, 213)]


def test_drafts_stand_behind_the_newest_token_and_each_position_has_its_place_and_slot():
    step = build((6, 0, 6, [1, 2], [1, 11, 21]), (11, 10, 1, [3, 4, 5], [2, 12, 22]), drafts=(70, 71))
    batch = step.batch
    assert batch.num_decode_tokens == 3
    assert batch.input_ids.tolist() == [110, 70, 71, *range(6)]
    assert batch.positions.tolist() == [10, 11, 12, *range(6)]
    assert batch.slot_mapping[:3].tolist() == [22, 23, 0], "the last draft has no block: it goes nowhere"
    assert batch.decode.seq_lens.tolist() == [13]
    assert batch.decode.read_slots.tolist() == [2]
    assert batch.decode.write_slots.tolist() == [[2, 12, 22]]
    assert step.write_slots.tolist() == [[2, 12, 22], [1, 0, 0]]
    assert step.ends.last_tokens.tolist() == [8]


def test_a_decode_row_writes_the_state_to_keep_to_its_boundarys_slot():
    lives = [(11, 10, 1, [3, 4, 5], [2, 12, 22], StateBoundary(length, 9)) for length in (11, 12, 13, 14)]
    writes = [build(life, drafts=(70, 71)).batch.decode.write_slots.tolist() for life in lives]
    assert writes == [[[9, 12, 22]], [[2, 9, 22]], [[2, 12, 9]], [[2, 12, 22]]]


def test_boundaries_count_from_the_start_of_their_rows_new_tokens():
    kept = [StateBoundary(8, 11), StateBoundary(12, 12)]
    long = (20, 5, 9, [6, 7, 8, 9, 10], [3], *kept)
    boundaries = build((6, 0, 6, [1, 2], [1]), (9, 8, 1, [3, 4, 5], [2]), long).batch.prefill.boundaries
    assert boundaries.rows.tolist() == [1, 1], "decode rows are not counted"
    assert boundaries.offsets.tolist() == [3, 7]
    assert boundaries.slots.tolist() == [11, 12]
    assert boundaries.segments.cu_seqlens.tolist() == [0, 6, 9, 13, 15]


def test_a_state_to_keep_at_a_chunks_end_is_written_as_the_rows_last():
    kept = [StateBoundary(8, 11), StateBoundary(12, 12)]
    step = build((20, 5, 7, [6, 7, 8, 9, 10], [3], *kept))
    assert step.batch.prefill.write_slots.tolist() == [12]
    assert step.write_slots.tolist() == [[12]]
    assert step.batch.prefill.boundaries.slots.tolist() == [11]


def test_a_cleared_row_is_as_if_nobody_had_been_there():
    rows, state = RowTable(2, 4, 3), RowState(2, 3, CPU)
    request = Request("r", [1, 2], SamplingParams(max_tokens=4))
    request.row, request.memory.block_ids, request.memory.slots, request.num_computed = (
        1,
        [5, 6],
        [7, 8, 9],
        1,
    )
    for tables in (rows, state):
        tables.fill(request)
        tables.clear(1)
    blocks, slots = rows.take_changed()
    assert set(blocks.tolist()) == {4, 5}, "the first two of four columns in row 1"
    assert set(slots.tolist()) == {3, 4, 5}
    for tables, fresh in ((rows, RowTable(2, 4, 3)), (state, RowState(2, 3, CPU))):
        for name, table in vars(fresh).items():
            if name == "fields":  # the other attributes are its tables
                continue
            found = getattr(tables, name)
            equal = torch.equal(found, table) if isinstance(table, torch.Tensor) else found == table
            assert torch.as_tensor(equal).all(), name


def test_what_is_left_of_the_last_load_is_what_a_fresh_one_writes():
    """Rows, padding, new blocks, boundaries and forced tokens come and go between loads."""
    luck = random.Random(7)
    table, state = RowTable(6, 8, 2), RowState(6, 2, CPU)
    requests = []
    for row in range(6):
        request = Request(f"r{row}", [1, 2, 3, 4], SamplingParams(max_tokens=20))
        request.row, request.memory.block_ids, request.memory.slots = (
            row,
            [row + 1],
            [2 * row + 1, 2 * row + 2],
        )
        requests.append(request)
        table.fill(request)
    kept = StepBuffers(table, state, block_size=BLOCK_SIZE, device=CPU)
    chosen = requests[:4]
    for _ in range(60):
        if luck.random() < 0.3:
            chosen = luck.sample(requests, luck.randint(0, 6))
        for request in luck.sample(requests, luck.choice([0, 1, 6])):
            request.memory.block_ids = [*request.memory.block_ids, luck.randint(1, 99)][:8]
            table.extend(request)
        num_before = luck.choice([1, 4, 4])
        extras = luck.choice([(), (), (StateBoundary(6, 50),)])
        planned = [PlannedRow(request, num_before, 1, extras) for request in chosen]
        size = luck.randint(len(planned), 6)
        kept.load(planned, size)
        fresh = StepBuffers(table, state, block_size=BLOCK_SIZE, device=CPU)
        fresh.load(planned, size)
        for name in ("rows", "block_table", "slots", "boundary_len", "boundary_slot", "forced"):
            found, expected = getattr(kept, name).device[:size], getattr(fresh, name).device[:size]
            assert torch.equal(found, expected), name
