import itertools
import random

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.ssm import causal_conv1d as module
from kernels.ssm import causal_conv1d_cpu
from kernels.ssm.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_reference,
    causal_conv1d_update,
    causal_conv1d_update_reference,
)
from testing.kernels.ragged_rows import NUM_SLOTS, RaggedRows, Row, random_rows

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
}


def prefill(target, *args, boundaries=None):
    """The positional arguments of ``causal_conv1d``."""
    max_seq_len = int(args[4].diff().max())
    if target.name == "triton":
        return module._launch_prefill(*args, max_seq_len, boundaries)
    return causal_conv1d(*args, max_seq_len=max_seq_len, boundaries=boundaries)


def decode(target, *args):
    return module._launch_decode(*args) if target.name == "triton" else causal_conv1d_update(*args)


def operands(num_tokens, num_channels, num_taps, dtype, device="cpu"):
    """x as a column slice of a wider projection, weight, bias."""
    torch.manual_seed(num_tokens)
    shapes = (num_tokens, num_channels + 24), (num_channels, num_taps), (num_channels,)
    x, weight, bias = (torch.randn(shape).to(dtype).to(device) for shape in shapes)
    return x[:, 8 : 8 + num_channels], weight, bias


def double(*tensors):
    return [None if t is None else t.double() for t in tensors]


PREFILL_ROWS = [  # (length, read slot, write slot, has_initial) of each row
    [(7, 3, 3, True)],
    [(31, 1, 1, False), (32, 2, 2, True), (33, 3, 3, True)],
    [(1, 2, 2, True), (2, 0, 1, False), (3, 4, 5, True), (4, 4, 3, True)],
    [(5, 1, 4, True), (0, 3, 3, True), (6, 5, 0, True), (2, 0, 0, False), (70, 5, 2, False)],
]


@pytest.mark.parametrize("rows", PREFILL_ROWS)
@pytest.mark.parametrize(
    ("num_channels", "num_taps", "dtype", "state_dtype", "with_bias"),
    [
        (64, 4, torch.float32, torch.float32, True),
        (50, 2, torch.float32, torch.float32, False),
        (17, 3, torch.float32, torch.bfloat16, True),
        (72, 4, torch.bfloat16, torch.bfloat16, True),
        (24, 4, torch.float16, torch.float32, False),
    ],
)
def test_prefill_equals_the_reference_and_writes_only_its_slots(
    target, rows, num_channels, num_taps, dtype, state_dtype, with_bias, poisoned_pool
):
    lengths, read, write, initial = (list(column) for column in zip(*rows, strict=True))
    x, weight, bias = operands(sum(lengths), num_channels, num_taps, dtype, target.device)
    bias = bias if with_bias else None
    pool = poisoned_pool(6, (num_channels, num_taps - 1), state_dtype, target.device)
    pool.fill([slot for slot, start in zip(read, initial, strict=True) if start])
    before, expected_state = pool.bytes.clone(), pool.view.double()
    slots = target.int32(read), target.int32(write)
    index = (target.int32([0, *itertools.accumulate(lengths)]), *slots, target.flags(initial))

    y = prefill(target, x, weight, bias, pool.view, *index)

    expected = causal_conv1d_reference(*double(x, weight, bias), expected_state, *index)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[dtype])
    # Inputs are copied; Triton's interpreter truncates where a GPU rounds to bfloat16.
    rtol = 2**-7 if state_dtype == torch.bfloat16 else 0
    torch.testing.assert_close(pool.view, expected_state.to(state_dtype), rtol=rtol, atol=0, equal_nan=True)
    pool.assert_same_outside(before, [s for s, n in zip(write, lengths, strict=True) if s and n])


BOUNDARY_ROWS = [  # the tiles of the Triton kernel hold 32 tokens
    [Row(7, 3, 3, True, {1: 7, 2: 8, 3: 9, 6: 10})],
    [Row(70, 0, 1, False, {1: 7, 31: 8, 32: 9, 33: 10, 69: 11}), Row(2, 2, 4, True, {1: 12})],
    [Row(6, 5, 0, True), Row(0, 3, 3, True), Row(3, 4, 1, True, {2: 7}), Row(5, 4, 2, True)],
    *(random_rows(seed, 40) for seed in range(4)),
]


