"""Grouped-query attention over the paged KV cache, without positional encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import Batch
from engine.caches import LayerCaches
from engine.mixer_config import AttentionConfig
from engine.models.linear import Linear
from engine.tensor_parallel import TensorParallel
from engine.weights import Weights, of_inputs, of_outputs
from kernels.kv_cache import store_kv
from kernels.paged_attention_decode import paged_attention_decode
from kernels.paged_attention_prefill import paged_attention_prefill


class Attention:
    """``o(softmax(q k^T / sqrt(head_dim)) v)``; KV of all new tokens is stored before anything is read.

    A rank has a share of the heads and the KV heads that these attend to. ``index``: which of the KV caches
    is this layer's.
    """

    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        weights: Weights,
        prefix: str,
        tp: TensorParallel,
        index: int,
    ) -> None:
        heads, kv_heads = tp.share(config.num_heads), tp.share_or_copy(config.num_kv_heads)
        self.index = index
        self.num_heads = len(heads)
        self.num_kv_heads = len(kv_heads)
        self.head_dim = config.head_dim
        self.scale = config.scale
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        q_part = heads.start * config.head_dim, heads.stop * config.head_dim
        kv_part = of_outputs((kv_heads.start * config.head_dim, kv_heads.stop * config.head_dim))
        self.qkv_split = [
            len(heads) * config.head_dim,
            len(kv_heads) * config.head_dim,
            len(kv_heads) * config.head_dim,
        ]
        self.qkv_proj = Linear.take_joined(
            weights,
            [
                (f"{prefix}q_proj", q_size, of_outputs(q_part)),
                (f"{prefix}k_proj", kv_size, kv_part),
                (f"{prefix}v_proj", kv_size, kv_part),
            ],
            hidden_size,
            scale=config.in_scale,
        )
        self.o_proj = Linear.take(
            weights,
            f"{prefix}o_proj",
            hidden_size,
            q_size,
            part=of_inputs(q_part),
            scale=config.out_scale,
        )

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        k_cache, v_cache = caches.k[self.index], caches.v[self.index]
        q, k, v = torch.split(self.qkv_proj(x), self.qkv_split, dim=-1)
        q = q.view(-1, self.num_heads, self.head_dim)
        k = k.view(-1, self.num_kv_heads, self.head_dim)
        v = v.view(-1, self.num_kv_heads, self.head_dim)
        store_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        outputs = []
        split = batch.num_decode_tokens
        if (decode := batch.decode) is not None:
            attended = paged_attention_decode(
                q[:split].view(decode.num_rows, decode.num_positions, self.num_heads, self.head_dim),
                k_cache,
                v_cache,
                decode.block_table,
                decode.seq_lens,
                scale=self.scale,
                max_seq_len=decode.max_seq_len,
            )
            outputs.append(attended.view(split, -1))
        if (prefill := batch.prefill) is not None:
            attended = paged_attention_prefill(
                q[split:],
                k_cache,
                v_cache,
                prefill.block_table,
                prefill.cu_seqlens,
                prefill.seq_lens,
                scale=self.scale,
                max_query_len=prefill.max_query_len,
                max_seq_len=prefill.max_seq_len,
            )
            outputs.append(attended.view(prefill.num_tokens, -1))
        return self.o_proj(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
