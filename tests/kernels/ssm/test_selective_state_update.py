import itertools

import pytest
import torch

from kernels.formats.stochastic_round import NEAREST, StateRounding, round_bfloat16_reference
from kernels.ssm import selective_state_update as module
from kernels.ssm.selective_state_update import selective_state_update, selective_state_update_reference
from testing.kernels.sweep import crossed

NO_LIMIT = (0.0, float("inf"))
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 8e-3, "atol": 2e-2},
    torch.float16: {"rtol": 1e-3, "atol": 2e-3},
}


def update(target, *args, dt_limit=NO_LIMIT, seq_lens=None, rounding=NEAREST):
    if target.name == "triton":
        return module._launch(*args, dt_limit, seq_lens, rounding)
    return selective_state_update(*args, dt_limit=dt_limit, seq_lens=seq_lens, rounding=rounding)


def operands(num_rows, num_positions, heads, dtype=torch.float32, device="cpu"):
    """x, dt, A, B, C, D, dt_bias; x, B and C are cut from one wide tensor, dt from another, as in a model."""
    num_heads, head_dim, num_groups, state_dim = heads
    torch.manual_seed(num_rows)
    sizes = [num_heads * head_dim, num_groups * state_dim, num_groups * state_dim]
    wide = torch.randn(num_rows, num_positions, sum(sizes)).to(dtype).to(device)
    x, B, C = wide.split(sizes, dim=-1)
    dt = torch.randn(num_rows, num_positions, 3 * num_heads).to(dtype).to(device).chunk(3, dim=-1)[1]
    A, D, dt_bias = (torch.randn(num_heads, device=device) for _ in range(3))
    shape = (num_rows, num_positions)
    return (
        x.view(*shape, num_heads, head_dim),
        dt,
        -torch.exp(A),
        B.view(*shape, num_groups, state_dim),
        C.view(*shape, num_groups, state_dim),
        D,
        dt_bias,
    )


def double(tensors):
    return [t.double() for t in tensors]


ROWS = [  # read slots, write slots
    ([2], [[2]]),
    ([3, 0, 1], [[3], [0], [5]]),
    ([1, 5, 0, 9], [[1, 2, 3], [4, 5, 6], [0, 0, 0], [7, 0, 8]]),
    ([4, 8], [[1, 2, 3, 4, 5], [0, 0, 9, 8, 0]]),
]
HEADS = [  # heads, head dim, groups, state dim
    (4, 32, 1, 64),
    (4, 16, 2, 16),
    (2, 64, 2, 128),
    (3, 24, 3, 80),
    (2, 80, 1, 32),
    (2, 7, 1, 20),
]


KINDS = [  # heads, dtype, state's dtype, limits of dt
    *((heads, torch.float32, torch.float32, NO_LIMIT) for heads in HEADS),
    (HEADS[1], torch.float32, torch.float32, (0.3, 0.9)),
    (HEADS[0], torch.float32, torch.bfloat16, NO_LIMIT),
    (HEADS[0], torch.bfloat16, torch.float32, NO_LIMIT),
    (HEADS[3], torch.bfloat16, torch.bfloat16, (0.001, 0.1)),
    (HEADS[4], torch.float16, torch.float32, NO_LIMIT),
]


@pytest.mark.parametrize(("rows", "heads", "dtype", "state_dtype", "dt_limit"), crossed(ROWS, KINDS))
def test_update_equals_the_reference_and_writes_only_its_slots(
    target, rows, heads, dtype, state_dtype, dt_limit, poisoned_pool
):
    read, write = rows
    num_heads, head_dim, _, state_dim = heads
    tensors = operands(len(read), len(write[0]), heads, dtype, target.device)
    pool = poisoned_pool(11, (num_heads, head_dim, state_dim), state_dtype, target.device)
    pool.fill([slot for slot in read if slot])
    before = pool.bytes.clone()
    is_narrow = state_dtype == torch.bfloat16  # the reference rounds between positions as well
    expected_state = pool.view.clone() if is_narrow else pool.view.double()
    index = (target.int32(read), target.int32(write))

    y = update(target, *tensors, pool.view, *index, dt_limit=dt_limit)

    expected = selective_state_update_reference(*double(tensors), expected_state, *index, dt_limit=dt_limit)
    assert y.dtype == dtype
    is_rounded_between = is_narrow and len(write[0]) > 1
    torch.testing.assert_close(
        y.double(), expected, **TOLERANCE[state_dtype if is_rounded_between else dtype]
    )
    tolerance = TOLERANCE[state_dtype]
    torch.testing.assert_close(pool.view.double(), expected_state.double(), equal_nan=True, **tolerance)
    pool.assert_same_outside(before, [slot for slot in itertools.chain(*write) if slot])


def test_one_step_of_several_positions_equals_several_steps_of_one(target, poisoned_pool):
    heads = (4, 16, 2, 32)
    tensors = operands(2, 4, heads, device=target.device)
    pool = poisoned_pool(9, (4, 16, 32), device=target.device)
    pool.fill([1, 5])
    start = pool.view.clone()
    write = target.int32([[1, 2, 3, 4], [5, 6, 7, 8]])
    y = update(target, *tensors, pool.view, target.int32([1, 5]), write)
    for i in range(4):
        one = [t[:, i : i + 1] if t.ndim > 1 else t for t in tensors]
        in_place = target.int32([1, 5])
        y_i = update(target, *one, start, in_place, in_place[:, None])
        torch.testing.assert_close(y_i[:, 0], y[:, i])
        torch.testing.assert_close(start[[1, 5]], pool.view[[1 + i, 5 + i]])


