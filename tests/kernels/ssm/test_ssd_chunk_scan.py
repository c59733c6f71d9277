import itertools
import random

import pytest
import torch

from kernels.formats.stochastic_round import NEAREST, StateRounding, round_bfloat16_reference
from kernels.ssm import selective_state_update as update_module
from kernels.ssm import ssd_chunk_scan as module
from kernels.ssm.boundaries import segments_of
from kernels.ssm.selective_state_update import selective_state_update
from kernels.ssm.ssd_chunk_scan import ssd_chunk_scan, ssd_chunk_scan_reference
from testing.kernels.interpreted import skip_bfloat16_in_the_interpreter
from testing.kernels.ragged_rows import NUM_SLOTS, RaggedRows, Row
from testing.kernels.rows_to_scan import BOUNDARY_ROWS, ROWS, further, narrow_rows

NO_LIMIT = (0.0, float("inf"))
TOLERANCE = {
    torch.float32: {"rtol": 5e-5, "atol": 1e-4},
    # Triton's GEMMs round their operands to the inputs' dtype, as those of mamba-ssm do.
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-1},
    torch.float16: {"rtol": 2e-3, "atol": 2e-2},
}


def scan(target, *args, chunk_size=16, dt_limit=NO_LIMIT, boundaries=None, num_before=None, rounding=NEAREST):
    max_seq_len = int(args[8].diff().max())
    num_before = torch.zeros_like(args[10]) if num_before is None else num_before
    if target.name == "triton":
        segments = segments_of(boundaries, args[8:], num_before, max_seq_len)
        return module._launch(*args[:8], segments, chunk_size, dt_limit, rounding)
    options = {"chunk_size": chunk_size, "dt_limit": dt_limit, "max_seq_len": max_seq_len}
    return ssd_chunk_scan(*args, **options, boundaries=boundaries, num_before=num_before, rounding=rounding)


def operands(num_tokens, heads, dtype=torch.float32, device="cpu"):
    """x, dt, A, B, C, D, dt_bias; x, B and C are cut from one wide tensor, dt from another, as in a model."""
    num_heads, head_dim, num_groups, state_dim = heads
    torch.manual_seed(num_tokens)
    sizes = [num_heads * head_dim, num_groups * state_dim, num_groups * state_dim]
    x, B, C = torch.randn(num_tokens, sum(sizes)).to(dtype).to(device).split(sizes, dim=-1)
    dt = torch.randn(num_tokens, 3 * num_heads).to(dtype).to(device).chunk(3, dim=-1)[1]
    A, D, dt_bias = (torch.randn(num_heads, device=device) for _ in range(3))
    return (
        x.view(num_tokens, num_heads, head_dim),
        dt,
        -torch.exp(A),
        B.view(num_tokens, num_groups, state_dim),
        C.view(num_tokens, num_groups, state_dim),
        D,
        dt_bias,
    )


def double(tensors):
    return [t.double() for t in tensors]


HEADS = [  # heads, head dim, groups, state dim
    (4, 32, 1, 64),
    (4, 16, 2, 16),
    (2, 64, 2, 128),
    (3, 24, 3, 80),
    (2, 80, 1, 32),
    (2, 7, 1, 20),
]


KINDS = [  # heads, dtype, state's dtype, dt's limits
    *((heads, torch.float32, torch.float32, NO_LIMIT) for heads in HEADS),
    (HEADS[1], torch.float32, torch.float32, (0.3, 0.9)),
    (HEADS[0], torch.float32, torch.bfloat16, NO_LIMIT),
    (HEADS[0], torch.bfloat16, torch.float32, NO_LIMIT),
    (HEADS[3], torch.bfloat16, torch.bfloat16, (0.001, 0.1)),
    (HEADS[4], torch.float16, torch.float32, NO_LIMIT),
]


@pytest.mark.parametrize(
    ("rows", "heads", "dtype", "state_dtype", "dt_limit"),
    [
        # Each batch with one shape and each shape with one batch; the last batch has rows of every sort.
        *((rows, *KINDS[1]) for rows in ROWS),
        *((ROWS[3], *kind) for kind in KINDS if kind is not KINDS[1]),
    ],
)
def test_scan_equals_the_recurrence_and_writes_only_its_slots(
    target, rows, heads, dtype, state_dtype, dt_limit, poisoned_pool
):
    skip_bfloat16_in_the_interpreter(target, dtype)
    lengths, read, write, initial = (list(column) for column in zip(*rows, strict=True))
    num_heads, head_dim, _, state_dim = heads
    tensors = operands(sum(lengths), heads, dtype, target.device)
    pool = poisoned_pool(6, (num_heads, head_dim, state_dim), state_dtype, target.device)
    pool.fill([slot for slot, start in zip(read, initial, strict=True) if start])
    before, expected_state = pool.bytes.clone(), pool.view.double()
    slots = target.int32(read), target.int32(write)
    index = (target.int32([0, *itertools.accumulate(lengths)]), *slots, target.flags(initial))

    y = scan(target, *tensors, pool.view, *index, dt_limit=dt_limit)

    expected = ssd_chunk_scan_reference(*double(tensors), expected_state, *index, dt_limit=dt_limit)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[dtype])
    tolerance = TOLERANCE[max(dtype, state_dtype, key=lambda d: TOLERANCE[d]["rtol"])]
    torch.testing.assert_close(pool.view.double(), expected_state, equal_nan=True, **tolerance)
    pool.assert_same_outside(before, [s for s, n in zip(write, lengths, strict=True) if s and n])


