"""One call of every op as decode and prefill steps make it, with a model's shapes and memory layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.kv_cache import store_kv
from kernels.attention.paged_attention_decode import paged_attention_decode
from kernels.attention.paged_attention_prefill import paged_attention_prefill
from kernels.attention.rotary import HeadNorms, Rotary, norm_and_rotate, rotate
from kernels.digests import unit_digest
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.gated_delta.gated_delta_chunk import gated_delta_chunk
from kernels.gated_delta.gated_delta_update import gated_delta_update
from kernels.linear.invariant_linear import invariant_linear
from kernels.linear.quantized_linear import QuantizedLinear
from kernels.moe.expert_linear import expert_linear
from kernels.moe.few_token_experts import MOST_TOKENS, few_token_down, few_token_up
from kernels.moe.moe_combine import moe_combine
from kernels.moe.moe_route import Routing, moe_route
from kernels.moe.moe_sort import moe_sort
from kernels.moe.quantized_experts import QuantizedExperts, quantized_experts
from kernels.moe.router_logits import router_logits
from kernels.norms.gated_rms_norm import gated_group_rms_norm, group_rms_norm_then_gate
from kernels.norms.relu_squared import relu_squared
from kernels.norms.rms_norm import add_rms_norm, rms_norm
from kernels.norms.sigmoid_gate import add_sigmoid_gated, sigmoid_gate
from kernels.norms.silu_gate import silu_gate
from kernels.replay.causal_conv1d_replay import causal_conv1d_flush, causal_conv1d_replay
from kernels.replay.gated_delta_flush import KeptDeltaInputs, gated_delta_flush
from kernels.replay.gated_delta_replay import gated_delta_replay
from kernels.replay.kept_inputs import PendingRows
from kernels.replay.selective_state_flush import KeptSsmInputs, selective_state_flush
from kernels.replay.selective_state_replay import selective_state_replay
from kernels.sampling.sample_tokens import SampleTokens
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.token_mask import mask_tokens, num_words
from kernels.speculation.accept_drafts import AcceptDrafts
from kernels.speculation.ngram_draft import NgramDraft
from kernels.speculation.prepare_rows import PrepareRows
from kernels.ssm.boundaries import Boundaries, Segments
from kernels.ssm.causal_conv1d import causal_conv1d, causal_conv1d_update
from kernels.ssm.selective_state_update import selective_state_update
from kernels.ssm.ssd_chunk_scan import ssd_chunk_scan
from testing.kernels.programs.models import Delta, Experts, Load, Mamba, Model

BLOCK_SIZE, CONTEXT, LAYERS, TAPS, EPS = 16, 8192, 4, 4, 1e-5
NO_LIMIT = (0.0, float("inf"))


@dataclass(frozen=True)
class Rows:
    """Rows of a step. A step of prefill has two rows, so that it has boundaries in one of them."""

    shape: tuple[int, ...]
    """``[R, T]`` of decode rows, ``[n]`` of a prefill's tokens."""
    read_slots: Tensor
    write_slots: Tensor
    seq_lens: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    has_initial: Tensor
    num_before: Tensor
    boundaries: Boundaries | None

    @property
    def is_decode(self) -> bool:
        return len(self.shape) == 2

    @property
    def num_tokens(self) -> int:
        return torch.Size(self.shape).numel()


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decode_rows(load: Load) -> Rows:
    shape = load.rows, load.positions
    table = empty(load.rows, CONTEXT // BLOCK_SIZE)
    return Rows(
        shape, empty(shape[0]), empty(*shape), empty(shape[0]), table, *(empty(0),) * 3, boundaries=None
    )


def prefill_rows(load: Load) -> Rows:
    flags = empty(3, dtype=torch.bool)
    segments = Segments(empty(4), empty(3), empty(3), flags, empty(3), empty(3), load.prompt)
    boundaries = Boundaries(empty(1), empty(1), empty(1), segments) if load.has_boundaries else None
    rows, before = (empty(2), empty(2), empty(2)), (empty(3), flags[:2], empty(2))
    return Rows((load.prompt,), *rows, empty(2, CONTEXT // BLOCK_SIZE), *before, boundaries)


def launch_step(model: Model, load: Load, rows: Rows) -> None:
    """Launches what a step of such rows launches, except products that cuBLAS computes."""
    launch_norms(model, load, rows.num_tokens)
    launch_attention(model, load, rows)
    if model.mamba is not None:
        launch_mamba(model.mamba, load, rows)
    if model.delta is not None:
        launch_delta(model.delta, load, rows)
    if model.experts is not None:
        launch_experts(model, model.experts, load, rows.num_tokens)
    if rows.is_decode:
        launch_sampling(model, rows)
        launch_drafting(rows)
    launch_linear(model, load, rows.num_tokens)
    unit_digest._launch(empty(8, 3 * CONTEXT, dtype=torch.int64), empty(2, dtype=torch.int64))


def launch_norms(model: Model, load: Load, n: int) -> None:
    x = empty(n, model.hidden, dtype=load.dtype)
    weight = empty(model.hidden, dtype=load.dtype)
    rms_norm(x, weight, EPS)
    add_rms_norm(x, x, weight, EPS)
    add_rms_norm(x, x.float(), weight, EPS)
    if model.feed_forward and model.gated_feed_forward:
        gate, up = empty(n, 2 * model.feed_forward, dtype=load.dtype).chunk(2, dim=1)
        silu_gate(up, gate)
    elif model.feed_forward:
        relu_squared(empty(n, model.feed_forward, dtype=load.dtype))


def launch_attention(model: Model, load: Load, rows: Rows) -> None:
    heads = model.attention
    q_size = heads.size * (2 if heads.is_gated else 1)
    sizes = [heads.query * q_size, heads.kv * heads.size, heads.kv * heads.size]
    q, k, v = torch.split(empty(rows.num_tokens, sum(sizes), dtype=load.dtype), sizes, dim=1)
    q_and_gate = q.view(-1, heads.query, q_size)
    q, gate = q_and_gate[..., : heads.size], q_and_gate[..., -heads.size :]
    k, v = (one.view(-1, heads.kv, heads.size) for one in (k, v))
    positions = empty(rows.num_tokens, dtype=torch.int64)
    rotary = Rotary(empty(heads.rotary_half, dtype=torch.float32))
    if heads.is_gated:  # weights with an offset are kept in float32
        weights = empty(heads.size, dtype=torch.float32), empty(heads.size, dtype=torch.float32)
        norm_and_rotate(q, k, HeadNorms(*weights, EPS), positions, rotary)
    elif heads.rotary_half:
        rotate(q, k, positions, rotary)
    pool_shape = 1 + CONTEXT // BLOCK_SIZE, heads.kv, LAYERS, 2, BLOCK_SIZE, heads.size
    pool = empty(*pool_shape, dtype=load.kv_dtype or load.dtype)
    caches = pool[:, :, 1, 0], pool[:, :, 1, 1]
    store_kv(k, v, *caches, positions)
    scale = heads.size**-0.5
    if rows.is_decode:
        q = q.view(*rows.shape, *q.shape[1:])
        attended = paged_attention_decode(
            q, *caches, rows.block_table, rows.seq_lens, scale=scale, max_seq_len=CONTEXT
        ).flatten(0, 1)
        # With this many rows a row's tokens are not split.
        crowd = empty(256, rows.shape[1], heads.query, heads.size, dtype=load.dtype)
        table, seq_lens = empty(256, CONTEXT // BLOCK_SIZE), empty(256)
        paged_attention_decode(crowd, *caches, table, seq_lens, scale=scale, max_seq_len=256)
    else:
        attended = paged_attention_prefill(
            q, *caches, rows.block_table, rows.cu_seqlens, rows.seq_lens, scale=scale,
            max_query_len=rows.num_tokens, max_seq_len=CONTEXT,
        )  # fmt: skip
    if heads.is_gated:
        sigmoid_gate(attended, gate)


def launch_mamba(mamba: Mamba, load: Load, rows: Rows) -> None:
    inner, bc = mamba.heads * mamba.head_dim, mamba.groups * mamba.state_size
    sizes = [inner, mamba.channels, mamba.heads]
    z, xbc, dt = torch.split(empty(rows.num_tokens, sum(sizes), dtype=load.dtype), sizes, dim=1)
    xbc = launch_convolution(xbc, load, rows, has_bias=True)
    x, B, C = torch.split(xbc, [inner, bc, bc], dim=-1)
    state = state_pool((mamba.heads, mamba.head_dim, mamba.state_size), load.state_dtype)
    numbers = [empty(mamba.heads, dtype=torch.float32) for _ in range(3)]
    x = x.view(*rows.shape, mamba.heads, mamba.head_dim)
    B, C = (one.view(*rows.shape, mamba.groups, mamba.state_size) for one in (B, C))
    dt = dt.view(*rows.shape, -1)
    A, D, dt_bias = numbers
    operands = x, dt, A, B, C, D, dt_bias, state
    if rows.is_decode:
        y = selective_state_update(
            *operands, rows.read_slots, rows.write_slots, dt_limit=NO_LIMIT, seq_lens=rows.seq_lens,
            rounding=rounding_of(load),
        )  # fmt: skip
        heads = mamba.heads, mamba.head_dim, mamba.groups, mamba.state_size
        kept, pending = KeptSsmInputs.empty(9, load.positions, heads, load.dtype, "meta"), pending_of(rows)
        slots = rows.read_slots, rows.read_slots, kept, pending
        selective_state_replay(*operands, *slots, dt_limit=NO_LIMIT, rounding=rounding_of(load))
        selective_state_flush(state, *slots, rounding=rounding_of(load))
    else:
        y = ssd_chunk_scan(
            *operands, *prefill_arguments(rows), chunk_size=256, dt_limit=NO_LIMIT,
            max_seq_len=rows.num_tokens, boundaries=rows.boundaries, num_before=rows.num_before,
            rounding=rounding_of(load),
        )  # fmt: skip
    weight = empty(inner, dtype=load.dtype)
    gated_group_rms_norm(y.view(-1, inner), z, weight, group_size=inner // mamba.groups, eps=EPS)


def launch_delta(delta: Delta, load: Load, rows: Rows) -> None:
    values, keys = delta.value_heads * delta.head_dim, delta.key_heads * delta.head_dim
    sizes = [delta.channels, values]
    vqk, z = torch.split(empty(rows.num_tokens, sum(sizes), dtype=load.dtype), sizes, dim=1)
    b, a = empty(*rows.shape, 2 * delta.value_heads, dtype=load.dtype).chunk(2, dim=-1)
    v, q, k = torch.split(launch_convolution(vqk, load, rows, has_bias=False), [values, keys, keys], dim=-1)
    q, k = (one.view(*rows.shape, delta.key_heads, delta.head_dim) for one in (q, k))
    v = v.view(*rows.shape, delta.value_heads, delta.head_dim)
    state = state_pool((delta.value_heads, delta.head_dim, delta.head_dim), load.state_dtype)
    A, dt_bias = (empty(delta.value_heads, dtype=torch.float32) for _ in range(2))
    operands = q, k, v, a, b, A, dt_bias, state
    rounding = rounding_of(load)
    if rows.is_decode:
        slots = rows.read_slots, rows.write_slots
        o = gated_delta_update(*operands, *slots, seq_lens=rows.seq_lens, rounding=rounding)
        heads = delta.key_heads, delta.head_dim, delta.value_heads, delta.head_dim
        kept, pending = KeptDeltaInputs.empty(9, load.positions, heads, load.dtype, "meta"), pending_of(rows)
        slots = rows.read_slots, rows.read_slots
        gated_delta_replay(*operands, *slots, kept, pending, rounding=rounding)
        gated_delta_flush(state, *slots, kept, pending, rounding=rounding)
    else:
        o = gated_delta_chunk(
            *operands, *prefill_arguments(rows), max_seq_len=rows.num_tokens, boundaries=rows.boundaries,
            num_before=rows.num_before, rounding=rounding,
        )  # fmt: skip
    weight = empty(values, dtype=load.dtype)
    group_rms_norm_then_gate(o.view(-1, values), z, weight, group_size=delta.head_dim, eps=EPS)


def launch_convolution(x: Tensor, load: Load, rows: Rows, *, has_bias: bool) -> Tensor:
    channels = x.shape[1]
    weight, bias = empty(channels, TAPS, dtype=load.dtype), empty(channels, dtype=load.dtype)
    state = state_pool((channels, TAPS - 1), load.dtype)
    operands = weight, bias if has_bias else None, state
    if rows.is_decode:
        kept = empty(9, 2 * load.positions, channels, dtype=load.dtype)
        slots = rows.read_slots, rows.read_slots, kept, pending_of(rows)
        causal_conv1d_replay(x.view(*rows.shape, -1), *operands, *slots)
        causal_conv1d_flush(state, *slots)
        return causal_conv1d_update(x.view(*rows.shape, -1), *operands, rows.read_slots, rows.write_slots)
    return causal_conv1d(
        x, *operands, *prefill_arguments(rows), max_seq_len=rows.num_tokens, boundaries=rows.boundaries
    )


def launch_experts(model: Model, experts: Experts, load: Load, n: int) -> None:
    logits = empty(n, experts.count, dtype=torch.float32)
    scoring, correction = ("softmax", None) if experts.is_softmax else ("sigmoid", logits[0])
    routing = Routing(experts.per_token, 1, 1, True, 1.0 if experts.is_softmax else 2.5, scoring)
    ids, weights = moe_route(logits, correction, routing)
    if load.weight_dtype is None and n <= MOST_TOKENS:
        launch_few_tokens(model, experts, load, ids, weights)
    tokens, places, ends = moe_sort(ids, experts.count)
    up_size = experts.intermediate * (2 if experts.is_softmax else 1)
    pairs = empty(len(tokens), model.hidden, dtype=load.dtype)
    if load.weight_dtype is None:
        expert_linear(pairs, empty(experts.count, up_size, model.hidden, dtype=load.dtype), ends)
    else:
        quantized_experts(pairs, stacked(experts.count, up_size, model.hidden, load), ends)
        activated = empty(len(tokens), experts.intermediate, dtype=load.dtype)
        quantized_experts(activated, stacked(experts.count, model.hidden, experts.intermediate, load), ends)
    if experts.is_softmax:
        gate, up = empty(len(tokens), up_size, dtype=load.dtype).chunk(2, dim=1)
        silu_gate(up, gate)
    else:
        relu_squared(empty(len(tokens), up_size, dtype=load.dtype))
    combined = moe_combine(pairs, places, weights)
    if experts.is_softmax:
        add_sigmoid_gated(combined, empty(n, model.hidden, dtype=load.dtype), empty(n, 1, dtype=load.dtype))


def launch_few_tokens(model: Model, experts: Experts, load: Load, ids: Tensor, weights: Tensor) -> None:
    x, up_size = empty(len(ids), model.hidden, dtype=load.dtype), experts.intermediate
    router_logits(x, empty(experts.count, model.hidden, dtype=torch.float32))
    up = empty(experts.count, up_size * (2 if experts.is_softmax else 1), model.hidden, dtype=load.dtype)
    down = empty(experts.count, model.hidden, up_size, dtype=load.dtype)
    results = few_token_down(few_token_up(x, up, ids, is_gated=experts.is_softmax), down, ids)
    moe_combine(results.flatten(0, 1), None, weights)


def launch_linear(model: Model, load: Load, n: int) -> None:
    hidden, size = empty(n, model.hidden, dtype=load.dtype), model.feed_forward or 2 * model.hidden
    if load.weight_dtype is None:
        invariant_linear(hidden, empty(size, model.hidden, dtype=load.dtype), hidden.new_empty(size))
        return
    experts = stacked(1, model.feed_forward or 2 * model.hidden, model.hidden, load)
    linear = QuantizedLinear(experts[0])
    linear(empty(n, model.hidden, dtype=load.dtype), relu_squared=True)
    heads = model.attention
    attended = empty(n, heads.query * heads.size, dtype=load.dtype)
    QuantizedLinear(stacked(1, model.hidden, attended.shape[1], load)[0])(attended)


def launch_sampling(model: Model, rows: Rows) -> None:
    num_rows, num_positions = rows.shape
    logits = empty(num_rows, num_positions, model.vocab_size, dtype=torch.float32)
    masks = empty(64, num_positions, num_words(model.vocab_size))
    mask_tokens(logits, empty(num_rows, dtype=torch.int64), masks)
    index = empty(num_rows, num_positions, dtype=torch.int64)
    sample = SampleTokens(empty(64, 6, dtype=torch.float32), empty(64, 3, dtype=torch.int64))
    for random, filtered in ((False, False), (True, False), (True, True)):
        sample(logits, index[:, 0], index, shift=1, random=random, filtered=filtered)
    token_logprobs(logits.flatten(0, 1), index.flatten(), 20)


def launch_drafting(rows: Rows) -> None:
    """Launches the ops on the row tables, which have room for 63 requests."""
    num_rows, num_positions = rows.shape

    def longs(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int64)

    columns = "num_computed", "state_slot", "num_drafts", "limit", "max_drafts", "active"
    table = {name: empty(64) for name in columns}
    index, tokens, accepted = longs(num_rows), longs(64, num_positions), empty(num_rows)
    results, write_slots = longs(num_rows, num_positions + 3), empty(num_rows, num_positions)

    def of(*names: str) -> dict[str, Tensor]:
        return {name: table[name] for name in names}

    PrepareRows(
        rows=index, tokens=tokens, **of("num_computed", "state_slot", "active"), block_table=rows.block_table,
        slots=write_slots, boundary_len=empty(num_rows), boundary_slot=empty(num_rows),
        input_ids=longs(*rows.shape), positions=longs(*rows.shape),
        slot_mapping=longs(*rows.shape), seq_lens=rows.seq_lens,
        read_slots=rows.read_slots, write_slots=rows.write_slots, block_size=BLOCK_SIZE,
    )(num_rows)  # fmt: skip
    AcceptDrafts(
        rows=index, write_slots=write_slots, forced=longs(num_rows), tokens=tokens, **table,
        stop_ids=longs(64, 4), accepted=accepted, results=results,
    )(num_rows, sampled=longs(*rows.shape), is_finite=empty(*rows.shape, dtype=torch.bool))  # fmt: skip
    NgramDraft(
        rows=index, accepted=accepted, results=results, history=empty(64, CONTEXT), tokens=tokens,
        **of("num_drafts", "num_computed", "active"), min_n=2, max_n=4,
    )(num_rows)  # fmt: skip


def prefill_arguments(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rows.cu_seqlens, rows.read_slots, rows.write_slots, rows.has_initial


def pending_of(rows: Rows) -> PendingRows:
    """Returns what a step tells of rows with one slot each."""
    num_rows = rows.shape[0]
    return PendingRows(empty(num_rows, dtype=torch.int64), empty(num_rows), rows.seq_lens)


def rounding_of(load: Load) -> StateRounding:
    return StateRounding.stochastic(3) if load.is_stochastic else NEAREST


def state_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns one layer's view of a pool whose slots hold the states of several layers."""
    size = torch.Size(shape).numel()
    slot = -(-2 * size // 256) * 256
    return empty(8, slot, dtype=dtype)[:, slot - size :].unflatten(1, shape)


def stacked(count: int, num_outputs: int, num_inputs: int, load: Load) -> QuantizedExperts:
    assert load.weight_dtype is not None
    block = load.weight_block or (num_outputs, num_inputs)
    values = empty(count, num_outputs, num_inputs, dtype=load.weight_dtype)
    scales = empty(count, -(-num_outputs // block[0]), -(-num_inputs // block[1]), dtype=torch.float32)
    return QuantizedExperts(values, scales, *block)


def steps(load: Load) -> Iterator[Rows]:
    """Yields the rows of a decode step and of a prefill step."""
    yield decode_rows(load)
    yield prefill_rows(load)
