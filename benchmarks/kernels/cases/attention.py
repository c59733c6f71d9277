"""Attention over the paged KV cache: decode rows with one query or several, whole prompts."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.kernels.cases import eager, peers, work
from benchmarks.kernels.cases.case import LEAST_TOKENS, Call, Case, case_name, in_pool, int32, random
from benchmarks.kernels.cases.models import Model
from kernels.attention.kv_cache import store_kv
from kernels.attention.paged_attention_decode import paged_attention_decode
from kernels.attention.paged_attention_prefill import paged_attention_prefill


def decode(model: Model, rows: int, seq_len: int, queries: int) -> Case:
    def ours(o: SimpleNamespace) -> Call:
        args = o.q, o.k_cache, o.v_cache, o.block_table, o.seq_lens
        scale = model.attention.head_dim**-0.5
        return lambda: paged_attention_decode(*args, scale=scale, max_seq_len=seq_len)

    gpu_peers = {"FlashInfer": peers.flashinfer_attention, "SDPA": peers.sdpa}
    return Case(
        "paged_attention_decode",
        case_name(model, rows=rows, context=seq_len, queries=queries),
        _work(model, rows, queries, seq_len),
        model.weight_bytes,
        lambda device: _operands(device, model, rows, queries, seq_len),
        ours,
        gpu_peers if model.device == "cuda" else {"SDPA": peers.sdpa},
        replayed=True,
    )


def prefill(model: Model, tokens: int) -> Case:
    """One prompt from its beginning."""

    def ours(o: SimpleNamespace) -> Call:
        args = o.k_cache, o.v_cache, o.block_table, int32(o.q.device, 0, tokens), o.seq_lens
        lengths = {"max_query_len": tokens, "max_seq_len": tokens}
        scale = model.attention.head_dim**-0.5
        return lambda: paged_attention_prefill(o.q[0], *args, scale=scale, **lengths)

    gpu_peers = {"FlashInfer": peers.flashinfer_attention, "SDPA": peers.sdpa}
    return Case(
        "paged_attention_prefill",
        case_name(model, tokens=tokens),
        _work(model, 1, tokens, tokens),
        model.weight_bytes,
        lambda device: _operands(device, model, 1, tokens, tokens),
        ours,
        gpu_peers if model.device == "cuda" else {"SDPA": peers.sdpa},
    )


def store(model: Model, tokens: int) -> Case:
    """Stores a prompt, which fills blocks, or the new token of each decode row in its own block."""
    heads = model.attention.num_kv_heads, model.attention.head_dim

    def operands(device: torch.device) -> SimpleNamespace:
        pool = in_pool(random(device, model.dtype, 1 + tokens, heads[0], 2, 2, model.block_size, heads[1]))
        k, v = random(device, model.dtype, 2, tokens, *heads)
        stride = 1 if tokens >= LEAST_TOKENS else model.block_size
        places = torch.arange(tokens, device=device) * stride + model.block_size
        return SimpleNamespace(k=k, v=v, k_cache=pool[:, :, 1, 0], v_cache=pool[:, :, 1, 1], places=places)

    def ours(o: SimpleNamespace) -> Call:
        return lambda: store_kv(o.k, o.v, o.k_cache, o.v_cache, o.places)

    def torch_eager(o: SimpleNamespace) -> Call:
        return lambda: eager.store_kv(o.k, o.v, o.k_cache, o.v_cache, o.places)

    return Case(
        "store_kv",
        case_name(model, rows=tokens),
        work.store_kv(tokens, *heads, model.dtype.itemsize),
        model.weight_bytes,
        operands,
        ours,
        {"eager": torch_eager},
        comparable=False,
        replayed=tokens < LEAST_TOKENS,
    )


def _work(model: Model, rows: int, queries: int, seq_len: int) -> work.Work:
    heads = model.attention.num_heads, model.attention.num_kv_heads, model.attention.head_dim
    return work.paged_attention(rows, queries, seq_len, *heads, model.dtype.itemsize)


def _operands(device: torch.device, model: Model, rows: int, queries: int, seq_len: int) -> SimpleNamespace:
    """Makes rows whose blocks are scattered in a pool of two layers; this layer is one of them."""
    columns = -(-seq_len // model.block_size)
    shape = 1 + rows * columns, model.attention.num_kv_heads, 2, 2, model.block_size, model.attention.head_dim
    pool = in_pool(random(device, model.dtype, *shape))
    block_ids = torch.randperm(rows * columns, device=device) + 1
    return SimpleNamespace(
        q=random(device, model.dtype, rows, queries, model.attention.num_heads, model.attention.head_dim),
        k_cache=pool[:, :, 1, 0],
        v_cache=pool[:, :, 1, 1],
        block_table=block_ids.int().view(rows, columns),
        seq_lens=torch.full((rows,), seq_len, dtype=torch.int32, device=device),
        seq_len=seq_len,
    )
