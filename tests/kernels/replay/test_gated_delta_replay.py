"""A replayed delta state and its outputs have the bits that a slot for every position gives."""

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.gated_delta import gated_delta_update as update_module
from kernels.gated_delta.gated_delta_update import gated_delta_update
from kernels.replay import gated_delta_flush as flush_module
from kernels.replay import gated_delta_replay as replay_module
from kernels.replay.gated_delta_flush import KeptDeltaInputs, gated_delta_flush
from kernels.replay.gated_delta_replay import gated_delta_replay
from testing.kernels.delta_operands import HEADS, operands, state_shape
from testing.kernels.speculated_history import NOBODY, History, assert_forms_agree, bits_of
from testing.kernels.target import Target

BY_CHANCE = StateRounding.stochastic(2, first_head=3)
FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Forms:
    """The op in both forms."""

    def __init__(self, target, pools, history, heads, dtype=FLOAT32, rounding=NEAREST):
        self.is_triton, self.device, self.dtype = target.name == "triton", target.device, dtype
        self.heads, self.rounding, self.num_positions = heads, rounding, history.num_positions
        self.slots, self.replayed = (pool.view for pool in pools)
        self.number = 0
        self.kept = KeptDeltaInputs.empty(
            history.num_kept_rows, history.num_positions, heads, dtype, self.device
        )
        for tensor in self.kept_tensors:
            tensor.fill_(float("nan"))
        self.weights = operands((1, 1), heads, device=self.device)[5:]
        if dtype == FLOAT64:
            self.weights = [t.double() for t in self.weights]

    @property
    def kept_tensors(self):
        return self.kept.k, self.kept.v, self.kept.gates

    def inputs(self, num_rows):
        self.number += 1
        shape = (num_rows + self.number, self.num_positions)  # the shape is the seed
        q, k, v, a, b, *_ = operands(shape, self.heads, self.dtype, self.device)
        return *(t[self.number :] for t in (q, k, v, a, b)), *self.weights

    def update(self, inputs, rows):
        operands, lengths = (*inputs, self.slots, rows.read_slots, rows.write_slots), rows.pending.seq_lens
        if self.is_triton:
            return update_module._launch(*operands, lengths, self.rounding)
        return gated_delta_update(*operands, seq_lens=lengths, rounding=self.rounding)

    def replay(self, inputs, rows):
        operands = *inputs, self.replayed, rows.replay_read, rows.replay_write, self.kept, rows.pending
        if self.is_triton:
            return replay_module._launch_replay(*operands, self.rounding)
        return gated_delta_replay(*operands, rounding=self.rounding)

    def flush(self, rows):
        operands = self.replayed, rows.replay_read, rows.replay_write, self.kept, rows.pending
        if self.is_triton:
            flush_module._launch_flush(*operands, self.rounding)
        else:
            gated_delta_flush(*operands, rounding=self.rounding)


def forms_of(make_pool, target, history, heads, state_dtype=FLOAT32, **options):
    pools = [make_pool(history.num_slots, state_shape(heads), state_dtype, target.device) for _ in range(2)]
    pools[0].fill(history.slot)
    return Forms(target, pools, history, heads, **options)


@pytest.mark.parametrize(
    ("heads", "num_positions", "dtype", "state_dtype", "rounding"),
    [
        (HEADS[4], 2, BFLOAT16, BFLOAT16, BY_CHANCE),
        *(
            pytest.param(*one, marks=pytest.mark.exhaustive)
            for one in [
                (HEADS[0], 1, FLOAT32, FLOAT32, NEAREST),
                (HEADS[0], 3, FLOAT32, FLOAT32, NEAREST),
                (HEADS[4], 4, BFLOAT16, BFLOAT16, BY_CHANCE),
                (HEADS[1], 2, FLOAT32, BFLOAT16, NEAREST),
                (HEADS[3], 6, FLOAT16, FLOAT32, NEAREST),
                (HEADS[2], 4, BFLOAT16, FLOAT32, NEAREST),
                (HEADS[2], 2, BFLOAT16, BFLOAT16, BY_CHANCE),
            ]
        ),
    ],
)
def test_replays_have_the_bits_of_slots(
    target, heads, num_positions, dtype, state_dtype, rounding, poisoned_pool
):
    for seed in range(2 if target.name == "cpu" else 1):
        num_sequences, num_steps = (4, 24) if target.name == "cpu" else (2, 5)
        history = History(num_sequences, num_positions, target.device, seed=seed, in_place=seed == 1)
        forms = forms_of(poisoned_pool, target, history, heads, state_dtype, dtype=dtype, rounding=rounding)
        assert_forms_agree(forms, history, num_steps)


@pytest.mark.parametrize("state_dtype", [FLOAT64, FLOAT32])
def test_references_agree_in_float64(state_dtype, poisoned_pool):
    history = History(3, 3, "cpu")
    forms = forms_of(poisoned_pool, Target("cpu", "cpu"), history, HEADS[4], state_dtype, dtype=FLOAT64)
    # torch rounds a tensor's last elements in another way than its others.
    assert_forms_agree(forms, history, 12, is_exact=False)


def test_replays_agree_with_the_reference(target, poisoned_pool):
    history = History(3, 3, target.device)
    forms = forms_of(poisoned_pool, target, history, HEADS[4])
    exact = forms_of(poisoned_pool, Target("cpu", target.device), history, HEADS[4], FLOAT64, dtype=FLOAT64)
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
    torch.testing.assert_close(forms.replayed[slots].double(), exact.replayed[slots], rtol=2e-5, atol=2e-5)


@torch.inference_mode()
def test_replays_can_be_recorded_and_threads_do_not_change_them(monkeypatch, poisoned_pool):
    for module in (replay_module, flush_module):
        monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    history = History(3, 2, "cpu", in_place=True)
    forms = forms_of(poisoned_pool, Target("cpu", "cpu"), history, HEADS[3])
    assert_forms_agree(forms, history, 3)
    rows, inputs, graph = history.rows([2, NOBODY, 0, 1], 2), forms.inputs(4), CpuGraph()
    start, kept = forms.replayed.clone(), [t.clone() for t in forms.kept_tensors]
    with graph.record():
        y = forms.replay(inputs, rows)
    for counts in ([1, 0, 2, 0], [2, 1, 1, 1]):
        rows.pending.counts.copy_(torch.tensor(counts))
        found = []
        for threads, run in ((3, graph.replay), (1, lambda: y.copy_(forms.replay(inputs, rows)))):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            forms.replayed.copy_(start)
            for tensor, content in zip(forms.kept_tensors, kept, strict=True):
                tensor.copy_(content)
            run()
            found.append([bits_of(t).clone() for t in (y, forms.replayed, *forms.kept_tensors)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
