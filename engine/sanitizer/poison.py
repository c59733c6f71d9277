"""Fills memory that no request owns with NaN, so that a row that reads it gets logits that show the fault."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.memory.caches import Caches


class Poison:
    """Writes NaN to blocks, and to each segment of slots in the segment's dtype. Padding in slots stays
    zero."""

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
