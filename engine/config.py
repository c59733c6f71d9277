"""What one engine is told: built once by the command line, validated here, passed down."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.cache_modes import CacheModeName
from wire.errors import ConfigError
from wire.handoff import Role

DType = Literal["auto", "float32", "bfloat16"]

DEFAULT_CPU_CACHE_BYTES = 1 << 30
DEFAULT_STATE_BLOCK = 512
GPU_CACHE_FRACTION = 0.85
"""Of the memory that is free once the weights are loaded; the rest is for activations and graphs."""


@dataclass(frozen=True)
class EngineConfig:
    """One engine: model, role, limits and memory.

    | role | does |
    |---|---|
    | prefill | runs prompts up to their last but one token and keeps the state |
    | decode | carries on from such a state |
    | both | everything in one process: the monolithic yardstick |
    """

    model_dir: Path
    role: Role
    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    """Tokens of prompt and answer; None takes the checkpoint's own limit."""
    max_num_seqs: int = 64
    """Requests admitted at once."""
    max_batch_tokens: int = 2048
    """Tokens a step computes at most; longer prompts run in chunks."""
    block_size: int = 16
    """Tokens a KV block holds."""
    cache_mode: CacheModeName = "all"
    """Which Mamba states are kept for later requests; see :mod:`engine.cache_modes`."""
    state_block_size: int | None = None
    """Tokens between two states that mode ``all`` keeps; None: about 512, a multiple of ``block_size``."""
    cached_states: int | None = None
    """Slots for states that only the prefix cache holds; None: twice ``max_num_seqs``, none in mode none."""
    cache_memory_bytes: int | None = None
    """Budget of both pools; None takes a share of free GPU memory, or 1 GiB on a CPU."""
    num_threads: int | None = None
    """CPU threads of torch; None leaves torch's choice."""

    def __post_init__(self) -> None:
        if not self.model_dir.is_dir():
            raise ConfigError(f"--model {self.model_dir}: no such directory; give a checkpoint's directory")
        for flag, value in (
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-batch-tokens", self.max_batch_tokens),
            ("--block-size", self.block_size),
            ("--max-model-len", self.max_model_len),
            ("--cache-memory", self.cache_memory_bytes),
            ("--state-block-size", self.state_block_size),
            ("--threads", self.num_threads),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")
        self._check_state_block_size()
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-batch-tokens {self.max_batch_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                "a step must hold one token of every running request; raise the first or lower the second"
            )

    def _check_state_block_size(self) -> None:
        size = self.state_block_size
        if size is None:
            return
        if self.cache_mode != "all":
            raise ConfigError(
                f"--state-block-size {size} means nothing in --cache-mode {self.cache_mode}; "
                "leave it out, or choose mode all"
            )
        if size % self.block_size:
            raise ConfigError(
                f"--state-block-size {size} is not a multiple of --block-size {self.block_size}: "
                "a state is only useful where a block ends; choose a multiple"
            )

    @property
    def state_block(self) -> int:
        """Tokens between two states that mode ``all`` keeps."""
        return self.state_block_size or -(-DEFAULT_STATE_BLOCK // self.block_size) * self.block_size

    @property
    def num_cached_states(self) -> int:
        if self.cache_mode == "none":
            return 0
        return 2 * self.max_num_seqs if self.cached_states is None else self.cached_states

    def resolve_device(self) -> torch.device:
        """``auto`` is the GPU where there is one."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def cache_budget(self, device: torch.device) -> int:
        """Bytes for both pools on ``device``; asked after the weights are loaded."""
        if self.cache_memory_bytes is not None:
            return self.cache_memory_bytes
        if device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            return int(free_bytes * GPU_CACHE_FRACTION)
        return DEFAULT_CPU_CACHE_BYTES

    def apply_threads(self) -> None:
        """Sets torch's CPU threads for the process."""
        if self.num_threads is not None:
            torch.set_num_threads(min(self.num_threads, os.cpu_count() or 1))