@pytest.mark.parametrize("rows", BOUNDARY_ROWS)
@pytest.mark.parametrize(
    ("num_channels", "num_taps", "dtype", "state_dtype"),
    [
        (72, 4, torch.float32, torch.float32),
        (17, 2, torch.float32, torch.float32),
        (24, 4, torch.bfloat16, torch.bfloat16),
    ],
)
def test_prefill_stores_the_states_at_boundaries_too(
    target, rows, num_channels, num_taps, dtype, state_dtype, poisoned_pool
):
    batch = RaggedRows(rows, target.device)
    x, weight, bias = operands(batch.num_tokens, num_channels, num_taps, dtype, target.device)
    pool = poisoned_pool(NUM_SLOTS, (num_channels, num_taps - 1), state_dtype, target.device)
    pool.fill(batch.filled_slots)
    before, expected_state, plain_state = pool.bytes.clone(), pool.view.double(), pool.view.clone()

    y = prefill(target, x, weight, bias, pool.view, *batch.index, boundaries=batch.boundaries)

    expected = causal_conv1d_reference(
        *double(x, weight, bias), expected_state, *batch.index, batch.boundaries
    )
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[dtype])
    rtol = 2**-7 if state_dtype == torch.bfloat16 else 0  # as above
    torch.testing.assert_close(pool.view, expected_state.to(state_dtype), rtol=rtol, atol=0, equal_nan=True)
    pool.assert_same_outside(before, batch.written_slots)
    plain = prefill(target, x, weight, bias, plain_state, *batch.index)
    torch.testing.assert_close(y, plain)
    last = [row.write_slot for row in rows]
    torch.testing.assert_close(pool.view[last], plain_state[last], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("boundary", [1, 2, 3, 19, 32, 39])
def test_a_row_resumed_from_a_boundary_equals_the_row_in_one_go(target, boundary, poisoned_pool):
    x, weight, bias = operands(40, 24, 4, torch.float32, target.device)
    pool = poisoned_pool(5, (24, 3), device=target.device)
    pool.fill([1])
    batch = RaggedRows([Row(40, 1, 2, True, {boundary: 3})], target.device)
    whole = prefill(target, x, weight, bias, pool.view, *batch.index, boundaries=batch.boundaries)
    rest = RaggedRows([Row(40 - boundary, 3, 4, True)], target.device)
    y = prefill(target, x[boundary:], weight, bias, pool.view, *rest.index)
    torch.testing.assert_close(y, whole[boundary:])
    torch.testing.assert_close(pool.view[4], pool.view[2], rtol=0, atol=0)


DECODE_ROWS = [  # read slots, write slots
    ([2], [[2]]),
    ([3, 0, 1], [[3], [0], [5]]),
    ([1, 5, 0, 9], [[1, 2, 3], [4, 5, 6], [0, 0, 0], [7, 0, 8]]),
    ([4, 8], [[1, 2, 3, 4, 5], [0, 7, 8, 9, 0]]),
]


@pytest.mark.parametrize("rows", DECODE_ROWS)
@pytest.mark.parametrize(
    ("num_channels", "num_taps", "dtype", "state_dtype", "with_bias"),
    [
        (136, 4, torch.float32, torch.float32, True),
        (50, 2, torch.float32, torch.float32, False),
        (17, 3, torch.float32, torch.bfloat16, True),
        (72, 4, torch.bfloat16, torch.bfloat16, True),
        (24, 4, torch.float16, torch.float32, False),
    ],
)
def test_decode_equals_the_reference_and_writes_only_its_slots(
    target, rows, num_channels, num_taps, dtype, state_dtype, with_bias, poisoned_pool
):
    read, write = rows
    num_positions = len(write[0])
    x, weight, bias = operands(len(read) * num_positions, num_channels, num_taps, dtype, target.device)
    bias = bias if with_bias else None
    x = x.view(len(read), num_positions, num_channels)
    pool = poisoned_pool(11, (num_channels, num_taps - 1), state_dtype, target.device)
    pool.fill([slot for slot in read if slot])
    before, expected_state = pool.bytes.clone(), pool.view.double()
    index = (target.int32(read), target.int32(write))

    y = decode(target, x, weight, bias, pool.view, *index)

    expected = causal_conv1d_update_reference(*double(x, weight, bias), expected_state, *index)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[dtype])
    # Inputs are copied; Triton's interpreter truncates where a GPU rounds to bfloat16.
    rtol = 2**-7 if state_dtype == torch.bfloat16 else 0
    torch.testing.assert_close(pool.view, expected_state.to(state_dtype), rtol=rtol, atol=0, equal_nan=True)
    pool.assert_same_outside(before, [s for s in itertools.chain(*write) if s])


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_in_pieces_equals_the_sequence_in_one_go(target, seed, poisoned_pool):
    choice = random.Random(seed)
    length, num_channels = 40, 24
    x, weight, bias = operands(length, num_channels, 4, torch.float32, target.device)
    pool = poisoned_pool(4, (num_channels, 3), device=target.device)
    slot = target.int32([1])
    index = (target.int32([0, length]), slot, slot, target.flags([False]))
    whole = prefill(target, x, weight, bias, pool.view, *index)
    pieces, done, slot = [], 0, 2
    while done < length:
        size = min(choice.choice([1, 1, 2, 3, 5, 17]), length - done)
        piece = x[done : done + size]
        if size <= 2 and done > 0:  # decode rows, hopping between two slots
            targets = [5 - slot if i == size - 1 else 0 for i in range(size)]
            index = (target.int32([slot]), target.int32([targets]))
            pieces.append(decode(target, piece[None], weight, bias, pool.view, *index)[0])
            slot = 5 - slot
        else:
            slots = target.int32([slot]), target.int32([5 - slot])
            index = (target.int32([0, size]), *slots, target.flags([done > 0]))
            pieces.append(prefill(target, piece, weight, bias, pool.view, *index))
            slot = 5 - slot
        done += size
    torch.testing.assert_close(torch.cat(pieces), whole)
    torch.testing.assert_close(pool.view[slot], pool.view[1], rtol=0, atol=0)


