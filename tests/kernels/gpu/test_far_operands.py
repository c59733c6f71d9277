"""No offset is computed in 32 bits: operands that reach beyond element 2^31 give the bits of compact ones.

Pools of KV and states have more elements than that on a GPU. The interpreter uses sparse memory here.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention import kv_cache, paged_attention_decode, paged_attention_prefill, rotary
from kernels.formats.stochastic_round import StateRounding
from kernels.gated_delta import gated_delta_chunk, gated_delta_update
from kernels.linear.quantized_linear import quantized_linear_triton
from kernels.linear.quantized_weight import FP8
from kernels.norms import gated_rms_norm, rms_norm, sigmoid_gate, silu_gate
from kernels.replay import (
    causal_conv1d_replay,
    gated_delta_flush,
    gated_delta_replay,
    selective_state_flush,
    selective_state_replay,
)
from kernels.replay.kept_inputs import PendingRows
from kernels.sampling import token_mask
from kernels.speculation import ngram_draft, prepare_rows
from kernels.ssm import causal_conv1d, selective_state_update, ssd_chunk_scan
from kernels.ssm.boundaries import segments_of
from testing.kernels.quantized_weights import random_weight
from testing.kernels.ragged_rows import RaggedRows, Row
from testing.kernels.sparse import far_apart, wide_table

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the sparse memory is the host's")

Place = Callable[[Tensor], Tensor]
ROUNDING = StateRounding.stochastic(1)
SLOTS, NO_LIMIT = 12, (0.0, float("inf"))
PREFILL = [Row(9, 3, 4, True, {4: 7}, num_before=3), Row(4, 0, 11, False)]


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


PENDING = PendingRows(torch.tensor([1, 0]), int32(1, 2), int32(9, 6))
REPLAYED, FLUSHED = (int32(11, 2), int32(7, 10)), (int32(3, 8), int32(6, 1))
"""Slots that two rows read and write."""


def norms(place: Place) -> list[Tensor]:
    x, residual, weight = torch.randn(4, 48), torch.randn(4, 48), torch.randn(48)
    y, total = rms_norm._launch(place(x), place(residual), weight, 1e-5)
    gated = (
        gated_rms_norm._launch(place(x), place(residual), weight, 16, 1e-5, first) for first in (True, False)
    )
    return [y, total, *gated, silu_gate._launch(place(x), place(residual))]


def rotation(place: Place) -> list[Tensor]:
    q, k = place(torch.randn(4, 6, 24)), place(torch.randn(4, 2, 24))
    norms = rotary.HeadNorms(torch.randn(24), torch.randn(24), 1e-5)
    rotary._launch(q, k, norms, torch.tensor([0, 5, 17, 100]), rotary.Rotary(torch.rand(8)))
    return [q, k]


def head_gate(place: Place) -> list[Tensor]:
    return [sigmoid_gate._launch(torch.randn(4, 3, 16), place(torch.randn(4, 3, 16)))]


def product(place: Place) -> list[Tensor]:
    weight = random_weight(FP8, 40, 64, (1, 32))
    return [quantized_linear_triton(place(torch.randn(4, 64)), weight)]


def stored_kv(place: Place) -> list[Tensor]:
    pool = place(torch.zeros(6, 2, 3, 2, 4, 16))
    k, v = place(torch.randn(4, 2, 16)), place(torch.randn(4, 2, 16))
    kv_cache._launch(k, v, pool[:, :, 1, 0], pool[:, :, 1, 1], torch.tensor([23, 9, 0, 4]))
    return [pool]


def attention(place: Place) -> list[Tensor]:
    pool = place(torch.randn(6, 2, 3, 2, 16, 16))
    caches, table = (pool[:, :, 1, 0], pool[:, :, 1, 1]), place(int32([5, 1, 3], [2, 4, 0], [0, 0, 0]))
    lengths = int32(40, 20, 0)
    prefill = paged_attention_prefill._launch(
        place(torch.randn(30, 4, 16)), *caches, table, int32(0, 11, 26, 30), lengths, 0.25, 15
    )
    decode = [
        paged_attention_decode._launch(
            place(torch.randn(3, 2, 4, 16)), *caches, table, lengths, 0.25, 40, num_splits=splits
        )
        for splits in (1, 2)
    ]
    return [prefill, *decode]


def convolution(place: Place) -> list[Tensor]:
    rows = RaggedRows(PREFILL)
    weight, bias = torch.randn(24, 4), torch.randn(24)
    pool = place(torch.randn(SLOTS, 24, 3))
    x = place(torch.randn(rows.num_tokens, 24))
    y = causal_conv1d._launch_prefill(x, weight, bias, pool, *rows.index, 9, rows.boundaries)
    x, slots = place(torch.randn(2, 2, 24)), (int32(11, 2), int32([11, 5], [0, 9]))
    decoded = causal_conv1d._launch_decode(x, weight, bias, pool, *slots)
    kept = torch.randn(2, 4, 24)
    replayed = causal_conv1d_replay._launch_replay(x, weight, bias, pool, *REPLAYED, kept, PENDING)
    causal_conv1d_replay._launch_flush(pool, *FLUSHED, kept, PENDING)
    return [y, decoded, replayed, pool, kept]


def mamba(place: Place) -> list[Tensor]:
    rows, numbers = RaggedRows(PREFILL), torch.randn(3, 4)
    A, D, dt_bias = -numbers[0].exp(), numbers[1], numbers[2]
    pool = place(torch.randn(SLOTS, 4, 8, 16).bfloat16())

    def operands(*shape: int) -> list[Tensor]:
        x, dt, B, C = (torch.randn(*shape, *size) for size in ((4, 8), (4,), (2, 16), (2, 16)))
        return [place(x), place(dt), A, place(B), place(C), D, dt_bias, pool]

    segments = segments_of(rows.boundaries, tuple(rows.index), rows.num_before, 9)
    y = ssd_chunk_scan._launch(*operands(rows.num_tokens), segments, 16, NO_LIMIT, ROUNDING)
    slots = int32(11, 2), int32([11, 5], [0, 9]), NO_LIMIT, int32(70, 9), ROUNDING
    decoded = selective_state_update._launch(*operands(2, 2), *slots)
    kept = [torch.randn(2, 4, *size) for size in ((4, 8), (4, 2), (2, 16))]
    inputs = selective_state_flush.KeptSsmInputs(*kept), PENDING
    replayed = selective_state_replay._launch_replay(*operands(2, 2), *REPLAYED, *inputs, NO_LIMIT, ROUNDING)
    selective_state_flush._launch_flush(pool, *FLUSHED, *inputs, ROUNDING)
    return [y, decoded, replayed, pool, *kept]


def delta(place: Place) -> list[Tensor]:
    rows, numbers = RaggedRows(PREFILL), torch.randn(2, 4)
    pool = place(torch.randn(SLOTS, 4, 8, 16).bfloat16())

    def operands(*shape: int) -> list[Tensor]:
        sizes = (2, 16), (2, 16), (4, 8), (4,), (4,)
        return [*(place(torch.randn(*shape, *size)) for size in sizes), -numbers[0].exp(), numbers[1], pool]

    segments = segments_of(rows.boundaries, tuple(rows.index), rows.num_before, 9)
    o = gated_delta_chunk._launch(*operands(rows.num_tokens), segments, ROUNDING)
    slots = int32(11, 2), int32([11, 5], [0, 9]), int32(70, 9), ROUNDING
    decoded = gated_delta_update._launch(*operands(2, 2), *slots)
    kept = [torch.randn(2, 4, *size) for size in ((2, 16), (4, 8), (4, 2))]
    inputs = gated_delta_flush.KeptDeltaInputs(*kept), PENDING
    replayed = gated_delta_replay._launch_replay(*operands(2, 2), *REPLAYED, *inputs, ROUNDING)
    gated_delta_flush._launch_flush(pool, *FLUSHED, *inputs, ROUNDING)
    return [o, decoded, replayed, pool, *kept]


@pytest.mark.parametrize(
    "run", [norms, rotation, head_gate, product, stored_kv, attention, convolution, mamba, delta]
)
def test_strides_may_reach_beyond_32_bits(run):
    torch.manual_seed(0)
    compact = run(torch.clone)
    torch.manual_seed(0)
    for far, expected in zip(run(far_apart), compact, strict=True):
        torch.testing.assert_close(far, expected, rtol=0, atol=0, equal_nan=True)


def test_a_history_of_drafts_may_reach_beyond_32_bits():
    history = wide_table(3)
    history[2, :5] = int32(7, 8, 9, 7, 8)
    op = ngram_draft.NgramDraft(
        rows=torch.tensor([2]), accepted=int32(1), results=torch.tensor([[1, 1, 0, 8, 0, 0]]),
        history=history, tokens=longs(3, 3), num_drafts=int32(0, 0, 2), num_computed=int32(0, 0, 4),
        active=int32(0, 0, 1), min_n=2, max_n=3,
    )  # fmt: skip
    ngram_draft._launch(op, 1)
    assert op.tokens[2].tolist() == [0, 9, 7]


def test_block_tables_may_reach_beyond_32_bits():
    table = wide_table(3)
    table[2, 1] = 6
    op = prepare_rows.PrepareRows(
        rows=torch.tensor([0, 0, 1]), tokens=torch.tensor([[0], [5]]), num_computed=int32(0, 17),
        state_slot=int32(0, 3), active=int32(0, 1), block_table=table,
        slots=int32([0], [0], [9]), boundary_len=int32(0, 0, 0), boundary_slot=int32(0, 0, 0),
        input_ids=longs(3, 1), positions=longs(3, 1), slot_mapping=longs(3, 1), seq_lens=int32(0, 0, 0),
        read_slots=int32(0, 0, 0), write_slots=int32([0], [0], [0]), block_size=16,
    )  # fmt: skip
    prepare_rows._launch(op, 3)
    assert op.slot_mapping.flatten().tolist() == [0, 0, 6 * 16 + 1]


def test_masks_may_reach_beyond_32_bits():
    masks = wide_table(3).unsqueeze(1)
    masks[2, 0, :2] = int32(5, 1)
    masked = token_mask._launch(torch.zeros(1, 1, 40), torch.tensor([2]), masks)
    assert masked[0, 0].isfinite().nonzero().flatten().tolist() == [0, 2, 32]
