"""Step costs of a model on a GPU with given rates. They are computed from ``config.json``, not measured.

Each step takes as long as its bytes or its FLOP take at the given rates, whichever is longer. Rates should be
those that kernels reach, not the data sheet's peaks. Activations, sampling, messages between tensor-parallel
ranks and drafts are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.model_config import ModelConfig
from engine.cost.step_cost import DecodeCost, HandoffCost, PrefillCost, StepCosts, WeightCost
from engine.cost.step_size import StepSize
from engine.parallel.tensor_parallel import ALONE, TensorParallel

HANDOFF_LATENCY_S = 0.005
"""Assumed time that messages between router and servers take, including waits. benchmarks/handoff/ttft.py
measures about this time on two cores. The time depends on hosts and network, not on the GPU."""


@dataclass(frozen=True)
class GpuSpeed:
    """Rates that one GPU reaches."""

    flops_per_s: float
    bytes_per_s: float
    """Rate of the GPU's memory."""
    link_bytes_per_s: float
    """Rate from another server's memory to this GPU's memory."""
    step_s: float = 0.0
    """Time to launch a step, and all other time of a step that depends neither on bytes nor on FLOP."""


def gpu_costs(config: ModelConfig, gpu: GpuSpeed, tp: TensorParallel = ALONE) -> StepCosts:
    """Computes the costs of one server with one such GPU for each rank."""
    size = StepSize.of(config, tp)

    def reading(num_bytes: int) -> WeightCost:
        return WeightCost(num_bytes / gpu.bytes_per_s, size.experts / gpu.bytes_per_s, size.expert_share)

    return StepCosts(
        PrefillCost(
            step_s=gpu.step_s,
            token_s=size.token_flops / gpu.flops_per_s,
            pair_s=size.pair_flops / gpu.flops_per_s,
            weights=reading(size.body),
        ),
        DecodeCost(
            step_s=gpu.step_s,
            row_s=size.row_state_bytes(1) / gpu.bytes_per_s,
            context_s=size.token_bytes / gpu.bytes_per_s,
            token_s=(2 * size.num_used + size.head_flops) / gpu.flops_per_s,
            weights=reading(size.body + size.head),
        ),
        HandoffCost(HANDOFF_LATENCY_S, size.slot_bytes, size.token_bytes, gpu.link_bytes_per_s),
    )
