"""The parts of an engine, made from its configuration: model, pools, scheduler, runner."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.cost.step_memory import StepMemory, captured_prompts
from engine.cost.step_size import StepSize
from engine.files.file_choices import FileChoices
from engine.files.file_tier import FileTier
from engine.files.neighbours import NoNeighbours, StartNeighbours
from engine.files.prompt_pace import PromptPace
from engine.files.read_cost import FileReadCost
from engine.files.start_files import NoFiles, StartFiles, StartForm
from engine.grammar.grammars import Grammars
from engine.grammar.source import GrammarSource, RemoteGrammars
from engine.memory.async_copy import check_host_has
from engine.memory.caches import Caches, CacheSpec
from engine.memory.eviction import EvictionPolicy, LruEviction
from engine.memory.host_tier import HostMemory, HostTier
from engine.memory.prefix_journal import PrefixJournal, Tier
from engine.memory.start_sizes import StartSizes
from engine.memory.state_placement import StatePlacement
from engine.memory.value_eviction import ValueEviction
from engine.models import load_model, read_config
from engine.models.causal_lm import CausalLM
from engine.parallel.tensor_parallel import TensorParallel
from engine.sanitizer.sanitizer import Sanitizer
from engine.schedule.cache_modes import make_cache_mode
from engine.schedule.capacity import CapacityPlan
from engine.schedule.host_store import HostStore
from engine.schedule.ownership import Ownership
from engine.schedule.scheduler import Scheduler
from engine.step.burst import MAX_STEPS, stream_interval
from engine.step.checks import Checks, NoChecks
from engine.step.row_table import RowTable
from engine.step.runner import StepRunner
from kernels.cpu.host_memory import keep_freed_memory
from kernels.gpu.current_device import use_device
from telemetry.start_up import StartUp

CPU_JOINED_PROMPT_TOKENS = 512
"""The most tokens of prompts that share a step on a CPU. A larger step computes a token no faster there, and
every prompt of a step waits for the step's end (docs/performance.md)."""
CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE = 10.0, 20_000.0
"""FLOP that a device computes of a prompt while it copies a byte from host memory: 50 GFLOP/s and 5 GB/s on a
CPU, 500 TFLOP/s and 25 GB/s on a GPU. Only the order of magnitude matters: a start that saves some hundred
tokens pays by far."""


@dataclass(frozen=True)
class EngineParts:
    """Parts of the engine of one server, or of one of its tensor-parallel ranks."""

    device: torch.device
    model: CausalLM
    fingerprint: str
    grammars: GrammarSource
    capacity: CapacityPlan
    caches: Caches
    sizes: StartSizes
    """What cached prompts weigh and save, for the whole model."""
    scheduler: Scheduler
    store: HostStore
    file_choices: FileChoices
    checks: Checks
    runner: StepRunner

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        tp: TensorParallel,
        start_up: StartUp,
        files: StartFiles | None = None,
        neighbours: StartNeighbours | None = None,
    ) -> EngineParts:
        """Reads the weights and allocates the pools; ``start_up`` is told when each stage ends. ``files`` and
        ``neighbours`` lie behind host memory; None: there are none.

        Raises :class:`wire.errors.ModelLoadError` if the checkpoint can't be loaded,
        :class:`wire.errors.ConfigError` if it does not allow the configuration, and
        :class:`wire.errors.CapacityError` if the memory is too small for the configuration.
        """
        device = config.resolve_device(tp.rank)
        use_device(device)
        if config.batch_invariant:
            tp = replace(tp, transport=tp.transport.in_rank_order())
        model_config = read_config(config.model_dir, config.dtype, device, config.weight_dtype)
        config.apply_threads(model_config.dtype)
        if device.type == "cpu":
            keep_freed_memory()
        start_up.ended("config")
        model = load_weights(config, model_config, device, tp, start_up)
        demand = config.demand(model_config, tp, device_type=device.type)
        prompts, most = captured_prompts(config), config.max_batch_tokens
        steps = StepMemory.of(model_config, demand, tp, max_batch_tokens=most, prompt_graphs=prompts)
        capacity = demand.within(tp.least(config.cache_budget(device, steps.total)))
        caches = _make_caches(config, demand.spec, capacity, device)
        digest = fingerprint(
            config.model_dir,
            model_config.dtype,
            config.load_format,
            stochastic_rounding=config.mamba_cache_stochastic_rounding,
            batch_invariant=config.batch_invariant,
            weight_dtype=config.weight_dtype,
        )
        grammars: GrammarSource = RemoteGrammars()
        if tp.rank == 0:
            vocab_size, eos_token_ids = model_config.vocab_size, model_config.eos_token_ids
            grammars = Grammars(config.model_dir, vocab_size, eos_token_ids)
        tier = _make_tier(config, model_config, capacity, device)
        files = files or NoFiles()
        neighbours = neighbours or NoNeighbours()
        file_tier = FileTier(tier, files.figures, neighbours.figures)
        scheduler = _make_scheduler(
            config, model_config, demand.spec, capacity, digest, device, tier, file_tier
        )
        if tier.memory.num_pages:
            form = _start_form(caches, tier.memory, digest, tp)
            files.open(form)
            neighbours.open(form)
        rows = RowTable(config.max_num_seqs, capacity.table_columns, config.num_positions)
        checks: Checks = Sanitizer(caches, scheduler, rows, tp) if config.sanitize else NoChecks()
        runner = StepRunner(config, model, caches, rows, capacity, checks)
        start_up.ended("pools")
        store = HostStore(caches, tier.memory, files, neighbours)
        return cls(
            *(device, model, digest, grammars, capacity, caches, _start_sizes(config, model_config)),
            *(scheduler, store),
            _make_choices(config, model_config, files, neighbours, scheduler.owned, device),
            *(checks, runner),
        )


