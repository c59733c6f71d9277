"""Fills memory that nobody owns with NaN: whoever reads it gets logits that show it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.memory.caches import Caches


class Poison:
    """NaN for blocks and, segment by segment in its dtype, for slots. Padding between segments stays zero."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        nan = torch.full((1,), torch.nan).to(caches.kv.dtype)
        self._nan = int(nan.view(caches.kv_words.dtype))
        self._state = torch.zeros(caches.state_layout.unit_bytes, dtype=torch.uint8)
        for segment in caches.state_layout.segments:
            values = self._state[segment.offset : segment.offset + segment.num_bytes]
            values.view(getattr(torch, segment.dtype)).fill_(float("nan"))
        self._state = self._state.to(caches.state.device)

    def blocks(self, block_ids: Tensor) -> None:
        self._caches.kv_words[block_ids] = self._nan

    def slots(self, slots: Tensor) -> None:
        self._caches.state[slots] = self._state
