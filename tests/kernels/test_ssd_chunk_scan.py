import itertools
import random

import pytest
import torch

from kernels import selective_state_update as update_module
from kernels import ssd_chunk_scan as module
from kernels.selective_state_update import selective_state_update
from kernels.ssd_chunk_scan import ssd_chunk_scan, ssd_chunk_scan_reference

NO_LIMIT = (0.0, float("inf"))
TOLERANCE = {
    torch.float32: {"rtol": 5e-5, "atol": 1e-4},
    # Triton's GEMMs round their operands to the inputs' dtype, as those of mamba-ssm do.
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-1},
    torch.float16: {"rtol": 2e-3, "atol": 2e-2},
}


def scan(target, *args, chunk_size=16, dt_limit=NO_LIMIT):
    max_seq_len = int(args[-3].diff().max())
    if target.name == "triton":
        return module._launch(*args, chunk_size, dt_limit, max_seq_len)
    return ssd_chunk_scan(*args, chunk_size=chunk_size, dt_limit=dt_limit, max_seq_len=max_seq_len)


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


ROWS = [  # (length, slot, has_initial) of each row; chunks hold 16 tokens
    [(16, 3, True)],
    [(15, 1, False), (17, 2, True)],
    [(1, 2, True), (3, 4, True), (48, 1, False), (2, 3, False)],
    [(5, 4, True), (0, 3, True), (6, 0, True), (2, 0, False), (33, 2, False)],
]
HEADS = [  # heads, head dim, groups, state dim
    (4, 32, 1, 64),
    (4, 16, 2, 16),
    (2, 64, 2, 128),
    (3, 24, 3, 80),
    (2, 80, 1, 32),
    (2, 7, 1, 20),
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "dtype", "state_dtype", "dt_limit"),
    [
        *((heads, torch.float32, torch.float32, NO_LIMIT) for heads in HEADS),
        (HEADS[1], torch.float32, torch.float32, (0.3, 0.9)),
        (HEADS[0], torch.float32, torch.bfloat16, NO_LIMIT),
        (HEADS[0], torch.bfloat16, torch.float32, NO_LIMIT),
        (HEADS[3], torch.bfloat16, torch.bfloat16, (0.001, 0.1)),
        (HEADS[4], torch.float16, torch.float32, NO_LIMIT),
    ],
)
def test_scan_equals_the_recurrence_and_writes_only_its_slots(
    target, rows, heads, dtype, state_dtype, dt_limit, poisoned_pool
):
    if target.name == "triton" and target.device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices as integers")
    lengths, slots, initial = (list(column) for column in zip(*rows, strict=True))
    num_heads, head_dim, _, state_dim = heads
    tensors = operands(sum(lengths), heads, dtype, target.device)
    pool = poisoned_pool(6, (num_heads, head_dim, state_dim), state_dtype, target.device)
    pool.fill([slot for slot, start in zip(slots, initial, strict=True) if slot and start])
    before, expected_state = pool.bytes.clone(), pool.view.double()
    index = (target.int32([0, *itertools.accumulate(lengths)]), target.int32(slots), target.flags(initial))

    y = scan(target, *tensors, pool.view, *index, dt_limit=dt_limit)

    expected = ssd_chunk_scan_reference(*double(tensors), expected_state, *index, dt_limit=dt_limit)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[dtype])
    tolerance = TOLERANCE[max(dtype, state_dtype, key=lambda d: TOLERANCE[d]["rtol"])]
    torch.testing.assert_close(pool.view.double(), expected_state, equal_nan=True, **tolerance)
    pool.assert_same_outside(before, [s for s, n in zip(slots, lengths, strict=True) if s and n])


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_the_chunk_size_does_not_change_the_result(target, chunk_size, difference, poisoned_pool):
    heads, length = (2, 16, 1, 32), chunk_size + difference
    tensors = operands(length, heads, device=target.device)
    pool = poisoned_pool(2, (2, 16, 32), device=target.device)
    pool.fill([1])
    expected_state = pool.view.double()
    index = (target.int32([0, length]), target.int32([1]), target.flags([True]))
    y = scan(target, *tensors, pool.view, *index, chunk_size=chunk_size)
    expected = ssd_chunk_scan_reference(*double(tensors), expected_state, *index, dt_limit=NO_LIMIT)
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[torch.float32])
    torch.testing.assert_close(pool.view[1].double(), expected_state[1], **TOLERANCE[torch.float32])


@pytest.mark.parametrize("seed", range(4))
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

    index = (target.int32([0, length]), target.int32([1]), target.flags([False]))
    whole = scan(target, *tensors, pool.view, *index)
    outputs, done, slot = [], 0, 2
    while done < length:
        size = min(choice.choice([1, 1, 2, 3, 16, 29]), length - done)
        if size <= 3 and done > 0:  # decode rows, hopping between two slots
            targets = [5 - slot if i == size - 1 else 0 for i in range(size)]
            outputs.append(decode(done, done + size, slot, targets))
            slot = 5 - slot
        else:
            index = (target.int32([0, size]), target.int32([slot]), target.flags([done > 0]))
            outputs.append(scan(target, *piece(done, done + size), pool.view, *index))
        done += size
    torch.testing.assert_close(torch.cat(outputs), whole, **TOLERANCE[torch.float32])
    torch.testing.assert_close(pool.view[slot], pool.view[1], **TOLERANCE[torch.float32])


def test_strong_decay_neither_overflows_nor_loses_the_recent_past(target, poisoned_pool):
    x, dt, A, B, C, D, dt_bias = operands(40, (2, 16, 1, 16), device=target.device)
    tensors = (x, dt + 20, A - 16, B, C, D, dt_bias)  # exp(-A dt) of a single step overflows
    pool = poisoned_pool(2, (2, 16, 16), device=target.device)
    expected_state = pool.view.double()
    index = (target.int32([0, 40]), target.int32([1]), target.flags([False]))
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
    index = (target.int32([0, 20]), target.int32([1]), target.flags([True]))
    y = scan(target, *tensors, pool.view, *index, dt_limit=(0.001, 0.1))
    assert y[first:].isnan().all()
    assert pool.view[1].isnan().all()


def test_threads_do_not_change_the_result(poisoned_pool):
    tensors = operands(600, (4, 64, 1, 128))
    index = (torch.tensor([0, 600]).int(), torch.tensor([1]).int(), torch.tensor([False]))
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
    index = (torch.tensor([0, 37]).int(), torch.tensor([1]).int(), torch.tensor([True]))
    y = ssd_chunk_scan(
        x, dt, A, B, C, D, dt_bias, pool.view, *index, chunk_size=16, dt_limit=(0.1, 0.7), max_seq_len=37
    )
    torch.testing.assert_close(y, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool.view[1], state[0], rtol=1e-4, atol=1e-4)