def load_weights(
    config: EngineConfig, model: ModelConfig, device: torch.device, tp: TensorParallel, start_up: StartUp
) -> CausalLM:
    """Loads the model of an engine, as :func:`engine.models.load_model` does."""
    return load_model(
        config.model_dir,
        dtype=config.dtype,
        device=device,
        mtp=config.loads_mtp(model),
        tp=tp,
        load_format=config.load_format,
        batch_invariant=config.batch_invariant,
        weight_dtype=config.weight_dtype,
        start_up=start_up,
    )


def _make_caches(
    config: EngineConfig, spec: CacheSpec, capacity: CapacityPlan, device: torch.device
) -> Caches:
    return Caches(
        spec,
        num_blocks=capacity.num_blocks,
        num_slots=capacity.num_slots,
        block_size=config.block_size,
        device=device,
    )


def _make_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    spec: CacheSpec,
    capacity: CapacityPlan,
    fingerprint: str,
    device: torch.device,
    tier: HostTier,
    files: FileTier,
) -> Scheduler:
    cuts = config.exact_cuts(spec)
    unit = config.block_size if cuts is None else cuts.unit(config.block_size)
    has_state, state_block = capacity.has_state, config.state_block(unit)
    policy, placement = _make_policy(config, model, state_block)
    return Scheduler(
        capacity,
        make_cache_mode(config.cache_mode, unit, state_block, has_state=has_state, placement=placement),
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        num_positions=config.num_positions,
        fingerprint=fingerprint,
        cuts=cuts,
        long_prefill_threshold=config.long_prefill_threshold,
        joined_prompt_tokens=CPU_JOINED_PROMPT_TOKENS if device.type == "cpu" else None,
        burst_steps=MAX_STEPS if stream_interval(config, device) else 1,
        policy=policy,
        tier=tier,
        files=files,
    )


def _make_policy(
    config: EngineConfig, model: ModelConfig, state_block: int
) -> tuple[EvictionPolicy, StatePlacement | None]:
    """Makes what decides which states the prefix cache gives up, and what decides where it keeps them.

    The second is None if they are kept at fixed distances.
    """
    if config.cache_policy == "lru":
        return LruEviction(), None
    sizes = _start_sizes(config, model)
    eviction = ValueEviction(sizes)
    if config.cache_mode != "all" or config.state_block_size is not None:
        return eviction, None
    spacing = state_block // config.block_size
    moves_down = config.host_cache_bytes > 0
    return eviction, StatePlacement(sizes, lambda: eviction.price, spacing=spacing, moves_down=moves_down)


def _start_sizes(config: EngineConfig, model: ModelConfig) -> StartSizes:
    """Returns the sizes of the whole model: all ranks decide by them, because they have to decide alike."""
    size = StepSize.of(model)
    block_bytes = size.token_bytes * config.block_size
    return StartSizes(config.block_size, block_bytes, size.slot_bytes, size.token_flops, size.pair_flops)


def _make_tier(
    config: EngineConfig, model: ModelConfig, capacity: CapacityPlan, device: torch.device
) -> HostTier:
    """Makes what keeps cached prefixes in host memory. All ranks hold equal shares, so they have equal
    pages."""
    check_host_has(config.host_cache_bytes, "host_cache_bytes")
    memory = HostMemory.within(
        config.host_cache_bytes, block_bytes=capacity.block_bytes, slot_bytes=capacity.slot_bytes
    )
    flops_per_byte, sizes = _flops_per_byte(device), _start_sizes(config, model)
    pays = partial(sizes.is_worth_copying, flops_per_byte=flops_per_byte)
    costs = {Tier.HOST: sizes.read_cost(flops_per_byte)} if memory.num_pages else {}
    return HostTier(memory, pays=pays, journal=PrefixJournal(costs))


def _flops_per_byte(device: torch.device) -> float:
    return CPU_FLOPS_PER_BYTE if device.type == "cpu" else GPU_FLOPS_PER_BYTE


def _make_choices(
    config: EngineConfig,
    model: ModelConfig,
    files: StartFiles,
    neighbours: StartNeighbours,
    owned: Ownership,
    device: torch.device,
) -> FileChoices:
    """Makes what decides about cached prefixes in files and in other servers' host memory."""
    sizes, host = _start_sizes(config, model), owned.cache.tier
    pace = PromptPace(sizes, files.figures, device.type)
    to_device = sizes.read_cost(_flops_per_byte(device))
    return FileChoices(
        *(owned.files, host, files, neighbours, owned.look_ups),
        compute_s=pace.seconds,
        least_wait_s=0.0 if config.file_cache is None else config.file_cache.wait_s,
        neighbour_wait_s=config.neighbour_wait_s,
        read_cost=FileReadCost(files, pace, host.memory, config.block_size, to_device).now,
    )


def _start_form(caches: Caches, memory: HostMemory, fingerprint: str, tp: TensorParallel) -> StartForm:
    """Returns what has to be equal for a start in a file to be of use to this rank."""
    layouts = (
        caches.spec.kv_layout(1, caches.block_size),
        caches.spec.state_layout(1),
        caches.block_size,
        caches.device.type,
        *(tp.rank, tp.size),
    )
    digest = hashlib.sha256(repr(layouts).encode()).hexdigest()
    return StartForm(fingerprint, digest, memory.page_bytes, caches.spec.slot_bytes, memory.has_kv)
