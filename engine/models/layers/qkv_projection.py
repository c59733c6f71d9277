"""One product for attention's queries, keys and values, and for the output gate if the model has one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.mixer_config import AttentionConfig
from engine.checkpoint.weights import Weights, of_outputs
from engine.models.layers.linear import Linear
from engine.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Qkv:
    """Views of the product's output, ``[n, heads, head_dim]`` each."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None


class QkvProjection:
    """The projection for this rank's query heads and for the KV heads that these attend to.

    With an output gate, ``q_proj`` holds each head's query followed by its gate (Qwen3-Next).
    """

    def __init__(
        self, config: AttentionConfig, hidden_size: int, weights: Weights, prefix: str, tp: TensorParallel
    ) -> None:
        heads, kv_heads = tp.share(config.num_heads), tp.share_or_copy(config.num_kv_heads)
        self.head_dim = config.head_dim
        self.has_gate = config.output_gate
        q_dim = 2 * config.head_dim if config.output_gate else config.head_dim
        self.split = [
            len(heads) * q_dim,
            len(kv_heads) * config.head_dim,
            len(kv_heads) * config.head_dim,
        ]
        kv_part = of_outputs((kv_heads.start * config.head_dim, kv_heads.stop * config.head_dim))
        kv_size = config.num_kv_heads * config.head_dim
        q_part = of_outputs((heads.start * q_dim, heads.stop * q_dim))
        self.proj = Linear.take_joined(
            weights,
            [
                (f"{prefix}q_proj", config.num_heads * q_dim, q_part),
                (f"{prefix}k_proj", kv_size, kv_part),
                (f"{prefix}v_proj", kv_size, kv_part),
            ],
            hidden_size,
            bias=config.bias,
            scale=config.in_scale,
        )

    def __call__(self, x: Tensor) -> Qkv:
        """Project ``[n, hidden]``."""
        q, k, v = (
            part.view(len(x), part.shape[1] // self.head_dim, self.head_dim)
            for part in torch.split(self.proj(x), self.split, dim=1)
        )
        if not self.has_gate:
            return Qkv(q, k, v, None)
        return Qkv(q[:, ::2], k, v, q[:, 1::2])
