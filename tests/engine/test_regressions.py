"""Known bugs of serving systems, one test each. Each test says how to see it fail without its guard."""

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.memory.caches import Caches, CacheSpec
from engine.models import read_config
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.sampling.sampling_table import SamplingNeeds
from engine.schedule.capacity import Demand, blocks_for
from engine.step.batch_builder import BatchBuilder
from engine.step.buffers import StepBuffers, capture_sizes
from engine.step.row_progress import RowState
from engine.step.row_table import RowTable
from testing.engines.handing_over import greedy, hand_over, make_engine, prompts, run
from wire.errors import CapacityError
from wire.messages.sampling_params import SamplingParams

CPU = torch.device("cpu")
ROW_TABLES = ("tokens", "num_drafts", "num_computed", "state_slot", "active", "limit", "max_drafts")


def spec(**sizes):
    fields = {
        "attn_layers": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "kv_dtype": torch.float32,
        "mamba_layers": 1,
        "conv_channels": 8,
        "conv_width": 4,
        "mamba_heads": 2,
        "mamba_head_dim": 4,
        "state_size": 4,
        "conv_dtype": torch.float32,
        "ssm_dtype": torch.float32,
    }
    return CacheSpec(**(fields | sizes))


@pytest.mark.parametrize("same", [1, 2, 4, 16])
def test_vllm_41056_a_pool_of_two_blocks_or_of_equal_axes_keeps_keys_and_values_apart(same):
    """Fails if an axis is found by its size: e.g. the K/V axis as the first of size 2."""
    sizes = {"attn_layers": same, "kv_heads": same, "head_dim": same}
    for num_blocks in (2, same):
        caches = Caches(spec(**sizes), num_blocks=num_blocks, num_slots=2, block_size=same, device="cpu")
        for layer in range(same):
            caches.layers.k[layer].fill_(2 * layer)
            caches.layers.v[layer].fill_(2 * layer + 1)
        for layer in range(same):
            assert (caches.layers.k[layer] == 2 * layer).all()
            assert (caches.layers.v[layer] == 2 * layer + 1).all()
        names = [axis.name for axis in caches.kv_layout.segments[0].axes]
        assert names == ["kv_heads", "attn_layers", "key_or_value", "block_size", "head_dim"]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_vllm_37728_a_dummy_step_after_a_busy_one_touches_nothing_but_null_entries(
    bundled_model, num_rows, k
):
    """Fails if ``StepBuffers._clear`` does not name the null row: the dummy step then runs the last rows."""
    engine = make_engine(bundled_model, "both", num_speculative=k)
    for i, prompt in enumerate(prompts(8)):
        engine.add(greedy(str(i), prompt))
    while any(r.num_output == 0 for r in engine.scheduler.running.values()) or engine.scheduler.waiting:
        engine.step()
    assert len(engine.scheduler.running) == 8
    tables = {name: getattr(engine._runner.state, name) for name in ROW_TABLES}
    before = {name: table.clone() for name, table in tables.items()}
    kv, state = engine.caches.kv.clone(), engine.caches.state.clone()
    engine.dummy_step(engine._runner.decode_shape(num_rows))
    assert torch.equal(engine.caches.kv[1:], kv[1:])
    assert torch.equal(engine.caches.state[1:], state[1:])
    for name, table in tables.items():
        assert torch.equal(table[:-1], before[name][:-1]), name
    assert not tables["active"][-1], "the null row"


@pytest.mark.parametrize("k", [0, 3])
def test_vllm_37728_a_dummy_step_does_not_change_what_busy_requests_answer(bundled_model, k):
    """Fails as the one before; answers were token id 0 when the idle rank's rows were stale."""
    engine = make_engine(bundled_model, "both", num_speculative=k)
    expected = run(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts(6))])
    tokens = {str(i): [] for i in range(6)}
    for i, prompt in enumerate(prompts(6)):
        engine.add(greedy(str(i), prompt))
    while not (result := engine.step()).did_nothing:
        engine.dummy_step(engine._runner.decode_shape(8))
        for output in result.outputs:
            tokens[output.request_id] += output.token_ids
    assert tokens == expected


class Padded:
    """Step buffers of up to 48 decode rows, and ``num_rows`` requests with four tokens computed."""

    def __init__(self, num_rows, *, num_positions=1):
        self.rows = RowTable(48, 6, num_positions)
        self.state = RowState(48, num_positions, CPU)
        self.buffers = StepBuffers(self.rows, self.state, block_size=4, device=CPU)
        self.planned = []
        for i in range(num_rows):
            request = Request(f"r{i}", [7, 8, 9, 10, 11], SamplingParams(max_tokens=4))
            request.row, request.num_computed, request.num_planned = i, 4, 4
            request.memory.block_ids = [2 * i + 1, 2 * i + 2]
            request.memory.slots = [1 + i * num_positions + at for at in range(num_positions)]
            self.rows.fill(request)
            self.state.fill(request)
            self.planned.append(PlannedRow(request, 4, 1))

    def load(self, num_rows):
        """The batch of the first so many requests, padded."""
        size = self.buffers.captured(num_rows)
        self.buffers.load(self.planned[:num_rows], size)
        return self.buffers.prepare(size, max_seq_len=24)


