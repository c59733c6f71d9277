import itertools

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.formats.stochastic_round import NEAREST, StateRounding, round_bfloat16_reference
from kernels.gated_delta import gated_delta_update as module
from kernels.gated_delta.gated_delta_update import gated_delta_update, gated_delta_update_reference
from testing.kernels.delta_operands import HEADS, double, operands, state_shape, transformers_operands
from testing.kernels.sweep import crossed

TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 8e-3, "atol": 2e-2},
    torch.float16: {"rtol": 1e-3, "atol": 2e-3},
}


def update(target, *args, seq_lens=None, rounding=NEAREST):
    if target.name == "triton":
        return module._launch(*args, seq_lens, rounding)
    return gated_delta_update(*args, seq_lens=seq_lens, rounding=rounding)


ROWS = [  # read slots, write slots
    ([2], [[2]]),
    ([3, 0, 1], [[3], [0], [5]]),
    ([1, 5, 0, 9], [[1, 2, 3], [4, 5, 6], [0, 0, 0], [7, 0, 8]]),
    ([4, 8], [[1, 2, 3, 4, 5], [0, 0, 9, 8, 0]]),
]


KINDS = [  # heads, dtype, state's dtype
    *((heads, torch.float32, torch.float32) for heads in HEADS),
    (HEADS[0], torch.float32, torch.bfloat16),
    (HEADS[0], torch.bfloat16, torch.float32),
    (HEADS[3], torch.bfloat16, torch.bfloat16),
    (HEADS[4], torch.float16, torch.float32),
]


@pytest.mark.parametrize(("rows", "heads", "dtype", "state_dtype"), crossed(ROWS, KINDS))
def test_update_equals_the_reference_and_writes_only_its_slots(
    target, rows, heads, dtype, state_dtype, poisoned_pool
):
    read, write = rows
    tensors = operands((len(read), len(write[0])), heads, dtype, target.device)
    pool = poisoned_pool(11, state_shape(heads), state_dtype, target.device)
    pool.fill([slot for slot in read if slot])
    before = pool.bytes.clone()
    is_narrow = state_dtype == torch.bfloat16  # the reference rounds between positions as well
    expected_state = pool.view.clone() if is_narrow else pool.view.double()
    index = (target.int32(read), target.int32(write))

    o = update(target, *tensors, pool.view, *index)

    expected = gated_delta_update_reference(*double(tensors), expected_state, *index)
    assert o.dtype == dtype
    is_rounded_between = is_narrow and len(write[0]) > 1
    torch.testing.assert_close(
        o.double(), expected, **TOLERANCE[state_dtype if is_rounded_between else dtype]
    )
    tolerance = TOLERANCE[state_dtype]
    torch.testing.assert_close(pool.view.double(), expected_state.double(), equal_nan=True, **tolerance)
    pool.assert_same_outside(before, [slot for slot in itertools.chain(*write) if slot])


def test_one_step_of_several_positions_has_the_bits_of_several_steps_of_one(target, poisoned_pool):
    tensors = operands((2, 4), HEADS[0], device=target.device)
    pool = poisoned_pool(9, state_shape(HEADS[0]), device=target.device)
    pool.fill([1, 5])
    start = pool.view.clone()
    write = target.int32([[1, 2, 3, 4], [5, 6, 7, 8]])
    o = update(target, *tensors, pool.view, target.int32([1, 5]), write)
    in_place = target.int32([1, 5])
    for i in range(4):
        one = [t[:, i : i + 1] if t.ndim > 1 else t for t in tensors]
        o_i = update(target, *one, start, in_place, in_place[:, None])
        assert torch.equal(o_i[:, 0], o[:, i])
        assert torch.equal(start[[1, 5]], pool.view[[1 + i, 5 + i]])


@pytest.mark.parametrize(
    "rounding", [NEAREST, StateRounding.stochastic(2, first_head=3)], ids=["nearest", "by_chance"]
)
@pytest.mark.parametrize("heads", [(2, 32, 4, 16), (1, 20, 3, 7)])
def test_a_bfloat16_state_is_rounded_behind_every_position_whatever_the_steps(
    target, heads, rounding, poisoned_pool
):
    tensors = operands((2, 4), heads, device=target.device)
    pool = poisoned_pool(12, state_shape(heads), torch.bfloat16, target.device)
    pool.fill([1, 5])
    wide = pool.view[[0, 1, 5]].float()
    pool.view[9], pool.view[10] = pool.view[1], pool.view[5]
    write, seq_lens = target.int32([[1, 2, 0, 4], [5, 6, 7, 8]]), target.int32([104, 17])
    o = update(target, *tensors, pool.view, target.int32([1, 5]), write, seq_lens=seq_lens, rounding=rounding)
    for i in range(4):
        one = [t[:, i : i + 1] if t.ndim > 1 else t for t in tensors]
        now, alone, in_place = seq_lens - 3 + i, target.int32([9, 10]), target.int32([1, 2])
        o_alone = update(target, *one, pool.view, alone, alone[:, None], seq_lens=now, rounding=rounding)
        assert torch.equal(o_alone[:, 0], o[:, i])
        o_wide = update(target, *one, wide, in_place, in_place[:, None])
        torch.testing.assert_close(o_wide[:, 0], o[:, i], rtol=1e-4, atol=1e-5)
        expected, found = round_bfloat16_reference(wide[1:], now, rounding), pool.view[[9, 10]]
        assert (found == expected).float().mean() > 0.99  # sums may be contracted otherwise
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
        wide[1:] = found.float()
        if i != 2:
            assert torch.equal(pool.view[[1 + i, 5 + i]], found)


