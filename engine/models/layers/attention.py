"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.checkpoint.mixer_config import AttentionConfig, HeadNormConfig
from engine.checkpoint.weights import Weights, of_inputs
from engine.memory.caches import LayerCaches
from engine.models.batch import Batch, joined
from engine.models.layers.linear import Linear
from engine.models.layers.qkv_projection import Qkv, QkvProjection
from engine.parallel.tensor_parallel import TensorParallel
from kernels.attention.kv_cache import store_kv
from kernels.attention.paged_attention_decode import paged_attention_decode
from kernels.attention.paged_attention_prefill import paged_attention_prefill
from kernels.attention.rotary import HeadNorms, norm_and_rotate, rotate
from kernels.norms.sigmoid_gate import sigmoid_gate

Position = Callable[[Tensor, Tensor, Tensor], None]
"""``position(q, k, positions)`` applies the positional encoding to queries and keys, in place."""


class Attention:
    """``o(softmax(scale q k^T) v)``. The KV of all new tokens is stored before any KV is read.

    Depending on the configuration, the heads of q and k are normalized and then rotated, and the result is
    gated. A rank has a share of the heads and the KV heads that they attend to. ``index`` selects this
    layer's KV cache.
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
        heads = tp.share(config.num_heads)
        self.index = index
        self.scale = config.scale
        self.batch_invariant = weights.batch_invariant
        self.qkv = QkvProjection(config, hidden_size, weights, prefix, tp)
        self.k_scale, self.v_scale = _kv_scales(weights, prefix)
        """Factors of the keys and values in a float8 cache."""
        self.position = _position(config, weights, prefix)
        self.o_proj = Linear.take(
            weights,
            f"{prefix}o_proj",
            hidden_size,
            config.num_heads * config.head_dim,
            bias=config.out_bias and tp.rank == 0,
            part=of_inputs((heads.start * config.head_dim, heads.stop * config.head_dim)),
            scale=config.out_scale,
        )

    def forward(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Tensor:
        """See :class:`engine.models.block.Mixer`."""
        qkv = self._stored(x, batch, caches)
        attended = self._attend(qkv.q, batch, caches.k[self.index], caches.v[self.index])
        if qkv.gate is not None:
            sigmoid_gate(attended, qkv.gate)
        return self.o_proj(attended.flatten(1))

    def store(self, x: Tensor, batch: Batch, caches: LayerCaches) -> None:
        """See :class:`engine.models.block.StoringMixer`."""
        self._stored(x, batch, caches)

    def _stored(self, x: Tensor, batch: Batch, caches: LayerCaches) -> Qkv:
        """Project ``x`` and store the KV."""
        k_cache, v_cache = caches.k[self.index], caches.v[self.index]
        qkv = self.qkv(x)
        self.position(qkv.q, qkv.k, batch.positions)
        store_kv(qkv.k, qkv.v, k_cache, v_cache, batch.slot_mapping, **self._scales_in(k_cache))
        return qkv

    def _scales_in(self, cache: Tensor) -> dict[str, float]:
        """Return the scales of the keys and values in ``cache``. Only a float8 cache is scaled."""
        if cache.dtype != torch.float8_e4m3fn:
            return {"k_scale": 1.0, "v_scale": 1.0}
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def _attend(self, q: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attend with queries ``[n, heads, head_dim]``. Returns the same shape."""
        outputs, scales = [], self._scales_in(k_cache)
        split = batch.num_decode_tokens
        if (decode := batch.decode) is not None:
            attended = paged_attention_decode(
                q[:split].view(decode.num_rows, decode.num_positions, *q.shape[1:]),
                k_cache,
                v_cache,
                decode.block_table,
                decode.seq_lens,
                scale=self.scale,
                max_seq_len=decode.max_seq_len,
                batch_invariant=self.batch_invariant,
                **scales,
            )
            outputs.append(attended.flatten(0, 1))
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
                **scales,
            )
            outputs.append(attended)
        return joined(outputs)


def _kv_scales(weights: Weights, prefix: str) -> tuple[float, float]:
    """Load the scales that ModelOpt or compressed-tensors calibrated; 1 if the checkpoint has none."""
    k_names, v_names = ((f"{prefix}{name}_proj.{name}_scale", f"{prefix}{name}_scale") for name in ("k", "v"))
    return weights.number(*k_names, default=1.0), weights.number(*v_names, default=1.0)


def _position(config: AttentionConfig, weights: Weights, prefix: str) -> Position:
    if config.rotary is None:
        assert config.head_norms is None, "norms of heads without rotary embedding have no kernel"
        return _nothing
    rotary = config.rotary.on(weights.device)
    if config.head_norms is None:
        return lambda q, k, positions: rotate(q, k, positions, rotary)
    norms = _head_norms(config.head_norms, config.head_dim, weights, prefix)
    return lambda q, k, positions: norm_and_rotate(q, k, norms, positions, rotary)


def _nothing(q: Tensor, k: Tensor, positions: Tensor) -> None:
    """Do nothing. Models without positional encoding see the order of tokens in their recurrent layers."""


def _head_norms(config: HeadNormConfig, head_dim: int, weights: Weights, prefix: str) -> HeadNorms:
    dtype = torch.float32 if config.offset else None  # a sum in bfloat16 would lose bits of the weight
    q_weight, k_weight = (
        weights.take(f"{prefix}{name}.weight", (head_dim,), dtype=dtype) for name in ("q_norm", "k_norm")
    )
    if config.offset:
        q_weight, k_weight = q_weight + config.offset, k_weight + config.offset
    return HeadNorms(q_weight, k_weight, config.eps)