@pytest.mark.parametrize(
    "rounding", [NEAREST, StateRounding.stochastic(2, first_head=3)], ids=["nearest", "by_chance"]
)
@pytest.mark.parametrize("heads", [(4, 16, 2, 32), (3, 7, 3, 20)])
def test_a_bfloat16_state_is_rounded_behind_every_position_whatever_the_steps(
    target, heads, rounding, poisoned_pool
):
    num_heads, head_dim, _, state_dim = heads
    tensors = operands(2, 4, heads, device=target.device)
    pool = poisoned_pool(12, (num_heads, head_dim, state_dim), torch.bfloat16, target.device)
    pool.fill([1, 5])
    wide = pool.view[[0, 1, 5]].float()
    pool.view[9], pool.view[10] = pool.view[1], pool.view[5]
    write = target.int32([[1, 2, 0, 4], [5, 6, 7, 8]])
    seq_lens = target.int32([104, 17])
    y = update(target, *tensors, pool.view, target.int32([1, 5]), write, seq_lens=seq_lens, rounding=rounding)
    for i in range(4):
        one = [t[:, i : i + 1] if t.ndim > 1 else t for t in tensors]
        now = seq_lens - 3 + i
        alone = target.int32([9, 10])
        y_alone = update(target, *one, pool.view, alone, alone[:, None], seq_lens=now, rounding=rounding)
        assert torch.equal(y_alone[:, 0], y[:, i])
        in_place = target.int32([1, 2])
        y_wide = update(target, *one, wide, in_place, in_place[:, None])
        torch.testing.assert_close(y_wide[:, 0], y[:, i], rtol=1e-5, atol=1e-5)
        rounded = round_bfloat16_reference(wide[1:], now, rounding)
        assert torch.equal(pool.view[[9, 10]], rounded)
        rounded = pool.view[[9, 10]].clone()
        wide[1:] = rounded.float()
        if i != 2:
            assert torch.equal(pool.view[[1 + i, 5 + i]], rounded)


def test_steps_over_very_small_and_very_large_dt_keep_their_digits(target, poisoned_pool):
    heads = (8, 4, 1, 16)
    x, dt, A, B, C, D, dt_bias = operands(1, 1, heads, device=target.device)
    dt = torch.tensor([-80.0, -30.0, -17.0, -10.0, -3.0, 19.9, 20.1, 300.0], device=target.device)
    tensors = (x, dt.view(1, 1, 8), A / 100, B, C, torch.zeros_like(D), torch.zeros_like(dt_bias))
    pool = poisoned_pool(2, (8, 4, 16), device=target.device)
    pool.view[1] = 0
    expected_state = pool.view.double()
    index = (target.int32([1]), target.int32([[1]]))
    y = update(target, *tensors, pool.view, *index)
    expected = selective_state_update_reference(*double(tensors), expected_state, *index, dt_limit=NO_LIMIT)
    torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=0)
    torch.testing.assert_close(pool.view[1].double(), expected_state[1], rtol=2e-5, atol=0)


@pytest.mark.parametrize("source", ["state", "dt", "x"])
def test_nan_reaches_output_and_state(target, source, poisoned_pool):
    heads = (2, 8, 1, 16)
    tensors = operands(1, 1, heads, device=target.device)
    pool = poisoned_pool(2, (2, 8, 16), device=target.device)
    if source == "dt":
        tensors[1].fill_(float("nan"))
    elif source == "x":
        tensors[0].fill_(float("nan"))
    if source != "state":
        pool.fill([1])
    y = update(target, *tensors, pool.view, target.int32([1]), target.int32([[1]]), dt_limit=(0.001, 0.1))
    assert y.isnan().all()
    assert pool.view[1].isnan().all()


def test_the_step_agrees_with_transformers(poisoned_pool):
    nemotron_h = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    heads = (4, 16, 2, 32)
    x, dt, A, B, C, D, dt_bias = operands(3, 1, heads)
    pool = poisoned_pool(4, (4, 16, 32))
    pool.fill([1, 2, 3])
    state = pool.view[1:].clone()
    expected = nemotron_h.mamba2_selective_state_update(
        state,
        x[:, 0],
        dt[:, 0, :, None].expand(-1, -1, 16),
        A[:, None, None].expand(-1, 16, 32),
        B[:, 0],
        C[:, 0],
        D[:, None].expand(-1, 16),
        dt_bias=dt_bias[:, None].expand(-1, 16),
        dt_softplus=True,
    )
    slots = torch.tensor([1, 2, 3], dtype=torch.int32)
    y = selective_state_update(
        x, dt, A, B, C, D, dt_bias, pool.view, slots, slots[:, None], dt_limit=NO_LIMIT
    )
    torch.testing.assert_close(y[:, 0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool.view[1:], state, rtol=1e-5, atol=1e-5)
