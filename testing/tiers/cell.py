"""One configuration of tiers, cache mode, drafts, ranks and number formats, and the grid of all of them.

| tiers | cached starts come from |
|---|---|
| device | the prefix cache alone |
| host | the prefix cache and host memory |
| files | the prefix cache, host memory and files, which the same server writes |
| restart | files that another server has written, after a restart; then as ``files`` |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from engine.config import EngineConfig
from engine.files.tier_settings import FileCache
from engine.models import read_config
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from wire.errors import ConfigError

Tiers = Literal["device", "host", "files", "restart"]
Mode = Literal["none", "align", "all"]
Drafter = Literal["ngram", "mtp"]
Device = Literal["cpu", "cuda"]

NUM_DRAFTS = 3
FEW = {"max_num_seqs": 8, "max_batch_tokens": 64, "max_model_len": 128, "block_size": 8}
"""Settings of a device that has room for few requests."""
CACHED_STATES = 2
HOST_BYTES = 2 << 20
"""Room for about ten starts, so that most prompts find theirs in files alone."""
FILE_BYTES = 256 << 20
WAIT_S = 30.0
"""Requests wait for their starts whatever computing takes: the grid is about tokens, not about time."""


@dataclass(frozen=True)
class Cell:
    """One configuration. What has a default is varied only in :data:`OTHERS`."""

    tiers: Tiers
    mode: Mode
    drafter: Drafter | None
    ranks: int
    kv: Literal["auto", "fp8"]
    model: str = "bundled"
    states: Literal["auto", "bfloat16"] = "auto"
    policy: Literal["value", "lru"] = "value"
    state_block_size: int | None = None
    steps_ahead: int = 0
    """With 1 there is no sanitizer: it compares each step with the one before."""
    is_encrypted: bool = False
    device: Device = "cpu"
    """On a GPU engines are batch-invariant: other kernels round a row by the batch that it is in."""

    def __str__(self) -> str:
        parts = [self.tiers, f"mode {self.mode}", f"k {NUM_DRAFTS} {self.drafter}" if self.drafter else "k 0"]
        parts += [f"{self.ranks} rank{'s' * (self.ranks > 1)}", f"KV {self.kv}"]
        usual = Cell(self.tiers, self.mode, self.drafter, self.ranks, self.kv)
        parts += [f"{name} {value}" for name, value in vars(self).items() if value != getattr(usual, name)]
        return ", ".join(parts)

    @property
    def reference(self) -> Cell:
        """The configuration with the same numbers and nothing that could change a token."""
        usual = Cell("device", "none", None, self.ranks, self.kv, model=self.model, states=self.states)
        return replace(usual, device=self.device)

    @property
    def configuration(self) -> Cell:
        """The same for all tiers."""
        return replace(self, tiers="device")

    @property
    def scale(self) -> int:
        """How much longer prompts are: states of 16 bits, and all of a batch-invariant engine on a GPU, are
        kept at multiples of 64 tokens only."""
        return 1 if self.states == "auto" and self.device == "cpu" else 3

    def file_cache(self, directory: Path) -> FileCache | None:
        if self.tiers not in ("files", "restart"):
            return None
        key_file = None
        if self.is_encrypted:
            key_file = directory / "key"
            key_file.parent.mkdir(parents=True, exist_ok=True)
            key_file.write_text("ab" * 32, encoding="utf-8")
        return FileCache(directory / "files", FILE_BYTES, wait_s=WAIT_S, key_file=key_file)

    def config(self, model_dir: Path, directory: Path, *, sanitize: bool = True) -> EngineConfig:
        """Returns the configuration with the least memory that it allows.

        Raises :class:`ConfigError` if the configuration is refused.
        """
        settings: dict[str, Any] = dict(FEW)
        settings["max_batch_tokens"] *= 1 if self.scale == 1 else 2
        settings["max_model_len"] *= self.scale
        if self.mode != "none":
            settings |= {"cached_states": CACHED_STATES, "state_block_size": self.state_block_size}
        if self.tiers != "device":
            settings["host_cache_bytes"] = HOST_BYTES
        config = EngineConfig(
            model_dir,
            "both",
            device=self.device,
            batch_invariant=self.device == "cuda",
            cache_mode=self.mode,
            cache_policy=self.policy,
            kv_cache_dtype=self.kv,
            mamba_ssm_cache_dtype=self.states,
            num_speculative=NUM_DRAFTS if self.drafter else 0,
            drafter=self.drafter,
            file_cache=self.file_cache(directory),
            tensor_parallel=self.ranks,
            num_threads=1,
            steps_ahead=self.steps_ahead,
            sanitize=sanitize and not self.steps_ahead,
            **settings,
        )
        tp = ALONE if self.ranks == 1 else TensorParallel(0, self.ranks)
        return replace(config, cache_memory_bytes=config.demand(read_config(model_dir), tp).min_bytes)

    def refusal(self, model_dir: Path, directory: Path) -> str | None:
        """Returns why the configuration is refused; None if it is not."""
        try:
            self.config(model_dir, directory)
        except ConfigError as error:
            return str(error)
        return None


Configuration = tuple[Mode, Drafter | None, int, Literal["auto", "fp8"]]
"""Cache mode, drafter, number of ranks, format of KV."""

FIRST: tuple[Configuration, ...] = (
    *(("align", "ngram", 1, "auto"), ("all", None, 1, "fp8"), ("all", "mtp", 1, "auto")),
    *(("none", None, 1, "auto"), ("none", "mtp", 1, "fp8"), ("all", "ngram", 1, "fp8")),
    *(("align", None, 1, "fp8"), ("align", "mtp", 1, "auto"), ("none", "ngram", 2, "fp8")),
    *(("all", "mtp", 2, "auto"), ("align", None, 2, "fp8")),
)
"""Every two values of different kinds occur together in one of these."""


def grid() -> Iterator[Cell]:
    """Yields all cells whose tiers their cache mode allows, those of one configuration behind one another.
    Those of :data:`FIRST` come first."""
    every = product(get_args(Mode), (None, *get_args(Drafter)), (1, 2), ("auto", "fp8"))
    for mode, drafter, ranks, kv in dict.fromkeys((*FIRST, *every)):
        for tiers in get_args(Tiers):
            if tiers == "device" or mode != "none":
                yield Cell(tiers, mode, drafter, ranks, kv)


OTHERS = (
    Cell("host", "all", None, 1, "auto", states="bfloat16"),
    Cell("files", "all", "ngram", 1, "fp8", states="bfloat16", policy="lru"),
    Cell("restart", "all", "ngram", 1, "fp8", states="bfloat16", policy="lru"),
    Cell("host", "align", "ngram", 1, "auto", model="dense", steps_ahead=1),
    Cell("files", "all", None, 1, "auto", model="dense", steps_ahead=1, state_block_size=64),
    Cell("restart", "all", None, 1, "auto", model="dense", steps_ahead=1, state_block_size=64),
    Cell("host", "all", "mtp", 1, "fp8", model="moe", state_block_size=64),
    Cell("files", "align", "mtp", 1, "fp8", model="moe", policy="lru", is_encrypted=True),
    Cell("restart", "align", "mtp", 1, "fp8", model="moe", policy="lru", is_encrypted=True),
    Cell("host", "all", "mtp", 2, "auto", model="dense", policy="lru"),
)
"""Other models, policies, places of states, formats of states, and steps in flight: each value at least once
with host memory and with files."""