def test_vllm_49757_a_row_that_was_left_is_null_on_host_and_device():
    """Fails if ``RowTable.clear`` or ``StepBuffers._clear`` leaves the block table as it was."""
    padded = Padded(8)
    padded.load(8)
    for tables in (padded.rows, padded.state):
        tables.clear(7)
    batch = padded.load(5)
    assert batch.decode.num_rows == 8
    for tensor in (batch.decode.block_table, batch.decode.read_slots, batch.decode.write_slots):
        assert (tensor[5:] == 0).all()
    assert (batch.decode.seq_lens[5:] == 0).all()
    assert (batch.slot_mapping[5:] == 0).all()
    assert (padded.rows.block_table[7] == 0).all()
    assert (padded.rows.slots[7] == 0).all()
    assert padded.state.state_slot[7] == 0


@pytest.mark.parametrize("num_positions", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 9, 17, 33, 48])
def test_vllm_39809_buffers_are_padded_by_requests_and_not_by_tokens(num_rows, num_positions):
    """Fails if a buffer is sized, cut or picked by ``R * T`` where it needs ``R``, or the other way round."""
    padded = Padded(num_rows, num_positions=num_positions)
    batch = padded.load(num_rows)
    size = batch.decode.num_rows
    assert size == next(s for s in capture_sizes(48) if s >= num_rows)
    assert len(batch.input_ids) == len(batch.positions) == len(batch.slot_mapping) == size * num_positions
    assert batch.decode.write_slots.shape == (size, num_positions)
    assert batch.decode.block_table.shape == (size, 6)
    assert len(batch.decode.seq_lens) == len(batch.decode.read_slots) == size
    own = [slot for row in padded.planned for slot in row.request.memory.slots]
    assert batch.decode.write_slots.flatten().tolist() == own + [0] * (size - num_rows) * num_positions
    positions = list(range(4, 4 + num_positions)) * num_rows
    assert batch.positions.tolist() == positions + [0] * (size - num_rows) * num_positions


def test_vllm_39809_indices_to_read_and_to_write_share_no_memory():
    """Fails if one tensor serves as both, e.g. ``StepBuffers.write_slots`` as the row table's ``slots``.

    A step then reads indices that it has just written. Preparing twice must give the same as once.
    """
    padded = Padded(5, num_positions=4)
    batch = padded.load(5)
    state, buffers, decode = padded.state, padded.buffers, batch.decode
    read = [getattr(state, name) for name in ROW_TABLES]
    staged = (buffers.rows, buffers.slots, buffers.block_table, buffers.boundary_len, buffers.boundary_slot)
    read += [buffer.device for buffer in staged]
    written = {name: getattr(batch, name) for name in ("input_ids", "positions", "slot_mapping")}
    written |= {name: getattr(decode, name) for name in ("seq_lens", "read_slots", "write_slots")}
    places = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in (*read, *written.values()))
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    once = {name: tensor.clone() for name, tensor in written.items()}
    padded.buffers.prepare(8, max_seq_len=24)
    for name, tensor in written.items():
        assert torch.equal(tensor, once[name]), name


def recorded(engine):
    """A list that fills with copies of the steps to come, each with its rows' own slots, ``[M, T]``."""
    program, steps = engine._runner._program, []
    compute = program.run
    engine._runner._recorded = None  # a whole recorded step shows nothing

    def run_and_record(step, prompts=None):
        launched, own = deepcopy(step), engine._runner._rows.slots[step.rows.numpy()]
        tensors = compute(step, prompts)
        steps.append((replace(launched, accepted=step.accepted.clone()), own))
        return tensors

    program.run = run_and_record
    return steps


