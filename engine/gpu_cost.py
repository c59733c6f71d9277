"""Step costs of a model on a GPU of given rates, by ``config.json``: a model of the machine, no measurement.

Each step takes as long as its bytes or its FLOP take at the rates given, whichever is more. Rates should be
what kernels reach, not the data sheet's peaks. Not counted: activations, sampling, messages between
tensor-parallel ranks, drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model_config import ModelConfig
from engine.model_shard import shard_config, shard_spec
from engine.step_cost import DecodeCost, HandoffCost, PrefillCost, StepCosts, WeightCost
from engine.tensor_parallel import ALONE, TensorParallel
from engine.weight_size import weight_bytes

HANDOFF_LATENCY_S = 0.005
"""Assumed: messages between router and servers and their waits, which benchmarks/ttft.py finds to be about
that on two cores. It depends on hosts and network, not on the GPU."""


@dataclass(frozen=True)
class GpuSpeed:
    """What one GPU reaches."""

    flops_per_s: float
    bytes_per_s: float
    """Of its memory."""
    link_bytes_per_s: float
    """From another server's memory to its own."""
    step_s: float = 0.0
    """Launching a step and all else that neither bytes nor FLOP explain."""


@dataclass(frozen=True)
class _Weights:
    """Bytes of a rank's weights by when they are read."""

    body: int
    """In all layers, without routed experts."""
    experts: int
    head: int
    used: int
    """What one token uses of body and experts."""


def gpu_costs(config: ModelConfig, gpu: GpuSpeed, tp: TensorParallel = ALONE) -> StepCosts:
    """Costs of one server, of as many such GPUs as there are ranks."""
    weights, spec = _weights(config, tp), shard_spec(config, tp, mtp=False)
    itemsize = config.dtype.itemsize
    share = config.moe.experts_per_token / config.moe.num_experts if config.moe and weights.experts else 0.0

    def reading(num_bytes: int) -> WeightCost:
        return WeightCost(num_bytes / gpu.bytes_per_s, weights.experts / gpu.bytes_per_s, share)

    layer_s = 2 * weights.used / itemsize / gpu.flops_per_s
    heads = len(tp.share(config.attention.num_heads))
    pair_flops = 4 * heads * config.attention.head_dim * config.layer_types.count("attention")
    return StepCosts(
        PrefillCost(
            step_s=gpu.step_s,
            token_s=layer_s + _scan_flops(config, tp) / gpu.flops_per_s,
            pair_s=pair_flops / gpu.flops_per_s,
            weights=reading(weights.body),
        ),
        DecodeCost(
            step_s=gpu.step_s,
            row_s=2 * spec.slot_bytes / gpu.bytes_per_s,
            context_s=spec.block_bytes(1) / gpu.bytes_per_s,
            token_s=layer_s + 2 * weights.head / itemsize / gpu.flops_per_s,
            weights=reading(weights.body + weights.head),
        ),
        HandoffCost(HANDOFF_LATENCY_S, spec.slot_bytes, spec.block_bytes(1), gpu.link_bytes_per_s),
    )


def with_attention_alone(config: ModelConfig) -> ModelConfig:
    """The same model with an attention layer in place of each Mamba layer, to compare with."""
    replaced = {"mamba": "attention"}
    layer_types = tuple(replaced.get(layer, layer) for layer in config.layer_types)
    return replace(config, layer_types=layer_types)  # type: ignore[arg-type]


def _weights(config: ModelConfig, tp: TensorParallel) -> _Weights:
    itemsize, hidden = config.dtype.itemsize, config.hidden_size
    head = -(-config.vocab_size // tp.size) * hidden * itemsize
    table = config.vocab_size * hidden * itemsize  # looked up, hardly read
    outside = table if config.tie_word_embeddings else table + head
    layers = weight_bytes(config, tp) - outside
    if config.moe is None:
        return _Weights(layers, 0, head, layers)
    used_alone = replace(config.moe, num_experts=config.moe.experts_per_token)
    used = weight_bytes(replace(config, moe=used_alone), tp) - outside
    num_unused = config.moe.num_experts - config.moe.experts_per_token
    if num_unused == 0:
        return _Weights(layers, 0, head, layers)
    experts = (layers - used) * config.moe.num_experts // num_unused
    return _Weights(layers - experts, experts, head, used)


def _scan_flops(config: ModelConfig, tp: TensorParallel) -> float:
    """Of one token in all Mamba layers: within its chunk C B^T and its product with x, then states made and
    read (Dao and Gu, "Transformers are SSMs", 2024, section 6)."""
    mamba = shard_config(config, tp).mamba
    within = 2 * mamba.chunk_size * (mamba.num_groups * mamba.state_size + mamba.d_inner)
    across = 4 * mamba.d_inner * mamba.state_size
    return float((within + across) * config.layer_types.count("mamba"))
