"""In which number formats the caches are kept, where that is not what the checkpoint and ``dtype`` say.

What a format rounds off depends on the order of a sum, and on where a state is stored at all. So that the
same tokens come out whoever computes them, engines whose caches round differ in three ways from those that
don't (:class:`ExactCuts`):

| rule | keeps from |
|---|---|
| a prompt's last token is a decode row, all before it prefill rows, alone or not | another order of sums |
| a chunk ends at the prompt's last token or at a multiple of ``grid`` | roundings at other places |
| states are kept at multiples of the same | prefixes that are rounded where the whole prompt is not |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.formats.stochastic_round import GRID_TOKENS

KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
"""``auto``: the dtype of the model; the others are both float8_e4m3fn."""
SsmCacheDtype = Literal["auto", "float32", "bfloat16"]
"""``auto``: the checkpoint's ``mamba_ssm_cache_dtype``, float32 where it names none."""


@dataclass(frozen=True)
class CacheFormats:
    """None: as the model has it."""

    kv: torch.dtype | None = None
    ssm: torch.dtype | None = None
    stochastic_rounding: bool = False

    @classmethod
    def named(cls, kv: KvCacheDtype, ssm: SsmCacheDtype, stochastic_rounding: bool) -> CacheFormats:
        return cls(
            kv=None if kv == "auto" else torch.float8_e4m3fn,
            ssm={"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[ssm],
            stochastic_rounding=stochastic_rounding,
        )


AS_THE_MODEL = CacheFormats()


@dataclass(frozen=True)
class ExactCuts:
    """Where prompts may be cut so that a rounding cache holds the same whoever filled it."""

    grid: int
    """Tokens; 1 where only KV is rounded, which is done token by token."""

    @classmethod
    def of(cls, kv_dtype: torch.dtype, ssm_dtype: torch.dtype) -> ExactCuts | None:
        """None where nothing is rounded."""
        if ssm_dtype != torch.float32:
            return cls(GRID_TOKENS)
        return cls(1) if kv_dtype == torch.float8_e4m3fn else None

    def unit(self, block_size: int) -> int:
        """States are kept at multiples of it."""
        return math.lcm(block_size, self.grid)

    def chunk_end(self, num_given: int, start: int, end: int) -> int:
        """Where a chunk stops that has room from ``start`` to ``end``; ``start`` if it has too little."""
        last = num_given - 1
        if start >= last or end > last:
            return end if start >= last else last
        return end if end == last else end - end % self.grid
