"""Memory that a model's weights take, by its configuration alone.

The loader refuses a tensor whose shape is not what ``config.json`` says, so this is what loading allocates
on a GPU, whether the files are there or not. A tied output head counts once.
"""

from __future__ import annotations

import torch

from engine.model_config import AttentionConfig, LayerType, MambaConfig, MlpConfig, ModelConfig, MoeConfig
from engine.model_shard import shard_config
from engine.tensor_parallel import ALONE, TensorParallel


def weight_bytes(config: ModelConfig, tp: TensorParallel = ALONE, *, mtp: bool = False) -> int:
    """Bytes of a rank's weights in ``config.dtype``; what the recurrence and the router use stays float32.

    With ``mtp`` the MTP layer counts too; it shares embedding and output head.
    """
    hidden = config.hidden_size
    vocab_share = -(-config.vocab_size // tp.size)
    num_rows = config.vocab_size + (0 if config.tie_word_embeddings else vocab_share)
    total = num_rows * hidden + hidden  # and norm_f
    config = shard_config(config, tp)
    layer_types = config.layer_types
    if mtp:
        layer_types += config.require_mtp().layer_types
        total += _linear(hidden, 2 * hidden) + 3 * hidden  # eh_proj; enorm, hnorm, final_layernorm
    total_float32 = 0
    for layer_type in layer_types:
        elements, elements_float32 = _mixer(layer_type, config)
        total += hidden + elements  # norm, mixer
        total_float32 += elements_float32
    return total * config.dtype.itemsize + total_float32 * torch.float32.itemsize


def _mixer(layer_type: LayerType, config: ModelConfig) -> tuple[int, int]:
    """Elements in the model's dtype, and in float32."""
    hidden = config.hidden_size
    if layer_type == "mamba":
        return _mamba(config.mamba, hidden), 3 * config.mamba.num_heads  # A, D, dt_bias
    if layer_type == "attention":
        return _attention(config.attention, hidden), 0
    if layer_type == "mlp":
        assert config.mlp is not None
        return _mlp(config.mlp, hidden), 0
    assert config.moe is not None
    return _moe(config.moe, hidden), config.moe.num_experts * (hidden + 1)  # gate, correction


def _linear(out_features: int, in_features: int, bias: bool = False) -> int:
    return out_features * (in_features + bias)


def _mamba(config: MambaConfig, hidden: int) -> int:
    projections = _linear(config.proj_size, hidden, config.proj_bias)
    projections += _linear(hidden, config.d_inner, config.proj_bias)
    return projections + config.conv_channels * (config.conv_width + config.conv_bias) + config.d_inner


def _attention(config: AttentionConfig, hidden: int) -> int:
    return 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * hidden


def _mlp(config: MlpConfig, hidden: int) -> int:
    up, down = (config.intermediate_size, hidden), (hidden, config.intermediate_size)
    return _linear(*up, config.bias) + _linear(*down, config.bias)


def _moe(config: MoeConfig, hidden: int) -> int:
    size = config.latent_size or hidden
    experts = config.num_experts * 2 * config.intermediate_size * size
    latent = 0
    if config.latent_size is not None:
        latent = _linear(size, hidden, config.bias) + _linear(hidden, size, config.bias)
    return experts + latent + _mlp(MlpConfig(config.shared_intermediate_size, config.bias), hidden)