def test_nan_in_a_state_reaches_the_outputs_that_depend_on_it(target, poisoned_pool):
    x, weight, bias = operands(5, 16, 4, torch.float32, target.device)
    pool = poisoned_pool(2, (16, 3), device=target.device)
    index = (target.int32([0, 5]), target.int32([1]), target.int32([1]), target.flags([True]))
    y = prefill(target, x, weight, bias, pool.view, *index)
    assert y[:3].isnan().all()
    assert y[3:].isfinite().all()
    pool.view.fill_(float("nan"))
    y = decode(target, x[None, :1], weight, bias, pool.view, target.int32([1]), target.int32([[1]]))
    assert y.isnan().all()


def test_the_convolution_agrees_with_transformers(poisoned_pool):
    nemotron_h = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    x, weight, bias = operands(9, 16, 4, torch.float32)
    pool = poisoned_pool(2, (16, 3))
    slot = torch.tensor([1]).int()
    index = (torch.tensor([0, 8]).int(), slot, slot, torch.tensor([False]))
    y = causal_conv1d(x[:8], weight, bias, pool.view, *index, max_seq_len=8)
    expected = nemotron_h.causal_conv1d_fn(x[:8].T[None], weight, bias, activation="silu")
    torch.testing.assert_close(y, expected[0, :, :8].T)
    state = torch.cat([torch.zeros(1, 16, 1), pool.view[1:2]], dim=2)  # theirs keeps K inputs
    expected = nemotron_h.causal_conv1d_update(x[8:, :, None], state, weight, bias, activation="silu")
    y = causal_conv1d_update(x[None, 8:], weight, bias, pool.view, slot, slot[:, None])
    torch.testing.assert_close(y[0, 0], expected[0, :, 0])


def test_the_first_update_of_a_process_may_be_a_recorded_one():
    causal_conv1d_cpu._no_bias.cache_clear()
    x, weight, conv_state = torch.randn(2, 1, 48), torch.randn(48, 4), torch.randn(3, 48, 3)
    slots = torch.tensor([1, 2])
    states, graph = conv_state.clone(), CpuGraph()
    with graph.record():
        y = causal_conv1d_update(x, weight, None, states, slots, slots[:, None])
    expected = causal_conv1d_update(x, weight, None, conv_state, slots, slots[:, None])
    assert torch.equal(y, expected)
    assert torch.equal(states, conv_state)
