"""In which number formats the caches are kept, where that is not what the checkpoint and ``--dtype`` say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
"""``auto``: the dtype of the model; the others are both float8_e4m3fn."""
KV_CACHE_DTYPES: tuple[KvCacheDtype, ...] = ("auto", "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class CacheFormats:
    """None: as the model has it."""

    kv: torch.dtype | None = None

    @classmethod
    def named(cls, kv: KvCacheDtype) -> CacheFormats:
        return cls(kv=None if kv == "auto" else torch.float8_e4m3fn)


AS_THE_MODEL = CacheFormats()
