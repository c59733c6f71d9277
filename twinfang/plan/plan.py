"""``twinfang plan``: how a server would divide a GPU's memory, computed from ``config.json`` without loading
anything.

:mod:`twinfang.plan.speed` adds how many requests per second the servers can serve.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_shard import check_divides
from engine.checkpoint.weights import weight_paths
from engine.config import DEFAULT_CPU_CACHE_BYTES, EngineConfig
from engine.cost.step_memory import GPU_CACHE_FRACTION, StepMemory, captured_prompts, gpu_cache_bytes
from engine.cost.weight_size import weight_bytes
from engine.memory.host_tier import HostMemory
from engine.models import read_config
from engine.schedule.capacity import CapacityPlan, Demand, size_text
from twinfang.plan.speed import SpeedPlan, SpeedQuestion
from wire.errors import CapacityError, ModelLoadError

GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """The sizes from which the cache budget is computed, in bytes."""

    weights: int
    has_mtp: bool
    """Whether MTP layers are among the weights."""
    quantization: str | None
    """The method of the weights' quantisation; None if they are not quantised."""
    weights_on_disk: int | None
    """None if the directory does not hold all safetensors of the checkpoint."""
    gpu: int | None
    """None for a server on a CPU, whose weights don't count against the budget."""
    cache_budget: int
    is_share: bool
    """Whether the budget is the default share of the GPU memory that the weights leave free."""
    steps: StepMemory
    """What a GPU's steps need beside weights and pools."""
    host_cache: HostMemory
    """Host memory for cached prompts."""
    files: HostMemory
    """Files for cached prompts, in pages of host memory."""

    def setting_for(self, num_bytes: int) -> str:
        """Returns the setting that gives a cache budget of at least ``num_bytes``."""
        if not self.is_share:
            return f"`cache_memory_bytes` {num_bytes}"
        free = max(math.ceil((num_bytes + 1) / GPU_CACHE_FRACTION), num_bytes + self.steps.total)
        return f"`gpu_memory` {self.weights + free}"

    @property
    def left(self) -> int:
        """Bytes of the GPU that neither weights nor pools get."""
        return (self.gpu or 0) - self.weights - self.cache_budget


def run(
    config: EngineConfig, *, gpu_bytes: int | None, as_json: bool, question: SpeedQuestion | None = None
) -> None:
    """Prints the plan as a table or as JSON, and the answer to ``question`` if there is one.

    Raises :class:`CapacityError` if the server does not fit, after printing the table.
    """
    device = "cpu" if gpu_bytes is None else "cuda"
    model = read_config(config.model_dir, config.dtype, device, config.weight_dtype)
    config.check_experts(model)
    check_divides(model, config.tensor_parallel, shares_experts=config.expert_parallel)
    demand = config.demand(model, config.planned_rank(), device_type=device)
    memory = _memory(config, model, demand, gpu_bytes)
    plan, refusal = None, None
    try:
        plan = demand.within(memory.cache_budget, memory.setting_for)
    except CapacityError as error:
        refusal = error
    speed = None
    if question is not None and plan is not None:
        speed = question.answer(config, model, memory.cache_budget)
    if as_json:
        figures = _figures(config, model, demand, memory, plan)
        print(json.dumps({**figures, "speed": speed and speed.figures()}, indent=2))
    else:
        print(_table(config, model, demand, memory, plan, speed))
    if refusal is not None:
        raise refusal


def prepare(values: argparse.Namespace, config: EngineConfig) -> Callable[[], None]:
    """Returns the function that ``twinfang plan`` runs."""
    gpu_bytes = None if values.gpu_memory is None else int(values.gpu_memory * GIB)
    question = SpeedQuestion.from_flags(values)
    return partial(run, config, gpu_bytes=gpu_bytes, as_json=bool(values.json), question=question)


