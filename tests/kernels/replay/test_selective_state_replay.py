"""A replayed Mamba-2 state and its outputs have the bits that a slot for every position gives."""

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.replay import selective_state_flush as flush_module
from kernels.replay import selective_state_replay as replay_module
from kernels.replay.selective_state_flush import KeptSsmInputs, selective_state_flush
from kernels.replay.selective_state_replay import selective_state_replay
from kernels.ssm import selective_state_update as update_module
from kernels.ssm.selective_state_update import selective_state_update
from testing.kernels.speculated_history import NOBODY, History, assert_forms_agree, bits_of
from testing.kernels.target import Target

NO_LIMIT = (0.0, float("inf"))
BY_CHANCE = StateRounding.stochastic(2, first_head=3)
FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Forms:
    """The op in both forms. Its operands are cut from wide tensors, as in a model."""

    def __init__(self, target, pools, history, heads, dtype=FLOAT32, rounding=NEAREST, dt_limit=NO_LIMIT):
        self.is_triton, self.device, self.dtype = target.name == "triton", target.device, dtype
        self.heads, self.rounding, self.dt_limit = heads, rounding, dt_limit
        self.num_positions = history.num_positions
        self.slots, self.replayed = (pool.view for pool in pools)
        self.random = torch.Generator().manual_seed(1)
        wide = FLOAT64 if dtype == FLOAT64 else FLOAT32
        A, self.D, self.dt_bias = (self.normal(heads[0], dtype=wide) for _ in range(3))
        self.A = -torch.exp(A)
        size = history.num_kept_rows, history.num_positions
        self.kept = KeptSsmInputs.empty(*size, heads, dtype, self.device)
        for tensor in self.kept_tensors:
            tensor.fill_(float("nan"))

    @property
    def kept_tensors(self):
        return self.kept.x, self.kept.gates, self.kept.B

    def normal(self, *shape, dtype):
        return torch.randn(*shape, generator=self.random).to(dtype).to(self.device)

    def inputs(self, num_rows):
        num_heads, head_dim, num_groups, state_dim = self.heads
        shape, bc = (num_rows, self.num_positions), num_groups * state_dim
        sizes = [num_heads * head_dim, bc, bc]
        x, B, C = self.normal(*shape, sum(sizes), dtype=self.dtype).split(sizes, dim=-1)
        dt = self.normal(*shape, 3 * num_heads, dtype=self.dtype).chunk(3, dim=-1)[1]
        B, C = (t.view(*shape, num_groups, state_dim) for t in (B, C))
        return x.view(*shape, num_heads, head_dim), dt, self.A, B, C, self.D, self.dt_bias

    def update(self, inputs, rows):
        operands = *inputs, self.slots, rows.read_slots, rows.write_slots
        lengths = rows.pending.seq_lens
        if self.is_triton:
            return update_module._launch(*operands, self.dt_limit, lengths, self.rounding)
        return selective_state_update(
            *operands, dt_limit=self.dt_limit, seq_lens=lengths, rounding=self.rounding
        )

    def replay(self, inputs, rows):
        operands = *inputs, self.replayed, rows.replay_read, rows.replay_write, self.kept, rows.pending
        if self.is_triton:
            return replay_module._launch_replay(*operands, self.dt_limit, self.rounding)
        return selective_state_replay(*operands, dt_limit=self.dt_limit, rounding=self.rounding)

    def flush(self, rows):
        operands = self.replayed, rows.replay_read, rows.replay_write, self.kept, rows.pending
        if self.is_triton:
            flush_module._launch_flush(*operands, self.rounding)
        else:
            selective_state_flush(*operands, rounding=self.rounding)


HEADS = [  # heads, head dim, groups, state dim
    (4, 32, 2, 32),
    (3, 24, 3, 20),
    (2, 7, 1, 20),
    (2, 64, 1, 128),
]


def forms_of(make_pool, target, history, heads, state_dtype=FLOAT32, **options):
    shape = heads[0], heads[1], heads[3]
    pools = [make_pool(history.num_slots, shape, state_dtype, target.device) for _ in range(2)]
    pools[0].fill(history.slot)
    return Forms(target, pools, history, heads, **options)


