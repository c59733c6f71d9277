"""Public failures of this field, one test each. Each says how to see it fail without its guard."""

import numpy as np
import pytest
import torch

from engine.batch_builder import BatchBuilder
from engine.caches import Caches, CacheSpec
from engine.capacity import Demand
from engine.request import Request
from engine.row_table import RowTable
from engine.rows import PlannedRow
from engine.scheduler import StepPlan
from engine.step_buffers import StepBuffers, capture_sizes
from tests.engine.test_engine import greedy, make_engine, prompts, run
from wire.errors import CapacityError
from wire.sampling_params import SamplingParams


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


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_vllm_37728_a_dummy_step_after_a_busy_one_touches_nothing_but_null_entries(bundled_model, num_rows):
    """Fails if ``StepBuffers.padding`` does not clear: the dummy step then runs the last step's rows."""
    engine = make_engine(bundled_model, "both")
    for i, prompt in enumerate(prompts(8)):
        engine.add(greedy(str(i), prompt))
    for _ in range(12):
        engine.step()
    assert len(engine.scheduler.running) == 8
    kv, state = engine.caches.kv.clone(), engine.caches.state.clone()
    engine.dummy_step(num_rows)
    assert torch.equal(engine.caches.kv[1:], kv[1:])
    assert torch.equal(engine.caches.state[1:], state[1:])


def test_vllm_37728_a_dummy_step_does_not_change_what_busy_requests_answer(bundled_model):
    """Fails as the one before; answers were token id 0 when the idle rank's rows were stale."""
    engine = make_engine(bundled_model, "both")
    expected = run(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts(6))])
    tokens = {str(i): [] for i in range(6)}
    for i, prompt in enumerate(prompts(6)):
        engine.add(greedy(str(i), prompt))
    while not (result := engine.step()).did_nothing:
        engine.dummy_step(8)
        for output in result.outputs:
            tokens[output.request_id] += output.token_ids
    assert tokens == expected


def padded(num_rows, max_rows=48, num_positions=1):
    rows = RowTable(max_rows, 6)
    planned = []
    for i in range(num_rows):
        request = Request(f"r{i}", [7, 8, 9, 10, 11], SamplingParams(max_tokens=4))
        request.row, request.block_ids, request.slot = i, [2 * i + 1, 2 * i + 2], i + 1
        rows.fill(request)
        planned.append(PlannedRow(request, 4, 1))
    buffers = StepBuffers(
        max_rows=max_rows,
        num_positions=num_positions,
        num_columns=6,
        block_size=4,
        device=torch.device("cpu"),
    )
    return buffers, rows, planned


def test_vllm_49757_a_row_that_was_left_is_null_on_host_and_device():
    """Fails if ``RowTable.clear`` or ``StepBuffers._clear`` leaves the block table as it was."""
    buffers, rows, planned = padded(8)
    buffers.load(planned, rows)
    rows.clear(7)
    batch = buffers.load(planned[:5], rows)
    assert batch.decode.num_rows == 8
    for tensor in (batch.decode.block_table, batch.decode.read_slots, batch.decode.write_slots):
        assert (tensor[5:] == 0).all()
    assert (batch.decode.seq_lens[5:] == 0).all()
    assert (batch.slot_mapping[5:] == 0).all()
    assert (rows.block_table[7] == 0).all()


@pytest.mark.parametrize("num_positions", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 9, 17, 33, 48])
def test_vllm_39809_buffers_are_padded_by_requests_and_not_by_tokens(num_rows, num_positions):
    """Fails if a buffer is sized or cut by ``R`` tokens where it needs ``R * T``."""
    buffers, rows, planned = padded(num_rows, num_positions=num_positions)
    batch = buffers.load(planned, rows)
    size = batch.decode.num_rows
    assert size == next(s for s in capture_sizes(48) if s >= num_rows)
    assert len(batch.input_ids) == len(batch.positions) == len(batch.slot_mapping) == size * num_positions
    assert batch.decode.write_slots.shape == (size, num_positions)
    assert batch.decode.block_table.shape == (size, 6)
    assert len(batch.decode.seq_lens) == len(batch.decode.read_slots) == size


