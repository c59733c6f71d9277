"""A prompt that is padded to a captured size, with as many boundaries as every captured step has: convolution
and scans give the bits of the prompt without padding, and leave the null slot alone."""

import pytest
import torch

from engine.models.batch import Batch, PrefillRows
from engine.step.passes.prompt_graphs import MOST_BOUNDARIES, _Inputs
from kernels.formats.stochastic_round import NEAREST
from kernels.gated_delta import gated_delta_chunk
from kernels.ssm import causal_conv1d, ssd_chunk_scan
from kernels.ssm.boundaries import segments_of
from testing.kernels import delta_operands
from testing.kernels.ragged_rows import RaggedRows, Row

SIZE, NUM_SLOTS = 64, 12
PROMPTS = [
    Row(50, 0, 1, False),
    Row(64, 2, 1, True, num_before=16),
    Row(3, 2, 3, True, {2: 4}, num_before=7),
    Row(41, 0, 1, False, {8 * (i + 1) - 7 * (i > 3): 3 + i for i in range(5)}),
]
BEFORE = Row(60, 1, 2, True, {7 * (i + 1): 3 + i for i in range(MOST_BOUNDARIES)})
"""What the inputs held before: a longer prompt, with all boundaries."""


def prefill_rows(row, device):
    batch = RaggedRows([row], device)
    names = ("cu_seqlens", "read_slots", "write_slots", "has_initial")
    return PrefillRows(
        num_rows=1,
        num_tokens=row.length,
        seq_lens=batch.num_before + row.length,
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        num_before=batch.num_before,
        boundaries=batch.boundaries,
        max_query_len=row.length,
        max_seq_len=row.length,
        **dict(zip(names, batch.index, strict=True)),
    )


def padded_rows(row, device):
    inputs = _Inputs.make(SIZE, 1, torch.device(device))
    for one in (BEFORE, row):
        tokens = torch.zeros(one.length, dtype=torch.int64, device=device)
        inputs.load(Batch(tokens, tokens, tokens, None, None), prefill_rows(one, device), SIZE)
    padded = inputs.batch(SIZE, 99).prefill
    assert padded is not None
    return padded


def padded(tensor):
    """Tokens of the padding are random, as a graph's memory is."""
    more = torch.randn(SIZE, *tensor.shape[1:], generator=torch.Generator().manual_seed(1))
    return torch.cat([tensor, more.to(tensor)])[:SIZE]


def index_of(rows):
    return rows.cu_seqlens, rows.read_slots, rows.write_slots, rows.has_initial


def segments(rows):
    return segments_of(rows.boundaries, index_of(rows), rows.num_before, rows.max_query_len)


def convolve(target, pool, rows, tokens):
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)).to(target.device)
    weight, bias = torch.ones(24, 4, device=target.device) / 3, torch.zeros(24, device=target.device)
    args = tokens(x), weight, bias, pool, *index_of(rows)
    if target.name == "triton":
        return causal_conv1d._launch_prefill(*args, rows.max_query_len, rows.boundaries)
    return causal_conv1d.causal_conv1d(*args, max_seq_len=rows.max_query_len, boundaries=rows.boundaries)


def scan(target, pool, rows, tokens):
    generator = torch.Generator().manual_seed(0)
    x, dt, B, C = (
        tokens(torch.randn(64, *shape, generator=generator).to(target.device))
        for shape in ((4, 16), (4,), (2, 32), (2, 32))
    )
    A, D, dt_bias = (torch.randn(4, generator=generator).to(target.device) for _ in range(3))
    args = x, dt, -A.exp(), B, C, D, dt_bias, pool
    if target.name == "triton":
        return ssd_chunk_scan._launch(*args, segments(rows), 16, (0.0, float("inf")))
    return ssd_chunk_scan.ssd_chunk_scan(
        *args, *index_of(rows), chunk_size=16, dt_limit=(0.0, float("inf")),
        max_seq_len=rows.max_query_len, boundaries=rows.boundaries, num_before=rows.num_before,
    )  # fmt: skip


def delta(target, pool, rows, tokens):
    q, k, v, a, b, A, dt_bias = delta_operands.operands((64,), DELTA_HEADS, torch.float32, target.device)
    each = (tokens(one) for one in (q, k, v, a, b))
    args = *each, A, dt_bias, pool
    if target.name == "triton":
        return gated_delta_chunk._launch(*args, segments(rows), NEAREST)
    return gated_delta_chunk.gated_delta_chunk(
        *args, *index_of(rows), max_seq_len=rows.max_query_len, boundaries=rows.boundaries,
        num_before=rows.num_before,
    )  # fmt: skip


DELTA_HEADS = delta_operands.HEADS[0]
OPS = {
    "convolution": (convolve, (24, 3)),
    "scan": (scan, (4, 16, 32)),
    "delta rule": (delta, delta_operands.state_shape(DELTA_HEADS)),
}


@pytest.mark.parametrize("row", PROMPTS, ids=lambda row: f"{row.length} tokens, {len(row.stores)} boundaries")
@pytest.mark.parametrize("op", OPS)
def test_padding_changes_no_bit(target, op, row):
    run, state_shape = OPS[op]
    pool = torch.randn(NUM_SLOTS, *state_shape, generator=torch.Generator().manual_seed(2)).to(target.device)
    plain_pool, padded_pool = pool.clone(), pool.clone()
    plain = run(target, plain_pool, prefill_rows(row, target.device), lambda one: one[: row.length])
    rows = padded_rows(row, target.device)
    whole = run(target, padded_pool, rows, lambda one: padded(one[: row.length]))
    assert torch.equal(whole[: row.length], plain)
    assert not whole[row.length :].any()
    assert torch.equal(padded_pool, plain_pool)
    assert torch.equal(padded_pool[0], pool[0])