@pytest.mark.parametrize(
    ("heads", "num_positions", "dtype", "state_dtype", "rounding"),
    [
        (HEADS[2], 2, BFLOAT16, BFLOAT16, BY_CHANCE),
        *(
            pytest.param(*one, marks=pytest.mark.exhaustive)
            for one in [
                (HEADS[0], 1, FLOAT32, FLOAT32, NEAREST),
                (HEADS[0], 3, FLOAT32, FLOAT32, NEAREST),
                (HEADS[1], 4, BFLOAT16, BFLOAT16, BY_CHANCE),
                (HEADS[1], 2, FLOAT32, BFLOAT16, NEAREST),
                (HEADS[2], 6, FLOAT16, FLOAT32, NEAREST),
                (HEADS[2], 3, FLOAT32, BFLOAT16, BY_CHANCE),
                (HEADS[3], 4, BFLOAT16, FLOAT32, NEAREST),
                (HEADS[3], 2, BFLOAT16, BFLOAT16, BY_CHANCE),
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


@pytest.mark.parametrize("state_dtype", [FLOAT64, FLOAT32, BFLOAT16])
def test_references_agree_in_float64(state_dtype, poisoned_pool):
    history = History(3, 3, "cpu")
    options = {"dtype": FLOAT64, "rounding": BY_CHANCE, "dt_limit": (0.3, 0.9)}
    forms = forms_of(poisoned_pool, Target("cpu", "cpu"), history, HEADS[1], state_dtype, **options)
    assert_forms_agree(forms, history, 12)


def test_replays_agree_with_the_reference(target, poisoned_pool):
    history = History(3, 3, target.device)
    forms = forms_of(poisoned_pool, target, history, HEADS[1])
    exact = forms_of(poisoned_pool, Target("cpu", target.device), history, HEADS[1], FLOAT64, dtype=FLOAT64)
    for q in range(3):
        state = forms.slots[history.slot[q]]
        forms.replayed[history.replay_slot[q]], exact.replayed[history.replay_slot[q]] = state, state.double()
    for _ in range(4):
        rows = history.step()
        inputs = forms.inputs(len(rows.sequences))
        y = forms.replay(inputs, rows)
        expected = exact.replay([t.double() for t in inputs], rows)
        torch.testing.assert_close(y.double(), expected, rtol=2e-5, atol=2e-5)
        history.accept(rows)
    rows = history.flush(everybody=True)
    forms.flush(rows)
    exact.flush(rows)
    slots = history.replay_slot
    torch.testing.assert_close(forms.replayed[slots].double(), exact.replayed[slots], rtol=2e-5, atol=2e-5)


def test_a_rejected_input_leaves_no_trace(target, poisoned_pool):
    """A NaN at a rejected position reaches neither the state nor later outputs."""
    history = History(2, 3, target.device, in_place=True)
    forms = forms_of(poisoned_pool, target, history, HEADS[2])
    assert_forms_agree(forms, history, 1)
    rows = history.rows([0, 1], 3)
    inputs = forms.inputs(2)
    for tensor in (inputs[0], inputs[1], inputs[3], inputs[4]):
        tensor[:, 1:] = float("nan")
    assert forms.replay(inputs, rows)[:, 0].isfinite().all()
    history.pending[:], history.lengths[:] = [1, 1], [length + 1 for length in history.lengths]
    assert forms.replay(forms.inputs(2), history.rows([0, 1], 3)).isfinite().all()
    assert forms.replayed[history.replay_slot].isfinite().all()


@torch.inference_mode()
def test_replays_can_be_recorded_and_threads_do_not_change_them(monkeypatch, poisoned_pool):
    for module in (replay_module, flush_module):
        monkeypatch.setattr(module, "_GRAIN_ELEMENTS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    history = History(3, 2, "cpu", in_place=True)
    forms = forms_of(poisoned_pool, Target("cpu", "cpu"), history, HEADS[1])
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


def test_a_flush_of_nothing_changes_nothing(target, poisoned_pool):
    history = History(2, 2, target.device)
    forms = forms_of(poisoned_pool, target, history, HEADS[0])
    before = bits_of(forms.replayed).clone()
    forms.flush(history.rows([0, 1, NOBODY], 0))
    assert torch.equal(bits_of(forms.replayed), before)
