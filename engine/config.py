"""The configuration of one engine. The command line makes it once, and this module checks it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_shard import shard_config, shard_spec
from engine.checkpoint.weight_dtype import WeightDtype
from engine.checkpoint.weights import LoadFormat
from engine.cost.speculative_state import SpeculativeState, check_speculative_state, kept_token_bytes
from engine.cost.step_memory import gpu_cache_bytes
from engine.device_faults import default_device
from engine.files.tier_settings import FileCache, check_tiers
from engine.group.data_parallel import ONLY_RANK, DataParallel
from engine.group.nodes import ONE_NODE, Nodes
from engine.memory.cache_formats import CacheFormats, ExactCuts, KvCacheDtype, SsmCacheDtype
from engine.memory.caches import CacheSpec
from engine.memory.eviction import CachePolicyName
from engine.parallel.expert_parallel import ExpertParallel, check_shares
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from engine.schedule.cache_modes import CacheModeName
from engine.schedule.capacity import Demand
from kernels.cpu.threads import set_kernel_threads
from wire.errors import ConfigError
from wire.idle_class import MAX_NICENESS
from wire.messages.handoff import Role

DType = Literal["auto", "float32", "bfloat16"]
DrafterName = Literal["mtp", "ngram"]

DEFAULT_CPU_CACHE_BYTES = 1 << 30
DEFAULT_STATE_BLOCK = 512
GPU_STEP_DEADLINE_S = 60.0
"""Steps on a GPU take up to some seconds, even if a step has to compile kernels first."""
MAX_SPECULATIVE = 15
"""Maximum number of drafts in a step. Further drafts would hardly ever be accepted, and each of them would
cost one state per request."""


@dataclass(frozen=True)
class EngineConfig:
    """Model, role, limits and memory of one engine.

    | role | does |
    |---|---|
    | prefill | computes all tokens of a prompt except the last one, and keeps the state |
    | decode | continues from such a state |
    | both | everything in one process: the monolithic baseline |
    """

    model_dir: Path
    role: Role
    load_format: LoadFormat = "auto"
    """``dummy`` makes random weights and needs only ``config.json``: to measure speed or try a set-up."""
    dtype: DType = "auto"
    weight_dtype: WeightDtype = "auto"
    """How a CPU keeps the weights of a float32 model's linear layers; ``auto`` loses nothing."""
    device: str = "auto"
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and answer together; None takes the checkpoint's own limit."""
    max_num_seqs: int = 64
    """Maximum number of requests that are admitted at the same time."""
    max_batch_tokens: int = 2048
    """Maximum number of tokens that a step computes, drafts included; longer prompts run in chunks."""
    long_prefill_threshold: int | None = None
    """A prompt of which more tokens are missing lets shorter ones pass; None takes ``max_batch_tokens``."""
    block_size: int = 16
    """Number of tokens that a KV block holds."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Number format of cached keys and values; fp8 takes half the memory of bfloat16."""
    mamba_ssm_cache_dtype: SsmCacheDtype = "auto"
    """Number format of recurrent states; bfloat16 takes half the memory of float32."""
    mamba_cache_stochastic_rounding: bool = False
    """Whether 16-bit states are rounded up or down at random, not to the nearest value."""
    batch_invariant: bool = False
    """Whether a row must have the same bits in every batch, on a GPU too (docs/batch-invariance.md)."""
    cache_mode: CacheModeName = "all"
    """Which Mamba states are kept for later requests; see :mod:`engine.schedule.cache_modes`."""
    cache_policy: CachePolicyName = "value"
    """What the prefix cache gives up first, and with ``value`` also where mode ``all`` keeps prompts' states:
    :mod:`engine.memory.eviction`."""
    state_block_size: int | None = None
    """Tokens between two states that mode ``all`` keeps; None: about 512, a multiple of ``block_size``. With
    ``cache_policy`` value, a number replaces the places in prompts that are learned otherwise."""
    cached_states: int | None = None
    """Slots for states that only the prefix cache holds; None: twice ``max_num_seqs``, or 0 in mode
    ``none``."""
    cache_memory_bytes: int | None = None
    """Budget of both pools; None takes a share of free GPU memory, or 1 GiB on a CPU."""
    host_cache_bytes: int = 0
    """Host memory of each rank for cached prefixes that the device gives up (:mod:`engine.memory.host_tier`);
    0: none."""
    file_cache: FileCache | None = None
    """Files behind host memory for cached prefixes (:mod:`engine.files`); None: none."""
    neighbour_wait_s: float = 0.0
    """A request waits this long for its prefix from another server, even if computing takes less time."""
    num_speculative: int = 0
    """k: tokens drafted in a step for each decoding request; 0 switches speculation off."""
    drafter: DrafterName | None = None
    """The drafter; None: the checkpoint's MTP layers if it has any, else n-gram prompt lookup."""
    speculative_state: SpeculativeState = "auto"
    """Where rows with drafts keep their recurrent states: see :mod:`engine.cost.speculative_state`."""
    ngram_min: int = 2
    """Shortest n-gram in tokens: lookup must find at least this many tokens again before it drafts."""
    ngram_max: int = 4
    """Longest n-gram in tokens; lookup tries this length first."""
    steps_ahead: int | None = None
    """How many further steps are launched before the tokens of a step are read back: 0 or 1. None: 1 on a
    GPU, 0 on a CPU or with ``sanitize``."""
    stream_interval_s: float | None = None
    """For how long decode steps follow each other before their tokens are sent together
    (:mod:`engine.step.burst`); 0: every step's tokens are sent. None: 0.025 on a CPU, 0 on a GPU, with
    several ranks, or with ``sanitize``."""
    step_deadline_s: float | None = None
    """A step that takes longer than this shows that the device hangs, and the process ends. 0: steps may take
    any time. None: 60 on a GPU, 0 on a CPU."""
    sanitize: bool = False
    """Whether every step checks that it reads the right blocks and states
    (:mod:`engine.sanitizer.sanitizer`)."""
    num_threads: int | None = None
    """CPU threads of each rank, for CPU kernels and torch; None leaves torch's choice."""
    niceness: int = 0
    """Niceness of the compute threads, 0 to 19. The higher it is, the more time other threads on the same
    cores get."""
    tensor_parallel: int = 1
    """Ranks that share the model: one process each, with its own GPU if there are GPUs."""
    nodes: Nodes = ONE_NODE
    """The hosts that the tensor-parallel ranks are spread over."""
    data_parallel: DataParallel = ONLY_RANK
    """This server's place among the data-parallel ranks. Each of these ranks serves requests of its own."""
    expert_parallel: bool = False
    """Whether the ranks of all data-parallel servers share the experts. Each expert is whole on one rank."""

    def __post_init__(self) -> None:
        if not self.model_dir.is_dir():
            raise ConfigError(
                f"`model_dir` {self.model_dir}: no such directory; give a checkpoint's directory"
            )
        for setting in (
            *("max_num_seqs", "max_batch_tokens", "block_size", "max_model_len", "cache_memory_bytes"),
            *("state_block_size", "num_threads", "tensor_parallel", "ngram_min", "long_prefill_threshold"),
        ):
            if (value := getattr(self, setting)) is not None and value < 1:
                raise ConfigError(f"`{setting}` must be at least 1, got {value}")
        for setting, most in (("niceness", MAX_NICENESS), ("num_speculative", MAX_SPECULATIVE)):
            if not 0 <= (value := getattr(self, setting)) <= most:
                raise ConfigError(f"`{setting}` must be from 0 to {most}, got {value}")
        for setting, dtype in (
            ("kv_cache_dtype", KvCacheDtype),
            ("mamba_ssm_cache_dtype", SsmCacheDtype),
            ("cache_policy", CachePolicyName),
            ("speculative_state", SpeculativeState),
        ):
            if (value := getattr(self, setting)) not in get_args(dtype):
                raise ConfigError(f"`{setting}` must be one of {', '.join(get_args(dtype))}, got {value!r}")
        if (deadline_s := self.step_deadline_s) is not None and not 0 <= deadline_s < math.inf:
            raise ConfigError(f"`step_deadline_s` must be at least 0, got {deadline_s}")
        if not 0 <= self.neighbour_wait_s < math.inf:
            raise ConfigError(f"`neighbour_wait_s` must be at least 0, got {self.neighbour_wait_s}")
        self._check_state_block_size()
        check_tiers(self.role, self.cache_mode, self.host_cache_bytes, self.file_cache)
        self._check_speculation()
        self._check_ranks()
        self._check_batch_tokens()

    def _check_batch_tokens(self) -> None:
        if self.max_batch_tokens >= self.max_num_seqs * self.num_positions:
            return
        each = "" if self.num_positions == 1 else f" x (1 + `num_speculative` {self.num_speculative})"
        raise ConfigError(
            f"`max_batch_tokens` {self.max_batch_tokens} is below `max_num_seqs` {self.max_num_seqs}{each}: "
            "a step must hold the decoded tokens of all running requests; raise the first or lower the second"
        )

    def _check_state_block_size(self) -> None:
        size = self.state_block_size
        if size is None:
            return
        if self.cache_mode != "all":
            raise ConfigError(
                f"`state_block_size` {size} means nothing in `cache_mode` {self.cache_mode}; "
                "leave it out, or choose mode all"
            )
        if size % self.block_size:
            raise ConfigError(
                f"`state_block_size` {size} is not a multiple of `block_size` {self.block_size}: "
                "a state is only useful where a block ends; choose a multiple"
            )

    def _check_speculation(self) -> None:
        if self.drafter not in (None, "mtp", "ngram"):
            raise ConfigError(f"`drafter` must be mtp or ngram, got {self.drafter!r}")
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"`ngram_max` {self.ngram_max} is below `ngram_min` {self.ngram_min}; "
                "raise the first or lower the second"
            )
        check_speculative_state(self)
        if self.steps_ahead not in (None, 0, 1):
            raise ConfigError(f"`steps_ahead` must be 0 or 1, got {self.steps_ahead}")
        if self.steps_ahead == 1 and self.sanitize:
            raise ConfigError(
                "`steps_ahead` 1 and `sanitize` exclude each other: the sanitizer compares each step with "
                "the results of the step before, so it waits for these; leave one of the two settings out"
            )

    def with_caches(self, model: ModelConfig) -> ModelConfig:
        """Returns the model's configuration with the cache formats that this configuration names.

        Raises :class:`ConfigError` if it names a format for a cache that the model does not have, or if it
        asks for stochastic rounding while states are kept in float32 and therefore not rounded.
        """
        formats = CacheFormats.named(
            self.kv_cache_dtype, self.mamba_ssm_cache_dtype, self.mamba_cache_stochastic_rounding
        )
        if formats.kv is not None and "attention" not in model.layer_types:
            raise ConfigError(
                f"`kv_cache_dtype` {self.kv_cache_dtype}: the checkpoint in {self.model_dir} has no "
                "attention layers, so it has no keys and values; leave it out"
            )
        if formats.ssm is not None and model.recurrent is None:
            raise ConfigError(
                f"`mamba_ssm_cache_dtype` {self.mamba_ssm_cache_dtype}: the checkpoint in {self.model_dir} "
                "has no recurrent layers, so it has no states; leave it out"
            )
        model = replace(model, cache_formats=formats)
        if formats.stochastic_rounding and model.ssm_dtype == torch.float32:
            raise ConfigError(
                "`mamba_cache_stochastic_rounding` rounds nothing where states are kept in float32; "
                "leave it out, or add `mamba_ssm_cache_dtype` bfloat16"
            )
        return model

    def _check_stateless(self) -> None:
        for setting in ("state_block_size", "cached_states"):
            if (value := getattr(self, setting)) is not None:
                raise ConfigError(
                    f"`{setting}` {value} means nothing for the model in {self.model_dir}: it has no "
                    "recurrent layers, so it has no states; leave it out"
                )

    def exact_cuts(self, spec: CacheSpec) -> ExactCuts | None:
        """Returns the places at which prompts may be cut into chunks; None: every place.

        Raises :class:`ConfigError` if ``state_block_size`` or ``max_batch_tokens`` does not fit these places.
        """
        cuts = ExactCuts.of(
            spec.kv_dtype, spec.ssm_dtype, has_state=spec.has_state, batch_invariant=self.batch_invariant
        )
        if cuts is None:
            return None
        size, unit = self.state_block_size, cuts.unit(self.block_size)
        if size is not None and size % unit:
            raise ConfigError(
                f"`state_block_size` {size} is not a multiple of {unit}: 16-bit states, and states of a "
                "`batch_invariant` engine, are kept only at common multiples of `block_size` "
                f"{self.block_size} and {cuts.grid} tokens; choose one"
            )
        decoded = 0 if self.role == "prefill" else self.max_num_seqs * self.num_positions
        if self.max_batch_tokens < decoded + cuts.grid:
            raise ConfigError(
                f"`max_batch_tokens` {self.max_batch_tokens} is below {decoded + cuts.grid}: it must hold "
                f"{decoded} decoded tokens and {cuts.grid} tokens of one prompt; raise it"
            )
        return cuts

    def state_block(self, unit: int) -> int:
        """Returns the tokens between two states that mode ``all`` keeps, a multiple of ``unit``."""
        return self.state_block_size or -(-DEFAULT_STATE_BLOCK // unit) * unit

    def _check_ranks(self) -> None:
        num_nodes = self.nodes.size
        if self.tensor_parallel % num_nodes:
            raise ConfigError(
                f"`tensor_parallel` {self.tensor_parallel} can't be divided among `nodes.size` {num_nodes} "
                "hosts: choose a multiple"
            )
        if num_nodes > 1 and self.data_parallel.size > 1:
            raise ConfigError(
                f"`nodes.size` {num_nodes} and `data_parallel.size` {self.data_parallel.size} exclude each "
                "other: a data-parallel rank runs on one host; leave out `nodes.size`, and start each host's "
                "data-parallel ranks on that host"
            )
        if self.expert_parallel and self.num_expert_ranks == 1:
            raise ConfigError(
                "`expert_parallel` needs ranks that share the experts: give `data_parallel.size` or "
                "`tensor_parallel`, or leave it out"
            )

    def check_experts(self, model: ModelConfig) -> None:
        """Raises :class:`ConfigError` if the ranks can't share the model's experts."""
        if not self.expert_parallel:
            return
        if model.moe is None:
            raise ConfigError(
                f"`expert_parallel`: the checkpoint in {self.model_dir} has no layers with experts; "
                "leave it out; `data_parallel.size` then starts ranks that are independent of each other"
            )
        check_shares(model.moe.num_experts, self.num_expert_ranks)

    @property
    def num_expert_ranks(self) -> int:
        """Processes that the experts are divided among."""
        return self.data_parallel.size * self.tensor_parallel

    def planned_rank(self) -> TensorParallel:
        """Returns a rank with the same shares as this server's ranks, for code that only computes sizes."""
        if not self.expert_parallel:
            return TensorParallel(0, self.tensor_parallel)
        experts = ExpertParallel(0, self.num_expert_ranks, tp_size=self.tensor_parallel)
        return TensorParallel(0, self.tensor_parallel, experts=experts)

    @property
    def is_lockstep(self) -> bool:
        """Whether this server computes every step together with other servers."""
        return self.expert_parallel and self.data_parallel.size > 1

    @property
    def num_positions(self) -> int:
        """Number of positions of a decode row: 1 + k, or 1 on a prefill server, which drafts nothing."""
        return 1 if self.role == "prefill" else 1 + self.num_speculative

    def resolve_drafter(self, model: ModelConfig) -> DrafterName | None:
        """Returns the drafter for this checkpoint; None without speculation.

        Raises :class:`ConfigError` if MTP layers are asked for and the checkpoint has none.
        """
        if self.num_speculative == 0:
            return None
        if self.drafter == "mtp" and model.mtp is None:
            raise ConfigError(
                f"`drafter` mtp: the checkpoint in {self.model_dir} has no MTP layers "
                "(num_nextn_predict_layers is 0 or missing); use `drafter` ngram"
            )
        return self.drafter or ("ngram" if model.mtp is None else "mtp")

    def loads_mtp(self, model: ModelConfig) -> bool:
        """Whether MTP layers are loaded and their KV is kept.

        A prefill server loads them too: it computes the MTP layers' KV, which is a part of each block that
        is handed over.
        """
        return self.resolve_drafter(model) == "mtp"

    def demand(
        self, model: ModelConfig, tp: TensorParallel = ALONE, *, device_type: str | None = None
    ) -> Demand:
        """Returns what the pools have to hold on each rank. ``device_type`` None: that of ``device``.

        Raises :class:`ConfigError` if the checkpoint was not made for this context length or this drafter,
        or if a setting has no meaning for this checkpoint, and :class:`ModelLoadError` as
        :meth:`ModelConfig.require_mtp` does.
        """
        model, limit = self.with_caches(model), model.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ConfigError(
                f"`max_model_len` {self.max_model_len} exceeds the {limit} tokens the checkpoint was made "
                "for; lower it"
            )
        spec = shard_spec(model, tp, mtp=self.loads_mtp(model))
        if not spec.has_state:
            self._check_stateless()
        self.exact_cuts(spec)
        return Demand(
            spec,
            role=self.role,
            max_model_len=self.max_model_len or limit,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            cache_mode=self.cache_mode,
            num_cached_states=self.cached_states,
            num_speculative=self.num_positions - 1,
            kept_token_bytes=self._kept_token_bytes(shard_config(model, tp), device_type),
        )

    def _kept_token_bytes(self, model: ModelConfig, device_type: str | None) -> int:
        if self.num_positions == 1:
            return 0
        return kept_token_bytes(self, model, device_type or self.resolve_device().type)

    def resolve_device(self, rank: int = 0) -> torch.device:
        """Returns the device of a rank; ``auto`` is the GPU if there is one.

        If several ranks run on one host, each has its own GPU. A GPU always has its index, because a thread
        can't make a GPU without an index current. Raises :class:`ConfigError` for ``auto`` if there is a GPU
        that CUDA can't use.
        """
        name = self.device
        if name == "auto":
            name = default_device()
        if name == "cuda":
            first_here = self.data_parallel.local_rank * self.tensor_parallel
            name = f"cuda:{first_here + rank - self.nodes.ranks(self.tensor_parallel).start}"
        return torch.device(name)

    def resolve_steps_ahead(self, device: torch.device) -> int:
        """Returns ``steps_ahead``, or its default.

        The default is 1 on a GPU, which computes the next step while the host handles the last step's tokens.
        It is 0 on a CPU, where a further step in flight saves no time, and 0 everywhere with the sanitizer.
        """
        if self.steps_ahead is not None:
            return self.steps_ahead
        return 1 if device.type == "cuda" and not self.sanitize else 0

    def resolve_step_deadline(self, device: torch.device) -> float:
        """Returns ``step_deadline_s``, or its default.

        On a CPU the default is 0: a step of a large model on few cores may take minutes, and kernels on a CPU
        do not hang.
        """
        if self.step_deadline_s is not None:
            return self.step_deadline_s
        return GPU_STEP_DEADLINE_S if device.type == "cuda" else 0.0

    def cache_budget(self, device: torch.device, step_bytes: int) -> int:
        """Returns the bytes for both pools on ``device``. Call it after the weights are loaded.

        ``step_bytes`` is the GPU memory that steps need beside the pools.
        """
        if self.cache_memory_bytes is not None:
            return self.cache_memory_bytes
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what loading the weights has freed is free only to torch until then
            free_bytes, _ = torch.cuda.mem_get_info(device)
            return gpu_cache_bytes(free_bytes, step_bytes)
        return DEFAULT_CPU_CACHE_BYTES

    def apply_threads(self, dtype: torch.dtype) -> None:
        """Sets the process's CPU threads, for a model of this dtype.

        With a float32 model torch gets one thread. On a CPU torch computes hardly any part of such a model,
        and its idle threads spin, which takes time from other threads on the same cores.
        """
        if self.num_threads is not None:
            num_threads = min(self.num_threads, os.cpu_count() or 1)
            set_kernel_threads(num_threads)
            torch.set_num_threads(1 if dtype == torch.float32 else num_threads)
