"""The cost of a longer context for a hybrid model, and for the same model with attention in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.scale.attention_alone import with_attention_alone
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.cost.goodput import ServerLimits
from engine.cost.gpu import GpuSpeed, gpu_costs
from engine.cost.step_cost import StepCosts
from engine.cost.step_memory import StepMemory, gpu_cache_bytes
from engine.cost.weight_size import weight_bytes
from engine.parallel.tensor_parallel import ALONE
from engine.schedule.capacity import Demand
from wire.errors import CapacityError

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288)


@dataclass(frozen=True)
class Growth:
    """The costs of one sequence of ``context`` tokens, or of a decode server full of such sequences."""

    model: str
    context: int
    sequence_bytes: int
    """Bytes of state and KV."""
    handoff_s: float
    prompt_s: float
    rows: int
    """Rows that fit into the GPU, at most ``max_num_seqs``; 0 if none fits."""
    step_s: float | None
    """Seconds of a step with that many rows."""
    tokens_per_s: float


def growth(
    model: ModelConfig, gpu: GpuSpeed, gpu_bytes: int, contexts: Iterable[int] = CONTEXTS
) -> Iterator[Growth]:
    """Yield the growth, of the hybrid model first. Lengths beyond the checkpoint's own limit are included."""
    for name, config in (("hybrid", model), ("attention alone", with_attention_alone(model))):
        costs = gpu_costs(config, gpu)
        for context in contexts:
            rows = _rows(config, gpu_bytes, context)
            step_s = costs.decode.seconds(rows, rows * context) if rows else None
            yield Growth(
                name,
                context,
                costs.handoff.num_bytes(context),
                costs.handoff.seconds(context),
                costs.prefill.prompt_s(context, EngineConfig.max_batch_tokens),
                rows,
                step_s,
                rows / step_s if step_s else 0.0,
            )


def decode_demand(
    model: ModelConfig, max_model_len: int, max_rows: int = EngineConfig.max_num_seqs
) -> Demand:
    """Return the demand of a decode server without a prefix cache."""
    return Demand(model.cache_spec(), "decode", max_model_len, max_rows, EngineConfig.block_size)


def limits_of(model: ModelConfig, gpu_bytes: int, max_model_len: int) -> ServerLimits:
    """Return the limits of servers with default flags. Raises :class:`CapacityError` if ``gpu_bytes`` is too
    small."""
    demand = decode_demand(model, max_model_len)
    plan = demand.within(_budget(model, demand, gpu_bytes))
    return ServerLimits(
        EngineConfig.max_batch_tokens, demand.max_num_seqs, plan.num_blocks - 1, plan.block_size
    )


def crossing(costs: StepCosts, other: StepCosts) -> float | None:
    """Return the context at which a row of ``other`` takes as long to read as one of ``costs``; None if there
    is none."""
    saved = other.decode.context_s - costs.decode.context_s
    return (costs.decode.row_s - other.decode.row_s) / saved if saved > 0 else None


def _budget(model: ModelConfig, demand: Demand, gpu_bytes: int) -> int:
    """Return the bytes of both pools of a server with default flags."""
    steps = StepMemory.of(model, demand, ALONE, max_batch_tokens=EngineConfig.max_batch_tokens)
    return gpu_cache_bytes(gpu_bytes - weight_bytes(model), steps.total)


def _rows(model: ModelConfig, gpu_bytes: int, context: int) -> int:
    """Return how many sequences of full length a decode server holds at once."""
    demand = decode_demand(model, context)
    budget = _budget(model, demand, gpu_bytes)
    for rows in range(demand.max_num_seqs, 0, -1):
        try:
            plan = replace(demand, max_num_seqs=rows).within(budget)
        except CapacityError:
            continue
        if plan.num_full_seqs >= rows:
            return rows
    return 0