def repeating(count, *, length):
    """Prompts that say the same thing again and again, so that look-up drafts what comes true."""
    return [(prompt * length)[:length] for prompt in prompts(count, low=5, high=9)]


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_vllm_39809_tables_are_wide_enough_for_the_drafts_at_the_very_end_of_the_context(
    bundled_model, drafter
):
    """Fails if the block table ends at ``max_model_len`` (``blocks_per_seq`` columns), or if slots or block
    table have a column a request instead of one a position.
    """
    prompt, sizes = repeating(1, length=50)[0], {"max_model_len": 64, "block_size": 4}
    plain = make_engine(bundled_model, "both", **sizes)
    expected = run(plain, [greedy("r", prompt, max_tokens=14)])["r"]
    engine = make_engine(bundled_model, "both", num_speculative=5, drafter=drafter, **sizes)
    assert engine._runner._rows.block_table.shape[1] == 18
    assert engine._runner._rows.slots.shape[1] == 6
    steps = recorded(engine)
    request = greedy("r", prompt, max_tokens=14)
    assert run(engine, [request])["r"] == expected
    assert len(request.tokens) == 64
    for step, _ in steps[1:]:
        decode = step.batch.decode
        assert blocks_for(int(decode.seq_lens.max()), 4) <= decode.block_table.shape[1]
        assert len(set(step.write_slots[0].tolist())) == 6, "a state for each position"


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_vllm_39809_a_step_reads_the_slot_that_the_step_before_wrote_at_its_accepted_position(
    bundled_model, drafter
):
    """Fails if ``read_slots`` is looked up in this step's slots at the accepted index.

    That is wrong wherever a slot to keep stood in for one of them (mode ``all``), or a row's slots changed.
    """
    settings = {"num_speculative": 3, "drafter": drafter, "block_size": 4, "state_block_size": 4}
    engine = make_engine(bundled_model, "both", sanitize=False, **settings)
    steps = recorded(engine)
    run(engine, [greedy(str(i), prompt) for i, prompt in enumerate(repeating(8, length=30))])
    newest, counts, num_kept = {}, set(), 0
    for step, own in steps:
        parts = [part for part in (step.batch.decode, step.batch.prefill) if part is not None]
        reads = torch.cat([part.read_slots for part in parts])
        for i, row in enumerate(step.rows.tolist()):
            if not step.accepted[i]:
                continue
            if row in newest:
                assert reads[i] == newest[row]
            newest[row] = int(step.write_slots[i, step.accepted[i] - 1])
            if i < step.num_decode:
                counts.add(int(step.accepted[i]))
                num_kept += newest[row] not in own[i]
    assert len(counts) > 2
    assert num_kept > 8, "states to keep were read"


def test_graph_buffers_stay_where_they_are():
    """Fails if a step makes new tensors: a replayed graph would read the old ones."""
    padded = Padded(8)
    first, second = padded.load(8), padded.load(7)
    for name in ("seq_lens", "block_table", "read_slots", "write_slots"):
        assert getattr(first.decode, name).data_ptr() == getattr(second.decode, name).data_ptr()
    assert first.input_ids.data_ptr() == second.input_ids.data_ptr()


def test_vllm_38270_blocks_and_state_slots_of_a_row_are_refreshed_together():
    """Fails if the second group's indices (state slots) are taken from an earlier step than the blocks."""
    rows, state = RowTable(2, 4, 1), RowState(2, 1, CPU)
    request = Request("r", list(range(9)), SamplingParams(max_tokens=4))
    request.row, request.memory.block_ids, request.memory.slots, request.num_computed = 0, [1, 2], [1], 7
    rows.fill(request)
    state.fill(request)
    buffers = StepBuffers(rows, state, block_size=4, device=CPU)
    builder = BatchBuilder(rows, buffers, block_size=4, device=CPU)

    def build(num_before):
        buffers.load([PlannedRow(request, num_before, 1)], 1)
        return builder.decode_step(1, SamplingNeeds(), max_seq_len=16, samples=True).batch

    build(7)
    request.memory.block_ids.append(3)
    rows.extend(request)
    state.num_computed[0] = 8
    state.state_slot[0] = 2  # as when the state at a block boundary went to the prefix cache
    batch = build(8)
    assert batch.decode.block_table[0, :3].tolist() == [1, 2, 3]
    assert batch.slot_mapping[0] == 3 * 4
    assert batch.decode.read_slots.tolist() == [2]
    assert batch.decode.write_slots.tolist() == [[1]]