@pytest.mark.parametrize("rows", BOUNDARY_ROWS)
@pytest.mark.parametrize(
    ("heads", "dtype", "state_dtype"),
    [
        (HEADS[1], torch.float32, torch.float32),
        (HEADS[3], torch.float32, torch.bfloat16),
        (HEADS[5], torch.float32, torch.float32),
        (HEADS[1], torch.bfloat16, torch.bfloat16),
    ],
)
def test_scan_stores_the_states_at_boundaries_too(target, rows, heads, dtype, state_dtype, poisoned_pool):
    skip_bfloat16_in_the_interpreter(target, dtype)
    batch = RaggedRows(rows, target.device)
    num_heads, head_dim, _, state_dim = heads
    tensors = operands(batch.num_tokens, heads, dtype, target.device)
    pool = poisoned_pool(NUM_SLOTS, (num_heads, head_dim, state_dim), state_dtype, target.device)
    pool.fill(batch.filled_slots)
    before, expected_state, plain_state = pool.bytes.clone(), pool.view.double(), pool.view.clone()

    y = scan(target, *tensors, pool.view, *batch.index, boundaries=batch.boundaries)

    expected = ssd_chunk_scan_reference(
        *double(tensors), expected_state, *batch.index, dt_limit=NO_LIMIT, boundaries=batch.boundaries
    )
    tolerance = TOLERANCE[max(dtype, state_dtype, key=lambda d: TOLERANCE[d]["rtol"])]
    torch.testing.assert_close(y.double(), expected, **tolerance)
    torch.testing.assert_close(pool.view.double(), expected_state, equal_nan=True, **tolerance)
    pool.assert_same_outside(before, batch.written_slots)
    plain = scan(target, *tensors, plain_state, *batch.index)
    torch.testing.assert_close(y, plain, **tolerance)
    last = [row.write_slot for row in rows]
    torch.testing.assert_close(pool.view[last], plain_state[last], equal_nan=True, **tolerance)


@pytest.mark.parametrize("boundary", [1, 15, 16, 17, *further(31, 39)])
def test_a_row_resumed_from_a_boundary_equals_the_row_in_one_go(target, boundary, poisoned_pool):
    x, dt, A, B, C, D, dt_bias = operands(40, (4, 16, 2, 32), device=target.device)
    pool = poisoned_pool(5, (4, 16, 32), device=target.device)
    pool.fill([1])
    batch = RaggedRows([Row(40, 1, 2, True, {boundary: 3})], target.device)
    tensors = (x, dt, A, B, C, D, dt_bias)
    whole = scan(target, *tensors, pool.view, *batch.index, boundaries=batch.boundaries)
    x, dt, B, C = (t[boundary:] for t in (x, dt, B, C))
    rest = RaggedRows([Row(40 - boundary, 3, 4, True)], target.device)
    y = scan(target, x, dt, A, B, C, D, dt_bias, pool.view, *rest.index)
    torch.testing.assert_close(y, whole[boundary:], **TOLERANCE[torch.float32])
    torch.testing.assert_close(pool.view[4], pool.view[2], **TOLERANCE[torch.float32])