def _memory(config: EngineConfig, model: ModelConfig, demand: Demand, gpu_bytes: int | None) -> Memory:
    rank, mtp = config.planned_rank(), config.loads_mtp(model)
    prompts, most = captured_prompts(config), config.max_batch_tokens
    steps = StepMemory.of(model, demand, rank, max_batch_tokens=most, prompt_graphs=prompts)
    weights = weight_bytes(model, rank, mtp=mtp)
    given = config.cache_memory_bytes
    if gpu_bytes is None:
        budget = DEFAULT_CPU_CACHE_BYTES if given is None else given
    else:
        taken = weights if given is None else weights + given
        if taken > gpu_bytes or weights == gpu_bytes:
            what = f"weights of {size_text(weights)}"
            what += "" if given is None else f" and --cache-memory of {size_text(given)}"
            raise CapacityError(
                f"{what} exceed --gpu-memory {size_text(gpu_bytes)}; choose a larger GPU or a smaller model"
                + ("" if given is None else ", or lower --cache-memory")
            )
        budget = gpu_cache_bytes(gpu_bytes - weights, steps.total) if given is None else given
    is_share = given is None and gpu_bytes is not None
    quantization = None if model.quantization is None else model.quantization.method
    on_disk = _bytes_on_disk(config.model_dir)
    host_cache = HostMemory.within(
        config.host_cache_bytes, block_bytes=demand.block_bytes, slot_bytes=demand.slot_bytes
    )
    file_bytes = 0 if config.file_cache is None else config.file_cache.num_bytes
    files = replace(host_cache, num_pages=file_bytes // host_cache.page_bytes)
    return Memory(weights, mtp, quantization, on_disk, gpu_bytes, budget, is_share, steps, host_cache, files)


def _bytes_on_disk(model_dir: Path) -> int | None:
    try:
        return sum(path.stat().st_size for path in weight_paths(model_dir))
    except ModelLoadError:
        return None


# --- JSON ------------------------------------------------------------------------------------------


def _figures(
    config: EngineConfig, model: ModelConfig, demand: Demand, memory: Memory, plan: CapacityPlan | None
) -> dict[str, object]:
    """Returns all values of the table, in bytes unless the name says otherwise. ``plan`` is null if the
    server does not fit."""
    return {
        "model": str(config.model_dir),
        "dtype": _name(model.dtype),
        "weight_dtype": model.weight_dtype,
        "role": demand.role,
        "max_model_len": demand.max_model_len,
        "max_num_seqs": demand.max_num_seqs,
        "block_size": demand.block_size,
        "kv_cache_dtype": _name(demand.spec.kv_dtype),
        "cache_mode": demand.cache_mode,
        "num_speculative": demand.num_speculative,
        "drafter": config.resolve_drafter(model),
        "speculative_state": "replay" if demand.replays else "slots",
        "tensor_parallel": config.tensor_parallel,
        "memory": {
            "gpu_bytes": memory.gpu,
            "weights_bytes": memory.weights,
            "weights_quantization": memory.quantization,
            "weights_on_disk_bytes": memory.weights_on_disk,
            "cache_budget_bytes": memory.cache_budget,
            "other_bytes": None if memory.gpu is None else memory.left,
            "steps_bytes": None if memory.gpu is None else memory.steps.total,
            "host_cache_bytes": memory.host_cache.num_bytes,
            "file_cache_bytes": memory.files.num_bytes,
        },
        "slot_bytes": demand.slot_bytes,
        "token_bytes": demand.token_bytes,
        "block_bytes": demand.block_bytes,
        "slots": {**asdict(demand.slots), "total": demand.slots.total, "bytes": demand.slots_bytes},
        "kept_bytes": demand.kept_bytes,
        "blocks_per_seq": demand.blocks_per_seq,
        "min_blocks": demand.min_blocks,
        "min_bytes": demand.min_bytes,
        "fits": plan is not None,
        "plan": plan
        and {
            "num_blocks": plan.num_blocks,
            "num_slots": plan.num_slots,
            "num_tokens": plan.num_tokens,
            "num_full_seqs": plan.num_full_seqs,
            "bytes": plan.num_bytes,
            "left_bytes": memory.cache_budget - plan.num_bytes,
        },
    }


# --- table -----------------------------------------------------------------------------------------

Row = tuple[str, str, str]
"""Name, explanation, value."""


def _table(
    config: EngineConfig,
    model: ModelConfig,
    demand: Demand,
    memory: Memory,
    plan: CapacityPlan | None,
    speed: SpeedPlan | None,
) -> str:
    dtype = _name(model.dtype)
    title = f"{config.model_dir.name}, {dtype}, role {demand.role}, cache mode {demand.cache_mode}"
    if config.tensor_parallel > 1:
        title += f", each of {config.tensor_parallel} ranks"
    sections: list[tuple[str, list[Row]]] = [
        ("memory", list(_memory_rows(memory))),
        ("one of each", list(_unit_rows(demand, model))),
        ("recurrent states", list(_slot_rows(demand))),
        ("KV", list(_block_rows(demand, memory, plan))),
    ]
    if speed is not None:
        sections.append(("speed, computed from the GPU's rates and not measured", list(speed.rows())))
    rows = [row for _, section in sections for row in section]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [title]
    for name, section in sections:
        lines += ["", name]
        for label, how, value in section:
            line = f"  {label:<{widths[0]}}  {how:<{widths[1]}}  {value:>{widths[2]}}"
            lines.append(line.rstrip())
    return "\n".join(lines)


def _memory_rows(memory: Memory) -> Iterable[Row]:
    on_disk = memory.weights_on_disk
    source = "by config.json" + (", MTP layers too" if memory.has_mtp else "")
    source += "" if memory.quantization is None else f", quantised ({memory.quantization})"
    source += "" if on_disk is None else f"; {size_text(on_disk)} on disk"
    if memory.gpu is None:
        yield "weights", source, size_text(memory.weights)
        yield "cache budget", "on a CPU, beside the weights", size_text(memory.cache_budget)
        yield from _tier_rows(memory)
        return
    yield "GPU", "", size_text(memory.gpu)
    yield "weights", source, size_text(memory.weights)
    how = f"at most {GPU_CACHE_FRACTION:.0%} of the rest" if memory.is_share else "--cache-memory"
    yield "cache budget", how, size_text(memory.cache_budget)
    yield "left for steps", f"they need {size_text(memory.steps.total)}", size_text(memory.left)
    yield from _tier_rows(memory)


def _tier_rows(memory: Memory) -> Iterable[Row]:
    for name, how, pages in (
        ("host memory", "--host-cache-size, beside all of the above", memory.host_cache),
        ("files", "--file-cache-size, on a disk", memory.files),
    ):
        if pages.num_pages:
            yield name, how, size_text(pages.num_bytes)
            holds = [f"{pages.num_pages // pages.state_pages} states"] if pages.state_pages else []
            holds += [f"{pages.num_pages} blocks"] if pages.has_kv else []
            yield "it holds", "or a mixture", " or ".join(holds)


def _unit_rows(demand: Demand, model: ModelConfig) -> Iterable[Row]:
    spec = demand.spec
    if spec.has_state:
        how = f"{_layers(spec.mamba_layers, 'recurrent')}, SSM {_name(spec.ssm_dtype)}"
        yield "state", how, size_text(demand.slot_bytes)
    if spec.has_kv:
        num_mtp = spec.attn_layers - model.layer_types.count("attention")
        of_mtp = f", {num_mtp} of them of MTP" if num_mtp else ""
        how = f"{_layers(spec.attn_layers, 'attention')}{of_mtp} in {_name(spec.kv_dtype)}"
        yield "token", how, size_text(demand.token_bytes)
        yield "block", f"{demand.block_size} tokens", size_text(demand.block_bytes)
        yield (
            "sequence",
            f"{demand.max_model_len} tokens = {demand.blocks_per_seq} blocks",
            size_text(demand.blocks_per_seq * demand.block_bytes),
        )


def _layers(num_layers: int, kind: str) -> str:
    return f"{num_layers} {kind} layer{'' if num_layers == 1 else 's'}"


def _slot_rows(demand: Demand) -> Iterable[Row]:
    if not demand.spec.has_state:
        yield "none", "no recurrent layers: nothing but KV is kept", size_text(0)
        return
    slots, seqs = demand.slots, demand.max_num_seqs
    each = "" if demand.replays else f" x (1 + {demand.num_speculative})"
    for label, how, number in (
        ("null", "", slots.null),
        ("running", f"{seqs} sequences{each}", slots.running),
        ("leased", f"{seqs} sequences", slots.leased),
        ("cached", "", slots.cached),
        ("being read", f"{seqs} sequences, less those cached", slots.read),
    ):
        if number:
            yield label, how, str(number)
    yield "slots", f"{slots.total} x {size_text(demand.slot_bytes)}", size_text(demand.slots_bytes)
    if demand.replays:
        how = f"2 x (1 + {demand.num_speculative}) tokens of {seqs} sequences"
        yield "inputs to replay", how, size_text(demand.kept_bytes)


def _block_rows(demand: Demand, memory: Memory, plan: CapacityPlan | None) -> Iterable[Row]:
    if not demand.spec.has_kv:
        limit = f"{demand.max_num_seqs} sequences of up to {demand.max_model_len} tokens"
        yield "none", f"no attention layers: the states are enough for {limit}", size_text(0)
        yield from _remainder(memory, plan, demand)
        return
    left = memory.cache_budget - demand.slots_bytes - demand.kept_bytes
    yield "left of the cache budget", "", _signed(left)
    needed = demand.min_blocks * demand.block_bytes
    yield "needed at least", f"{demand.min_blocks} blocks, the null one included", size_text(needed)
    if plan is not None:
        num_bytes = plan.num_blocks * plan.block_bytes
        yield "blocks", f"{plan.num_blocks}, the null one included", size_text(num_bytes)
        yield "tokens", "", str(plan.num_tokens)
        yield "sequences of full length", "", str(plan.num_full_seqs)
    yield from _remainder(memory, plan, demand)


def _remainder(memory: Memory, plan: CapacityPlan | None, demand: Demand) -> Iterable[Row]:
    if plan is None:
        yield "missing", "", size_text(demand.min_bytes - memory.cache_budget)
        return
    why = "not allocated: all sequences fit" if plan.num_blocks == demand.max_blocks else "less than a block"
    yield "left over", why, size_text(memory.cache_budget - plan.num_bytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _signed(num_bytes: int) -> str:
    return f"-{size_text(-num_bytes)}" if num_bytes < 0 else size_text(num_bytes)