def test_a_row_among_others_has_the_same_bits_as_alone(target, poisoned_pool):
    heads = (1, 128, 2, 30)
    tensors = operands((3, 2), heads, device=target.device)
    pool, alone = (poisoned_pool(7, state_shape(heads), device=target.device) for _ in range(2))
    for one in (pool, alone):
        one.fill([1, 3, 5])
    o = update(target, *tensors, pool.view, target.int32([1, 3, 5]), target.int32([[1, 2], [3, 4], [5, 6]]))
    middle = [t[1:2] if t.ndim > 1 else t for t in tensors]
    o_alone = update(target, *middle, alone.view, target.int32([3]), target.int32([[3, 4]]))
    assert torch.equal(o_alone[0], o[1])
    assert torch.equal(alone.view[[3, 4]], pool.view[[3, 4]])


def test_gates_open_and_shut_keep_their_digits(target, poisoned_pool):
    heads = (1, 32, 8, 4)
    q, k, v, _, _, A, dt_bias = operands((1, 1), heads, device=target.device)
    a = torch.tensor([-80.0, -30, -17, -10, -3, 19.9, 20.1, 300], device=target.device).view(1, 1, 8)
    b = torch.tensor([-200.0, -30, -5, 0, 5, 30, 90, 200], device=target.device).view(1, 1, 8)
    tensors = (q, k, v, a, b, A / 100, torch.zeros_like(dt_bias))
    pool = poisoned_pool(2, state_shape(heads), device=target.device)
    pool.fill([1])
    expected_state = pool.view.double()
    index = (target.int32([1]), target.int32([[1]]))
    o = update(target, *tensors, pool.view, *index)
    expected = gated_delta_update_reference(*double(tensors), expected_state, *index)
    torch.testing.assert_close(o.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(pool.view[1].double(), expected_state[1], rtol=2e-5, atol=2e-6)


def test_keys_and_queries_of_nothing_but_zeros_write_and_read_nothing(target, poisoned_pool):
    q, k, *rest = operands((1, 1), HEADS[0], device=target.device)
    pool = poisoned_pool(2, state_shape(HEADS[0]), device=target.device)
    pool.view[1] = 0
    tensors = (torch.zeros_like(q), torch.zeros_like(k), *rest)
    o = update(target, *tensors, pool.view, target.int32([1]), target.int32([[1]]))
    assert not o.any()
    assert not pool.view[1].any()


@pytest.mark.parametrize("source", ["state", "q", "k", "v", "a", "b"])
def test_nan_reaches_output_and_state(target, source, poisoned_pool):
    tensors = operands((1, 1), HEADS[0], device=target.device)
    pool = poisoned_pool(2, state_shape(HEADS[0]), device=target.device)
    if source != "state":
        pool.fill([1])
        tensors["qkvab".index(source)].fill_(float("nan"))
    o = update(target, *tensors, pool.view, target.int32([1]), target.int32([[1]]))
    assert o.isnan().all()
    assert pool.view[1].isnan().all() or source == "q"


def test_the_step_agrees_with_transformers(target, poisoned_pool):
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    tensors = operands((3, 2), HEADS[0])
    pool = poisoned_pool(7, state_shape(HEADS[0]), device=target.device)
    pool.fill([1, 3, 5])
    state = pool.view[[1, 3, 5]].cpu().transpose(2, 3)
    expected, expected_state = qwen3_next.torch_recurrent_gated_delta_rule(
        *transformers_operands(*tensors),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    on_device = [t.to(target.device) for t in tensors]
    write = target.int32([[1, 2], [3, 4], [5, 6]])
    o = update(target, *on_device, pool.view, target.int32([1, 3, 5]), write)
    torch.testing.assert_close(o.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool.view[[2, 4, 6]].cpu(), expected_state.mT, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_the_step_can_be_recorded_and_threads_do_not_change_it(monkeypatch, poisoned_pool):
    monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    tensors = operands((2, 2), HEADS[3])
    pool = poisoned_pool(5, state_shape(HEADS[3]))
    pool.fill([1, 3])
    start = pool.view.clone()
    read, write = torch.tensor([1, 3]).int(), torch.tensor([[1, 2], [3, 4]]).int()
    graph = CpuGraph()
    with graph.record():
        o = gated_delta_update(*tensors, pool.view, read, write)
    for t in tensors[:5]:
        t.copy_(torch.randn(t.shape))
    pool.view.copy_(start)
    graph.replay()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(o, gated_delta_update(*tensors, start, read, write))
    assert torch.equal(pool.view[1:], start[1:])
