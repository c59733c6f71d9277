"""The least work of one engine step: floating-point operations and bytes of weights.

Operations are counted in the CPU paths' own forms: 2 per multiply-add, 5 per token and element of the
recurrence's state (decay, update, output). Norms, activations and the sampler are left out: a large GEMM
hides as many.
"""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from engine.cost.weight_size import weight_bytes


def step_flops(config: ModelConfig, num_tokens: int, num_logits: int, num_pairs: int) -> int:
    """Returns the FLOP of a step with ``num_tokens`` new tokens that attend to ``num_pairs`` tokens in total.

    After ``num_logits`` of them a token is sampled. MoE layers are not counted.
    """
    hidden = config.hidden_size
    mamba, attention = config.mamba, config.attention
    projections = mamba.proj_size + mamba.d_inner
    state_size = mamba.d_inner * mamba.state_size
    mamba_flops = 2 * hidden * projections + 2 * mamba.conv_width * mamba.conv_channels + 5 * state_size
    heads = 2 * (attention.num_heads + attention.num_kv_heads)
    total = num_tokens * config.layer_types.count("mamba") * mamba_flops
    attention_flops = num_tokens * 2 * hidden * heads * attention.head_dim
    attention_flops += num_pairs * 4 * attention.num_heads * attention.head_dim
    total += config.layer_types.count("attention") * attention_flops
    if config.mlp is not None:
        matrices = 3 if config.mlp.is_gated else 2
        mlp_flops = 2 * matrices * hidden * config.mlp.intermediate_size
        total += num_tokens * config.layer_types.count("mlp") * mlp_flops
    return total + num_logits * 2 * hidden * config.vocab_size


def read_weight_bytes(config: ModelConfig) -> int:
    """Returns the weight bytes that every step reads: all except the embedding, of which a step reads one row
    per token."""
    embedding = config.vocab_size * config.hidden_size * config.dtype.itemsize
    return weight_bytes(config) - (0 if config.tie_word_embeddings else embedding)
