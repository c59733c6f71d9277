"""The layouts in which checkpoints store a Gated DeltaNet's input projections.

| `interleaved` | tensors and the order of their outputs |
|---|---|
| yes (Qwen3-Next) | `in_proj_qkvz`: q, k, v, z of key head 0, then of key head 1 …; `in_proj_ba` likewise |
| no (Qwen3.5) | `in_proj_qkv`: q, k, v of all heads; `in_proj_z`; `in_proj_b`; `in_proj_a` |

In v, z, b and a, each key head has the rows of its value heads, one after the other. This module makes two
products, (v, q, k, z) of all heads and (b, a). v, q and k pass the convolution, in the order of its channels;
z follows them. b and a stay a product of their own, because quantised checkpoints don't quantise b and a.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.checkpoint.mixer_config import GatedDeltaNetConfig
from engine.checkpoint.model_shard import GatedDeltaShard
from engine.checkpoint.weights import Weights, of_outputs
from engine.models.layers.linear import Linear
from wire.messages.layout import Ranges


def take_projections(
    shard: GatedDeltaShard, hidden_size: int, weights: Weights, prefix: str
) -> tuple[Linear, Linear]:
    """Load the rank's rows of ``(v, q, k, z)`` and of ``(b, a)``, both with ``hidden_size`` inputs."""
    config = shard.config
    qkv_size, heads = config.conv_channels, config.num_value_heads
    if config.interleaved:
        values_and_keys = [
            (f"{prefix}in_proj_qkvz", qkv_size + config.value_size, of_outputs(*_interleaved_qkvz(shard)))
        ]
        gates = [(f"{prefix}in_proj_ba", 2 * heads, of_outputs(*_interleaved_ba(shard)))]
    else:
        values_and_keys = [
            (f"{prefix}in_proj_qkv", qkv_size, of_outputs(*published_conv_rows(shard))),
            (f"{prefix}in_proj_z", config.value_size, of_outputs(*shard.value_rows)),
        ]
        part = of_outputs(*shard.head_rows)
        gates = [(f"{prefix}in_proj_b", heads, part), (f"{prefix}in_proj_a", heads, part)]
    return (
        Linear.take_joined(weights, values_and_keys, hidden_size),
        Linear.take_joined(weights, gates, hidden_size),
    )


def published_conv_rows(shard: GatedDeltaShard) -> Ranges:
    """Return the rank's rows of v, q and k in tensors stored as q, k, v: ``in_proj_qkv`` and ``conv1d``."""
    config = shard.config
    start, stop = (edge * config.key_head_dim for edge in (shard.key_heads.start, shard.key_heads.stop))
    first_k, first_v = config.key_size, 2 * config.key_size
    ((first, last),) = shard.value_rows
    return (first_v + first, first_v + last), (start, stop), (first_k + start, first_k + stop)


def _interleaved_qkvz(shard: GatedDeltaShard) -> Ranges:
    config = shard.config
    key_dim, value_dim, ratio = config.key_head_dim, config.value_head_dim, config.heads_per_key_head
    of_key_head = 2 * key_dim + 2 * ratio * value_dim
    first_v, first_z = 2 * key_dim, 2 * key_dim + ratio * value_dim
    return (
        *_of_value_heads(shard.heads, config, of_key_head, first_v, value_dim),
        *((g * of_key_head, g * of_key_head + key_dim) for g in shard.key_heads),
        *((g * of_key_head + key_dim, g * of_key_head + 2 * key_dim) for g in shard.key_heads),
        *_of_value_heads(shard.heads, config, of_key_head, first_z, value_dim),
    )


def _interleaved_ba(shard: GatedDeltaShard) -> Ranges:
    config = shard.config
    ratio = config.heads_per_key_head
    return (
        *_of_value_heads(shard.heads, config, 2 * ratio, 0, 1),
        *_of_value_heads(shard.heads, config, 2 * ratio, ratio, 1),
    )


def _of_value_heads(
    heads: Iterable[int], config: GatedDeltaNetConfig, of_key_head: int, first: int, size: int
) -> Ranges:
    """Return ``size`` rows for each value head.

    Each key head has ``of_key_head`` rows. Of these rows, those of its value heads start at row ``first``.
    """
    ratio = config.heads_per_key_head
    starts = [h // ratio * of_key_head + first + h % ratio * size for h in heads]
    return tuple((start, start + size) for start in starts)
