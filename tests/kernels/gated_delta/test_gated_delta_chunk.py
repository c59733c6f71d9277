import itertools
import random

import pytest
import torch

from kernels.formats.stochastic_round import NEAREST, StateRounding, round_bfloat16_reference
from kernels.gated_delta import gated_delta_chunk as module
from kernels.gated_delta import gated_delta_update as update_module
from kernels.gated_delta.gated_delta_chunk import gated_delta_chunk, gated_delta_chunk_reference
from kernels.gated_delta.gated_delta_update import gated_delta_update
from kernels.ssm.boundaries import segments_of
from testing.kernels.delta_operands import HEADS, double, operands, state_shape, transformers_operands
from testing.kernels.interpreted import skip_bfloat16_in_the_interpreter
from testing.kernels.ragged_rows import NUM_SLOTS, RaggedRows, Row
from testing.kernels.rows_to_scan import BOUNDARY_ROWS, ROWS, further, narrow_rows

TOLERANCE = {
    torch.float32: {"rtol": 5e-5, "atol": 5e-5},
    # Triton's GEMMs round their operands to the inputs' dtype, as those of fla do.
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1},
    torch.float16: {"rtol": 2e-3, "atol": 1e-2},
}


def scan(target, *args, boundaries=None, num_before=None, rounding=NEAREST):
    max_seq_len = int(args[8].diff().max())
    num_before = torch.zeros_like(args[10]) if num_before is None else num_before
    if target.name == "triton":
        segments = segments_of(boundaries, args[8:], num_before, max_seq_len)
        return module._launch(*args[:8], segments, rounding)
    options = {"boundaries": boundaries, "num_before": num_before, "rounding": rounding}
    return gated_delta_chunk(*args, max_seq_len=max_seq_len, **options)


def close(found, expected, *dtypes):
    tolerance = TOLERANCE[max(dtypes, key=lambda d: TOLERANCE[d]["rtol"])]
    torch.testing.assert_close(found.double(), expected.double(), equal_nan=True, **tolerance)


KINDS = [  # heads, dtype, state's dtype
    *((heads, torch.float32, torch.float32) for heads in HEADS),
    (HEADS[0], torch.float32, torch.bfloat16),
    (HEADS[0], torch.bfloat16, torch.float32),
    (HEADS[3], torch.bfloat16, torch.bfloat16),
    (HEADS[4], torch.float16, torch.float32),
]


@pytest.mark.parametrize(
    ("rows", "heads", "dtype", "state_dtype"),
    [
        # Each batch with one shape and each shape with one batch; the last batch has rows of every sort.
        *((rows, *KINDS[1]) for rows in ROWS),
        *((ROWS[3], *kind) for kind in KINDS if kind is not KINDS[1]),
    ],
)
def test_scan_equals_the_recurrence_and_writes_only_its_slots(
    target, rows, heads, dtype, state_dtype, poisoned_pool
):
    skip_bfloat16_in_the_interpreter(target, dtype)
    lengths, read, write, initial = (list(column) for column in zip(*rows, strict=True))
    tensors = operands((sum(lengths),), heads, dtype, target.device)
    pool = poisoned_pool(6, state_shape(heads), state_dtype, target.device)
    pool.fill([slot for slot, start in zip(read, initial, strict=True) if start])
    before, expected_state = pool.bytes.clone(), pool.view.double()
    slots = target.int32(read), target.int32(write)
    index = (target.int32([0, *itertools.accumulate(lengths)]), *slots, target.flags(initial))

    o = scan(target, *tensors, pool.view, *index)

    expected = gated_delta_chunk_reference(*double(tensors), expected_state, *index)
    assert o.dtype == dtype
    close(o, expected, dtype)
    close(pool.view, expected_state, dtype, state_dtype)
    pool.assert_same_outside(before, [s for s, n in zip(write, lengths, strict=True) if s and n])


