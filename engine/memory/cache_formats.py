"""Number formats of the caches. By default they follow from the checkpoint and ``dtype``.

A rounding error depends on the order of a sum, and on the places where a state is stored. To give the same
tokens on every server, engines with rounding caches, and batch-invariant engines, follow three extra rules
(:class:`ExactCuts`). ``grid`` is a number of tokens:

| rule | prevents |
|---|---|
| a prompt's last token is a decode row, all others are prefill rows, even a single one | other sum orders |
| a chunk ends before the prompt's last token or at a multiple of ``grid`` | roundings at other places |
| states are kept at multiples of ``grid`` | prefixes that are rounded where the whole prompt is not |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.formats.stochastic_round import GRID_TOKENS

KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
"""``auto``: the dtype of the model. The two other names mean float8_e4m3fn."""
SsmCacheDtype = Literal["auto", "float32", "bfloat16"]
"""``auto``: the checkpoint's ``mamba_ssm_cache_dtype``, or float32 if it names none."""


@dataclass(frozen=True)
class CacheFormats:
    """Number formats of both caches. None means the model's format."""

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
    """The places where prompts may be cut, so that the caches have the same content on every server."""

    grid: int
    """Number of tokens. It is 1 if only KV matters, because KV is stored token by token. Kernels compute
    states in chunks of at most GRID_TOKENS tokens: with this grid, a chunk always has the same tokens."""

    @classmethod
    def of(
        cls,
        kv_dtype: torch.dtype,
        ssm_dtype: torch.dtype,
        *,
        has_state: bool = True,
        batch_invariant: bool = False,
    ) -> ExactCuts | None:
        """Return the cuts for these dtypes; None if nothing is rounded and nothing has to be invariant."""
        if ssm_dtype != torch.float32 or (has_state and batch_invariant):
            return cls(GRID_TOKENS)
        return cls(1) if kv_dtype == torch.float8_e4m3fn or batch_invariant else None

    def unit(self, block_size: int) -> int:
        """Return the number of tokens at whose multiples states are kept."""
        return math.lcm(block_size, self.grid)

    def chunk_end(self, num_given: int, start: int, end: int) -> int:
        """Return the end of a chunk that starts at ``start`` and has room up to ``end``.

        ``num_given`` is the number of tokens that the request has from the start. Returns ``start`` if there
        is too little room.
        """
        last = num_given - 1
        if start >= last or end > last:
            return end if start >= last else last
        return end if end == last else end - end % self.grid
