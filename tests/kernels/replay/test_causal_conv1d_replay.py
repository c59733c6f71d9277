"""Replayed states of the convolution, and its outputs, have the bits of a slot for every position."""

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.replay import causal_conv1d_replay as replay_module
from kernels.replay.causal_conv1d_replay import causal_conv1d_flush, causal_conv1d_replay
from kernels.ssm import causal_conv1d as update_module
from kernels.ssm.causal_conv1d import causal_conv1d_update
from testing.kernels.speculated_history import NOBODY, History, assert_forms_agree, bits_of
from testing.kernels.target import Target

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Forms:
    """The op in both forms. x is cut from a wider tensor, as in a model. Some inputs are -0."""

    def __init__(self, target, pools, history, num_taps, dtype=FLOAT32, with_bias=True):
        self.is_triton, self.device, self.dtype = target.name == "triton", target.device, dtype
        self.num_positions = history.num_positions
        self.slots, self.replayed = (pool.view for pool in pools)
        self.num_channels = self.slots.shape[1]
        self.random = torch.Generator().manual_seed(1)
        self.weight = self.normal(self.num_channels, num_taps)
        self.bias = self.normal(self.num_channels) if with_bias else None
        # As the pool on a GPU. The CPU path keeps float32, rounded like the pool.
        kept_dtype = FLOAT32 if target.name == "cpu" and dtype != FLOAT64 else self.slots.dtype
        shape = history.num_kept_rows, 2 * history.num_positions, self.num_channels
        self.kept = torch.full(shape, float("nan"), dtype=kept_dtype, device=self.device)
        if dtype == FLOAT64:
            self.kept = self.kept.double()

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype).to(self.device)

    def inputs(self, num_rows):
        wide = self.normal(num_rows, self.num_positions, self.num_channels + 5)
        wide[wide.abs() < 0.1] = -0.0
        return wide[..., 5:], self.weight, self.bias

    def update(self, inputs, rows):
        run = update_module._launch_decode if self.is_triton else causal_conv1d_update
        return run(*inputs, self.slots, rows.read_slots, rows.write_slots)

    def replay(self, inputs, rows):
        run = replay_module._launch_replay if self.is_triton else causal_conv1d_replay
        return run(*inputs, self.replayed, rows.replay_read, rows.replay_write, self.kept, rows.pending)

    def flush(self, rows):
        run = replay_module._launch_flush if self.is_triton else causal_conv1d_flush
        run(self.replayed, rows.replay_read, rows.replay_write, self.kept, rows.pending)


def forms_of(make_pool, target, history, num_channels, num_taps, state_dtype=FLOAT32, **options):
    pools = [
        make_pool(history.num_slots, (num_channels, num_taps - 1), state_dtype, target.device)
        for _ in range(2)
    ]
    pools[0].fill(history.slot)
    return Forms(target, pools, history, num_taps, **options)


@pytest.mark.parametrize(
    ("num_channels", "num_taps", "num_positions", "dtype", "state_dtype", "with_bias"),
    [
        (136, 4, 3, FLOAT32, FLOAT32, True),
        (50, 2, 4, FLOAT32, FLOAT32, False),
        (24, 4, 1, FLOAT32, FLOAT32, True),
        (17, 3, 3, FLOAT32, BFLOAT16, True),
        (72, 4, 2, BFLOAT16, BFLOAT16, True),
        (24, 4, 6, FLOAT16, FLOAT32, False),
    ],
)
def test_replays_have_the_bits_of_slots(
    target, num_channels, num_taps, num_positions, dtype, state_dtype, with_bias, poisoned_pool
):
    for seed in range(2 if target.name == "cpu" else 1):
        num_sequences, num_steps = (4, 24) if target.name == "cpu" else (2, 5)
        history = History(num_sequences, num_positions, target.device, seed=seed, in_place=seed == 1)
        forms = forms_of(
            poisoned_pool, target, history, num_channels, num_taps, state_dtype, dtype=dtype,
            with_bias=with_bias,
        )  # fmt: skip
        assert_forms_agree(forms, history, num_steps)


@pytest.mark.parametrize("state_dtype", [FLOAT64, FLOAT32, BFLOAT16])
def test_references_agree_in_float64(state_dtype, poisoned_pool):
    history = History(3, 3, "cpu")
    forms = forms_of(poisoned_pool, Target("cpu", "cpu"), history, 20, 4, state_dtype, dtype=FLOAT64)
    assert_forms_agree(forms, history, 12)


def test_replays_agree_with_the_reference(target, poisoned_pool):
    history = History(3, 3, target.device)
    forms = forms_of(poisoned_pool, target, history, 24, 4)
    exact = forms_of(poisoned_pool, Target("cpu", target.device), history, 24, 4, FLOAT64, dtype=FLOAT64)
    for q in range(3):
        state = forms.slots[history.slot[q]]
        forms.replayed[history.replay_slot[q]], exact.replayed[history.replay_slot[q]] = state, state.double()
    for _ in range(4):
        rows = history.step()
        inputs = forms.inputs(len(rows.sequences))
        expected = exact.replay([t.double() for t in inputs], rows)
        torch.testing.assert_close(forms.replay(inputs, rows).double(), expected, rtol=2e-5, atol=2e-5)
        history.accept(rows)
    rows = history.flush(everybody=True)
    forms.flush(rows)
    exact.flush(rows)
    slots = history.replay_slot
    torch.testing.assert_close(forms.replayed[slots].double(), exact.replayed[slots], rtol=0, atol=0)


@torch.inference_mode()
def test_replays_can_be_recorded(poisoned_pool):
    history = History(3, 2, "cpu", in_place=True)
    forms = forms_of(poisoned_pool, Target("cpu", "cpu"), history, 24, 4)
    assert_forms_agree(forms, history, 3)
    rows, inputs, graph = history.rows([2, NOBODY, 0, 1], 2), forms.inputs(4), CpuGraph()
    start, kept = forms.replayed.clone(), forms.kept.clone()
    with graph.record():
        y = forms.replay(inputs, rows)
    for counts in ([1, 0, 2, 0], [2, 1, 1, 1]):
        rows.pending.counts.copy_(torch.tensor(counts))
        found = []
        for run in (graph.replay, lambda: y.copy_(forms.replay(inputs, rows))):
            forms.replayed.copy_(start)
            forms.kept.copy_(kept)
            run()
            found.append([bits_of(t).clone() for t in (y, forms.replayed, forms.kept)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