@pytest.mark.parametrize("rows", BOUNDARY_ROWS)
@pytest.mark.parametrize(
    ("heads", "dtype", "state_dtype"),
    [
        (HEADS[1], torch.float32, torch.float32),
        (HEADS[4], torch.float32, torch.bfloat16),
        (HEADS[1], torch.bfloat16, torch.bfloat16),
    ],
)
def test_scan_stores_the_states_at_boundaries_too(target, rows, heads, dtype, state_dtype, poisoned_pool):
    skip_bfloat16_in_the_interpreter(target, dtype)
    batch = RaggedRows(rows, target.device)
    tensors = operands((batch.num_tokens,), heads, dtype, target.device)
    pool = poisoned_pool(NUM_SLOTS, state_shape(heads), state_dtype, target.device)
    pool.fill(batch.filled_slots)
    before, expected_state, plain_state = pool.bytes.clone(), pool.view.double(), pool.view.clone()

    o = scan(target, *tensors, pool.view, *batch.index, boundaries=batch.boundaries)

    index, boundaries = batch.index, batch.boundaries
    expected = gated_delta_chunk_reference(*double(tensors), expected_state, *index, boundaries=boundaries)
    close(o, expected, dtype, state_dtype)
    close(pool.view, expected_state, dtype, state_dtype)
    pool.assert_same_outside(before, batch.written_slots)
    plain = scan(target, *tensors, plain_state, *batch.index)
    close(o, plain, dtype, state_dtype)
    last = [row.write_slot for row in rows]
    close(pool.view[last], plain_state[last], dtype, state_dtype)


@pytest.mark.parametrize(("rows", "rounding"), narrow_rows())
def test_a_bfloat16_state_is_rounded_on_the_grid_and_the_scan_goes_on_from_that(
    target, rows, rounding, poisoned_pool
):
    heads = HEADS[1]
    batch = RaggedRows(rows, target.device)
    tensors = operands((batch.num_tokens,), heads, device=target.device)
    pool = poisoned_pool(NUM_SLOTS, state_shape(heads), torch.bfloat16, target.device)
    pool.fill(batch.filled_slots)
    before, start = pool.bytes.clone(), pool.view.float()
    options = {"num_before": batch.num_before, "rounding": rounding}
    o = scan(target, *tensors, pool.view, *batch.index, boundaries=batch.boundaries, **options)
    pool.assert_same_outside(before, batch.written_slots)
    wide = torch.zeros(2, *state_shape(heads), device=target.device)
    for row, first in zip(rows, batch.starts, strict=False):
        wide[1] = start[row.read_slot] if row.has_initial else 0
        ends = sorted({*range(64 - row.num_before % 64, row.length, 64), *row.stores, row.length})
        for begin, end in itertools.pairwise([0, *ends]):
            piece = RaggedRows([Row(end - begin, 1, 1, True)], target.device)
            tokens = [t[first + begin : first + end] if t.ndim > 1 else t for t in tensors]
            expected = scan(target, *tokens, wide, *piece.index)
            torch.testing.assert_close(o[first + begin : first + end], expected, rtol=1e-2, atol=2e-2)
            position = torch.tensor(row.num_before + end, device=target.device)
            rounded = round_bfloat16_reference(wide[1], position, rounding)
            wide[1] = rounded.float()
            slot = row.write_slot if end == row.length else row.stores.get(end)
            if slot is not None:
                assert (pool.view[slot] == rounded).float().mean() > 0.98
                torch.testing.assert_close(pool.view[slot], rounded, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("rounding", [NEAREST, StateRounding.stochastic(2)], ids=["nearest", "by_chance"])
def test_a_row_that_is_cut_on_the_grid_leaves_the_bits_of_the_uncut_row(target, rounding, poisoned_pool):
    tensors = operands((200,), HEADS[1], device=target.device)
    pool = poisoned_pool(3, state_shape(HEADS[1]), torch.bfloat16, target.device)
    whole = RaggedRows([Row(200, 0, 1, False)], target.device)
    o = scan(target, *tensors, pool.view, *whole.index, num_before=whole.num_before, rounding=rounding)
    for begin, end in ((0, 64), (64, 192), (192, 200)):
        piece = RaggedRows([Row(end - begin, 2, 2, begin > 0, num_before=begin)], target.device)
        tokens = [t[begin:end] if t.ndim > 1 else t for t in tensors]
        found = scan(target, *tokens, pool.view, *piece.index, num_before=piece.num_before, rounding=rounding)
        assert torch.equal(found, o[begin:end])
    assert torch.equal(pool.view[1], pool.view[2])


@pytest.mark.parametrize("boundary", [1, 16, 17, *further(15, 31, 39)])
def test_a_row_resumed_from_a_boundary_equals_the_row_in_one_go(target, boundary, poisoned_pool):
    tensors = operands((40,), HEADS[1], device=target.device)
    pool = poisoned_pool(5, state_shape(HEADS[1]), device=target.device)
    pool.fill([1])
    batch = RaggedRows([Row(40, 1, 2, True, {boundary: 3})], target.device)
    whole = scan(target, *tensors, pool.view, *batch.index, boundaries=batch.boundaries)
    later = [t[boundary:] if t.ndim > 1 else t for t in tensors]
    rest = RaggedRows([Row(40 - boundary, 3, 4, True)], target.device)
    o = scan(target, *later, pool.view, *rest.index)
    close(o, whole[boundary:], torch.float32)
    close(pool.view[4], pool.view[2], torch.float32)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 127, 128, 131, 255])