def test_graph_buffers_stay_where_they_are():
    """Fails if a step makes new tensors: a replayed graph would read the old ones."""
    buffers, rows, planned = padded(8)
    first = buffers.load(planned, rows)
    second = buffers.load(planned[:7], rows)
    for name in ("seq_lens", "block_table", "read_slots", "write_slots"):
        assert getattr(first.decode, name).data_ptr() == getattr(second.decode, name).data_ptr()
    assert first.input_ids.data_ptr() == second.input_ids.data_ptr()


def test_vllm_38270_blocks_and_state_slots_of_a_row_are_refreshed_together():
    """Fails if the second group's indices (state slots) are taken from an earlier step than the blocks."""
    rows = RowTable(2, 4)
    request = Request("r", list(range(9)), SamplingParams(max_tokens=4))
    request.row, request.block_ids, request.slot = 0, [1, 2], 1
    rows.fill(request)
    builder = BatchBuilder(rows, block_size=4, device=torch.device("cpu"))
    builder.build(StepPlan([PlannedRow(request, 7, 1)], []))
    request.block_ids.append(3)
    request.slot = 2  # as when the state at a block boundary went to the prefix cache
    batch = builder.build(StepPlan([PlannedRow(request, 8, 1)], []))
    assert batch.decode.block_table[0, :3].tolist() == [1, 2, 3]
    assert batch.slot_mapping[0] == 3 * 4
    assert batch.decode.read_slots.tolist() == [2]
    assert batch.decode.write_slots.tolist() == [[2]]


def test_sglang_25116_too_many_sequences_for_the_budget_are_refused_and_not_capped():
    """Fails if the planner lowers ``max_num_seqs`` to what fits."""
    one = spec()
    budget = 20 * one.slot_bytes + 40 * one.block_bytes(16)
    sizes = {"role": "both", "max_model_len": 64, "block_size": 16}
    assert Demand(one, max_num_seqs=8, **sizes).within(budget).num_slots == 9
    with pytest.raises(CapacityError, match=r"1001 state slots .* 1000 sequences"):
        Demand(one, max_num_seqs=1000, **sizes).within(budget)


@pytest.mark.parametrize("budget", [4, 7, 16])
def test_vllm_42430_a_one_token_last_chunk_is_a_decode_row_and_exact(bundled_model, budget):
    """Fails if ``is_decode_row`` denies it: the row then takes the prefill path under a decode graph."""
    prompt = prompts(1, low=2 * budget + 1, high=2 * budget + 1)[0]
    expected = run(make_engine(bundled_model, "both", max_batch_tokens=2048), [greedy("r", prompt)])["r"]
    engine = make_engine(bundled_model, "both", max_batch_tokens=budget, max_num_seqs=4, cache_mode="none")
    batches = []
    forward = engine.model.forward
    engine.model.forward = lambda batch, caches: batches.append(batch) or forward(batch, caches)
    assert run(engine, [greedy("r", prompt)])["r"] == expected
    kinds = [(b.decode is not None, b.prefill is not None) for b in batches[:3]]
    assert kinds == [(False, True), (False, True), (True, False)]


def test_vllm_42430_the_first_token_of_a_prompt_is_never_a_decode_row(bundled_model):
    """Fails if every one-token row counts as a decode row: it then starts from what its slot held."""
    engine = make_engine(bundled_model, "both")
    expected = run(engine, [greedy("clean", [17])])["clean"]
    for view in (*engine.caches.layers.ssm, *engine.caches.layers.conv):
        view[1:] = 3.0
    assert run(engine, [greedy("dirty", [17])])["dirty"] == expected


def test_padding_rows_come_out_finite_whatever_the_null_entries_hold(bundled_model):
    """Fails if a kernel reads a null slot or block: NaN then spreads from padding rows."""
    engine = make_engine(bundled_model, "both")
    engine.caches.kv[0] = float("nan")
    for view in (*engine.caches.layers.ssm, *engine.caches.layers.conv):
        view[0] = float("nan")
    with torch.inference_mode():
        hidden = engine.model.forward(engine._builder.dummy(8), engine.caches.layers)
    assert np.isfinite(hidden.numpy()).all()