@pytest.mark.parametrize(("rows", "rounding"), narrow_rows())
@pytest.mark.parametrize("heads", [(4, 16, 2, 32), (3, 24, 3, 20)])
def test_a_bfloat16_state_is_rounded_on_the_grid_and_the_scan_goes_on_from_that(
    target, heads, rows, rounding, poisoned_pool
):
    """Piece by piece over a float32 pool, rounded between pieces: the same bits."""
    batch = RaggedRows(rows, target.device)
    num_heads, head_dim, _, state_dim = heads
    tensors = operands(batch.num_tokens, heads, device=target.device)
    pool = poisoned_pool(NUM_SLOTS, (num_heads, head_dim, state_dim), torch.bfloat16, target.device)
    pool.fill(batch.filled_slots)
    before, start = pool.bytes.clone(), pool.view.float()
    y = scan(
        target, *tensors, pool.view, *batch.index, boundaries=batch.boundaries,
        num_before=batch.num_before, rounding=rounding,
    )  # fmt: skip
    pool.assert_same_outside(before, batch.written_slots)
    wide = torch.zeros(2, num_heads, head_dim, state_dim, device=target.device)
    for row, first in zip(rows, batch.starts, strict=False):
        wide[1] = start[row.read_slot] if row.has_initial else 0
        grid = range(64 - row.num_before % 64, row.length, 64)
        ends = sorted({*grid, *row.stores, row.length})
        for begin, end in itertools.pairwise([0, *ends]):
            piece = RaggedRows([Row(end - begin, 1, 1, True)], target.device)
            tokens = [t[first + begin : first + end] if t.ndim > 1 else t for t in tensors]
            expected = scan(target, *tokens, wide, *piece.index)
            position = torch.tensor(row.num_before + end, device=target.device)
            rounded = round_bfloat16_reference(wide[1], position, rounding)
            wide[1] = rounded.float()
            slot = row.write_slot if end == row.length else row.stores.get(end)
            if slot is not None:
                assert_rounded_alike(target, pool.view[slot], rounded)
            torch.testing.assert_close(y[first + begin : first + end], expected, rtol=1e-2, atol=2e-2)


def assert_rounded_alike(target, found, expected):
    """Bit for bit; the GPU's chunks are cut at other places, so that sums differ in their last digits."""
    if target.name == "cpu":
        assert torch.equal(found, expected)
    else:
        assert (found == expected).float().mean() > 0.99
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("rounding", [NEAREST, StateRounding.stochastic(2)], ids=["nearest", "by_chance"])
def test_a_row_that_is_cut_on_the_grid_leaves_the_bits_of_the_uncut_row(target, rounding, poisoned_pool):
    tensors = operands(200, (4, 16, 2, 32), device=target.device)
    pool = poisoned_pool(3, (4, 16, 32), torch.bfloat16, target.device)
    whole = RaggedRows([Row(200, 0, 1, False)], target.device)
    y = scan(target, *tensors, pool.view, *whole.index, num_before=whole.num_before, rounding=rounding)
    for begin, end in ((0, 64), (64, 192), (192, 200)):
        piece = RaggedRows([Row(end - begin, 2, 2, begin > 0, num_before=begin)], target.device)
        tokens = [t[begin:end] if t.ndim > 1 else t for t in tensors]
        found = scan(target, *tokens, pool.view, *piece.index, num_before=piece.num_before, rounding=rounding)
        assert torch.equal(found, y[begin:end])
    assert torch.equal(pool.view[1], pool.view[2])


@pytest.mark.parametrize("chunk_size", [16, *further(32, 64), 128])
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_the_chunk_size_does_not_change_the_result(
    target, chunk_size, difference, poisoned_pool, monkeypatch
):
    monkeypatch.setattr(module, "choose", lambda request, _: {**request.default, "CHUNK": chunk_size})
    heads, length = (2, 16, 1, 32), chunk_size + difference
    tensors = operands(length, heads, device=target.device)
    pool = poisoned_pool(2, (2, 16, 32), device=target.device)
    pool.fill([1])
    expected_state = pool.view.double()
    slot = target.int32([1])
    index = (target.int32([0, length]), slot, slot, target.flags([True]))
    y = scan(target, *tensors, pool.view, *index, chunk_size=chunk_size)
    expected = ssd_chunk_scan_reference(*double(tensors), expected_state, *index, dt_limit=NO_LIMIT)
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[torch.float32])
    torch.testing.assert_close(pool.view[1].double(), expected_state[1], **TOLERANCE[torch.float32])