def test_on_cpu_a_prompt_has_the_same_bits_however_it_is_cut(cut, poisoned_pool):
    heads = (1, 20, 2, 40)
    tensors = operands((260,), heads)
    pool = poisoned_pool(4, state_shape(heads))
    slots = torch.tensor([1, 2, 3]).int()

    def run(begin, end, read, write):
        piece = [t[begin:end] if t.ndim > 1 else t for t in tensors]
        index = (torch.tensor([0, end - begin]).int(), slots[read], slots[write], torch.tensor([begin > 0]))
        return gated_delta_chunk(*piece, pool.view, *index, max_seq_len=end - begin)

    whole = run(0, 260, slice(0, 1), slice(0, 1))
    pieces = [
        run(0, cut, slice(1, 2), slice(1, 2)),
        run(cut, 260, slice(1, 2), slice(2, 3)),
    ]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(pool.view[3], pool.view[1])


@pytest.mark.parametrize("chunk", [16, 64, *further(32, 128)])
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_the_chunk_size_does_not_change_the_result(chunk, difference, poisoned_pool, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tiles = {
        "CHUNK": chunk,
        "num_warps": 4,
    }  # with 8 and a CHUNK of 64, Triton 3.6's wgmma reads out of bounds
    monkeypatch.setattr(module, "choose", lambda request, _: {**request.default, **tiles})
    heads, length = (1, 32, 2, 16), chunk + difference
    tensors = operands((length,), heads, device=device)
    pool = poisoned_pool(2, state_shape(heads), device=device)
    pool.fill([1])
    expected_state = pool.view.double()
    index = RaggedRows([Row(length, 1, 1, True)], device).index
    o = module._launch(*tensors, pool.view, segments_of(None, index, None, length))
    close(o, gated_delta_chunk_reference(*double(tensors), expected_state, *index), torch.float32)
    close(pool.view[1], expected_state[1], torch.float32)


def test_a_row_among_others_has_the_same_bits_as_alone(target, poisoned_pool):
    tensors = operands((50,), HEADS[1], device=target.device)
    pool, alone = (poisoned_pool(4, state_shape(HEADS[1]), device=target.device) for _ in range(2))
    for one in (pool, alone):
        one.fill([1, 2, 3])
    batch = RaggedRows([Row(9, 1, 1, True), Row(37, 2, 2, True), Row(4, 3, 3, False)], target.device)
    o = scan(target, *tensors, pool.view, *batch.index)
    middle = [t[9:46] if t.ndim > 1 else t for t in tensors]
    single = RaggedRows([Row(37, 2, 2, True)], target.device)
    o_alone = scan(target, *middle, alone.view, *single.index)
    assert torch.equal(o_alone, o[9:46])
    assert torch.equal(alone.view[2], pool.view[2])


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_a_sequence_in_pieces_equals_the_sequence_in_one_go(target, seed, poisoned_pool):
    choice, length = random.Random(seed), 70
    tensors = operands((length,), HEADS[1], device=target.device)
    pool = poisoned_pool(5, state_shape(HEADS[1]), device=target.device)
    update = update_module._launch if target.name == "triton" else gated_delta_update

    def piece(begin, end):
        return [t[begin:end] if t.ndim > 1 else t for t in tensors]

    def decode(begin, end, slot, targets):
        rows = [t[None] if t.ndim > 1 else t for t in piece(begin, end)]
        return update(*rows, pool.view, target.int32([slot]), target.int32([targets]))[0]

    whole = scan(target, *tensors, pool.view, *RaggedRows([Row(length, 1, 1, False)], target.device).index)
    outputs, done, slot = [], 0, 2
    while done < length:
        size = min(choice.choice([1, 1, 2, 3, 16, 29]), length - done)
        if size <= 3 and done > 0:  # decode rows, hopping between two slots
            targets = [5 - slot if i == size - 1 else 0 for i in range(size)]
            outputs.append(decode(done, done + size, slot, targets))
        else:
            index = RaggedRows([Row(size, slot, 5 - slot, done > 0)], target.device).index
            outputs.append(scan(target, *piece(done, done + size), pool.view, *index))
        slot = 5 - slot
        done += size
    close(torch.cat(outputs), whole, torch.float32)
    close(pool.view[slot], pool.view[1], torch.float32)


def test_strong_decay_neither_overflows_nor_loses_the_recent_past(target, poisoned_pool):
    q, k, v, a, b, A, dt_bias = operands((40,), HEADS[1], device=target.device)
    tensors = (q, k, v, a + 20, b, A - 16, dt_bias)  # exp(-g) of a single step overflows
    pool = poisoned_pool(2, state_shape(HEADS[1]), device=target.device)
    expected_state = pool.view.double()
    index = RaggedRows([Row(40, 1, 1, False)], target.device).index
    o = scan(target, *tensors, pool.view, *index)
    close(o, gated_delta_chunk_reference(*double(tensors), expected_state, *index), torch.float32)
    close(pool.view[1], expected_state[1], torch.float32)


def test_equal_keys_written_in_full_and_kept_are_solved_for_without_cancellation(target, poisoned_pool):
    """Each token overwrites the one before: the terms of (1 + L)^-1 as a power series reach 10^17."""
    heads, length = (1, 32, 2, 16), 130
    q, k, v, a, b, A, dt_bias = operands((length,), heads, device=target.device)
    k = k[:1].expand(length, -1, -1)
    tensors = (q, k, v, a - 60, torch.full_like(b, 40.0), A, dt_bias)
    pool = poisoned_pool(2, state_shape(heads), device=target.device)
    pool.fill([1])
    expected_state = pool.view.double()
    index = RaggedRows([Row(length, 1, 1, True)], target.device).index
    o = scan(target, *tensors, pool.view, *index)
    close(o, gated_delta_chunk_reference(*double(tensors), expected_state, *index), torch.float32)
    close(pool.view[1], expected_state[1], torch.float32)


@pytest.mark.parametrize("source", ["state", "k", "v", "a", "b"])
def test_nan_reaches_every_later_output_and_the_state(target, source, poisoned_pool):
    tensors = operands((20,), HEADS[1], device=target.device)
    pool = poisoned_pool(2, state_shape(HEADS[1]), device=target.device)
    first = 0
    if source != "state":
        pool.fill([1])
        first = 7
        tensors["qkvab".index(source)][first] = float("nan")
    o = scan(target, *tensors, pool.view, *RaggedRows([Row(20, 1, 1, True)], target.device).index)
    assert o[first:].isnan().all()
    assert pool.view[1].isnan().all()


def test_on_cpu_nan_stays_in_its_head_and_row(poisoned_pool):
    heads = (2, 19, 4, 40)
    tensors = operands((30,), heads)
    tensors[2][4, 1] = float("nan")  # v of one token, one head
    pool = poisoned_pool(3, state_shape(heads))
    pool.fill([1, 2])
    index = RaggedRows([Row(20, 1, 1, True), Row(10, 2, 2, True)]).index
    o = gated_delta_chunk(*tensors, pool.view, *index, max_seq_len=20)
    assert o[4:20, 1].isnan().all()
    o[4:20, 1] = 0
    assert o.isfinite().all()


def test_threads_do_not_change_the_result(poisoned_pool):
    heads = (2, 128, 4, 64)
    tensors = operands((600,), heads)
    index = RaggedRows([Row(600, 1, 1, False)]).index
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            pool = poisoned_pool(2, state_shape(heads))
            o = gated_delta_chunk(*tensors, pool.view, *index, max_seq_len=600)
            results.append((o, pool.view[1]))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(results[1:], results[:1] * 2, rtol=0, atol=0)


def test_the_scan_agrees_with_transformers(target, poisoned_pool):
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    tensors = operands((37,), HEADS[0])
    pool = poisoned_pool(2, state_shape(HEADS[0]), device=target.device)
    pool.fill([1])
    batch = [t[None] if t.ndim > 1 else t for t in tensors]
    expected, expected_state = qwen3_next.torch_chunk_gated_delta_rule(
        *transformers_operands(*batch),
        chunk_size=16,
        initial_state=pool.view[1:2].cpu().mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    index = RaggedRows([Row(37, 1, 1, True)], target.device).index
    o = scan(target, *(t.to(target.device) for t in tensors), pool.view, *index)
    close(o.cpu(), expected[0], torch.float32)
    close(pool.view[1].cpu(), expected_state[0].mT, torch.float32)