def test_sglang_25116_too_many_sequences_for_the_budget_are_refused_and_not_capped():
    """Fails if the planner lowers ``max_num_seqs`` to what fits."""
    one = spec()
    budget = 20 * one.slot_bytes + 40 * one.block_bytes(16)
    sizes = {"role": "both", "max_model_len": 64, "block_size": 16}
    assert Demand(one, max_num_seqs=8, **sizes).within(budget).num_slots == 9
    with pytest.raises(CapacityError, match=r"1001 state slots .* 1000 sequences"):
        Demand(one, max_num_seqs=1000, **sizes).within(budget)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_sglang_25116_as_many_requests_as_promised_run_at_once_with_their_drafts(bundled_model, mode):
    """Fails if slots are counted without drafts: fewer requests then run than ``max_num_seqs`` says."""
    settings = {"num_speculative": 3, "max_model_len": 64, "cache_mode": mode, "cached_states": 0}
    settings |= {"max_num_seqs": 8, "max_batch_tokens": 64}
    if mode == "none":
        del settings["cached_states"]
    config = EngineConfig(bundled_model, "both", device="cpu", **settings)
    least = config.demand(read_config(bundled_model, "auto", CPU)).min_bytes
    engine = make_engine(bundled_model, "both", cache_memory_bytes=least, **settings)
    steps = recorded(engine)
    run(engine, [greedy(str(i), prompt, max_tokens=8) for i, prompt in enumerate(prompts(8, high=14))])
    assert max(step.num_decode for step, _ in steps) == 8
    written = next(step.batch.decode.write_slots for step, _ in steps if step.num_decode == 8)
    assert len(set(written.flatten().tolist()) - {0}) == 8 * 4, "each position of each row has a slot"


@pytest.mark.parametrize(("budget", "k"), [(4, 0), (7, 0), (16, 0), (4, 3), (7, 3)])
def test_vllm_42430_a_one_token_last_chunk_is_a_decode_row_and_exact(bundled_model, budget, k):
    """Fails if ``is_decode_row`` denies it: the row then takes the prefill path under a decode graph."""
    prompt = prompts(1, low=2 * budget + 1, high=2 * budget + 1)[0]
    expected = run(make_engine(bundled_model, "both", max_batch_tokens=2048), [greedy("r", prompt)])["r"]
    settings = {"max_batch_tokens": budget, "max_num_seqs": 4 if k == 0 else 1, "cache_mode": "none"}
    engine = make_engine(bundled_model, "both", num_speculative=k, **settings)
    steps = recorded(engine)
    assert run(engine, [greedy("r", prompt)])["r"] == expected
    kinds = [(s.batch.decode is not None, s.batch.prefill is not None) for s, _ in steps[:3]]
    assert kinds == [(False, True), (False, True), (True, False)]


def test_vllm_42430_the_recomputed_last_token_of_a_prompt_is_a_decode_row_whose_dummies_are_rejected(
    bundled_model,
):
    """Fails if ``RowState.fill`` counts dummies as drafts: here they say just what the target will choose."""
    source = make_engine(bundled_model, "prefill", num_speculative=3)
    sink = make_engine(bundled_model, "decode", num_speculative=3)
    prompt = prompts(1)[0]
    expected = run(make_engine(bundled_model, "both"), [greedy("r", prompt)])["r"]
    request = hand_over(source, sink, prompt)
    sink._runner.state.tokens[request.row, 1:] = torch.tensor(expected[:3])
    steps = recorded(sink)
    (output,) = sink.step().outputs
    step, _ = steps[0]
    assert step.batch.prefill is None
    assert step.batch.positions.tolist() == [len(prompt) - 1 + i for i in range(4)]
    assert (step.accepted.tolist(), output.token_ids) == ([1], (expected[0],))
    assert (request.measured.num_drafted, request.measured.num_accepted) == (0, 0)
    assert sink._runner.state.state_slot[request.row] == step.write_slots[0, 0]
    run(sink)
    assert request.tokens[request.num_prompt :] == expected


@pytest.mark.parametrize("k", [0, 3])
def test_vllm_42430_the_first_token_of_a_prompt_is_never_a_decode_row(bundled_model, k):
    """Fails if every one-token row counts as a decode row: it then starts from what its slot held."""
    engine = make_engine(bundled_model, "both", num_speculative=k)
    expected = run(engine, [greedy("clean", [17])])["clean"]
    for view in (*engine.caches.layers.ssm, *engine.caches.layers.conv):
        view[1:] = 3.0
    steps = recorded(engine)
    assert run(engine, [greedy("dirty", [17])])["dirty"] == expected
    first = steps[0][0].batch
    assert first.decode is None
    assert first.prefill.has_initial.tolist() == [False]


@pytest.mark.parametrize("k", [0, 3])
def test_padding_rows_come_out_finite_whatever_the_null_entries_hold(bundled_model, k):
    """Fails if a kernel reads a null slot or block: NaN then spreads from padding rows."""
    engine = make_engine(bundled_model, "both", num_speculative=k)
    engine.caches.kv[0] = float("nan")
    for view in (*engine.caches.layers.ssm, *engine.caches.layers.conv):
        view[0] = float("nan")
    buffers = engine._runner._buffers
    buffers.load([], 8)
    with torch.inference_mode():
        hidden = engine.model.forward(buffers.prepare(8, max_seq_len=1 + k), engine.caches.layers)
    assert np.isfinite(hidden.numpy()).all()