def test_a_row_among_others_has_the_same_bits_as_alone(target, poisoned_pool):
    x, dt, A, B, C, D, dt_bias = operands(50, (4, 16, 2, 32), device=target.device)
    pool, alone = (poisoned_pool(4, (4, 16, 32), device=target.device) for _ in range(2))
    for one in (pool, alone):
        one.fill([1, 2, 3])
    batch = RaggedRows([Row(9, 1, 1, True), Row(37, 2, 2, True), Row(4, 3, 3, False)], target.device)
    y = scan(target, x, dt, A, B, C, D, dt_bias, pool.view, *batch.index)
    x, dt, B, C = (t[9:46] for t in (x, dt, B, C))
    single = RaggedRows([Row(37, 2, 2, True)], target.device)
    y_alone = scan(target, x, dt, A, B, C, D, dt_bias, alone.view, *single.index)
    assert torch.equal(y_alone, y[9:46])
    assert torch.equal(alone.view[2], pool.view[2])


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_a_sequence_in_pieces_equals_the_sequence_in_one_go(target, seed, poisoned_pool):
    choice, length = random.Random(seed), 70
    tensors = operands(length, (4, 16, 2, 32), device=target.device)
    pool = poisoned_pool(5, (4, 16, 32), device=target.device)
    update = update_module._launch if target.name == "triton" else None

    def piece(begin, end):
        return [t[begin:end] if t.ndim > 1 else t for t in tensors]

    def decode(begin, end, slot, targets):
        rows = [t[None] if t.ndim > 1 else t for t in piece(begin, end)]
        args = (*rows, pool.view, target.int32([slot]), target.int32([targets]))
        return update(*args, NO_LIMIT)[0] if update else selective_state_update(*args, dt_limit=NO_LIMIT)[0]

    slot = target.int32([1])
    index = (target.int32([0, length]), slot, slot, target.flags([False]))
    whole = scan(target, *tensors, pool.view, *index)
    outputs, done, slot = [], 0, 2
    while done < length:
        size = min(choice.choice([1, 1, 2, 3, 16, 29]), length - done)
        if size <= 3 and done > 0:  # decode rows, hopping between two slots
            targets = [5 - slot if i == size - 1 else 0 for i in range(size)]
            outputs.append(decode(done, done + size, slot, targets))
            slot = 5 - slot
        else:
            slots = target.int32([slot]), target.int32([5 - slot])
            index = (target.int32([0, size]), *slots, target.flags([done > 0]))
            outputs.append(scan(target, *piece(done, done + size), pool.view, *index))
            slot = 5 - slot
        done += size
    torch.testing.assert_close(torch.cat(outputs), whole, **TOLERANCE[torch.float32])
    torch.testing.assert_close(pool.view[slot], pool.view[1], **TOLERANCE[torch.float32])


def test_strong_decay_neither_overflows_nor_loses_the_recent_past(target, poisoned_pool):
    x, dt, A, B, C, D, dt_bias = operands(40, (2, 16, 1, 16), device=target.device)
    tensors = (x, dt + 20, A - 16, B, C, D, dt_bias)  # exp(-A dt) of a single step overflows
    pool = poisoned_pool(2, (2, 16, 16), device=target.device)
    expected_state = pool.view.double()
    slot = target.int32([1])
    index = (target.int32([0, 40]), slot, slot, target.flags([False]))
    y = scan(target, *tensors, pool.view, *index)
    expected = ssd_chunk_scan_reference(*double(tensors), expected_state, *index, dt_limit=NO_LIMIT)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(pool.view[1].double(), expected_state[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("source", ["state", "dt", "x"])
def test_nan_reaches_every_later_output_and_the_state(target, source, poisoned_pool):
    tensors = operands(20, (2, 16, 1, 16), device=target.device)
    pool = poisoned_pool(2, (2, 16, 16), device=target.device)
    first = 0
    if source != "state":
        pool.fill([1])
        first = 7
        tensors[1 if source == "dt" else 0][first] = float("nan")
    slot = target.int32([1])
    index = (target.int32([0, 20]), slot, slot, target.flags([True]))
    y = scan(target, *tensors, pool.view, *index, dt_limit=(0.001, 0.1))
    assert y[first:].isnan().all()
    assert pool.view[1].isnan().all()


def test_threads_do_not_change_the_result(poisoned_pool):
    tensors = operands(600, (4, 64, 1, 128))
    slot = torch.tensor([1]).int()
    index = (torch.tensor([0, 600]).int(), slot, slot, torch.tensor([False]))
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            pool = poisoned_pool(2, (4, 64, 128))
            y = ssd_chunk_scan(*tensors, pool.view, *index, chunk_size=64, dt_limit=NO_LIMIT, max_seq_len=600)
            results.append((y, pool.view[1]))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(results[1:], results[:1] * 2, rtol=0, atol=0)


def test_the_scan_agrees_with_transformers(poisoned_pool):
    nemotron_h = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    x, dt, A, B, C, D, dt_bias = operands(37, (4, 16, 2, 32))
    pool = poisoned_pool(2, (4, 16, 32))
    pool.fill([1])
    expected, state = nemotron_h.mamba2_chunk_scan(
        x[None],
        dt[None],
        A,
        B[None],
        C[None],
        chunk_size=16,
        D=D,
        dt_bias=dt_bias,
        initial_states=pool.view[1:2].clone(),
        dt_softplus=True,
        dt_limit=(0.1, 0.7),
        return_final_states=True,
    )
    slot = torch.tensor([1]).int()
    index = (torch.tensor([0, 37]).int(), slot, slot, torch.tensor([True]))
    y = ssd_chunk_scan(
        x, dt, A, B, C, D, dt_bias, pool.view, *index, chunk_size=16, dt_limit=(0.1, 0.7), max_seq_len=37
    )
    torch.testing.assert_close(y, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool.view[1], state[0], rtol=1e-4, atol=1e-4)
