"""Blocks and states of preempted requests in host memory. They are restored bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.memory.caches import Caches
from engine.schedule.step_plan import Swap


@dataclass(frozen=True)
class _Stored:
    kv: torch.Tensor
    state: torch.Tensor


class HostStore:
    """Copies of the blocks and states of preempted requests, by request id."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._stored: dict[str, _Stored] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use now."""
        return sum(s.kv.numel() * s.kv.element_size() + s.state.numel() for s in self._stored.values())

    def save(self, swap: Swap) -> None:
        """Copies a request's blocks and state out of the pools, before another request writes there."""
        kv = self._caches.kv_words.index_select(0, self._index(swap))
        self._stored[swap.request_id] = _Stored(
            kv.to("cpu"), self._caches.state[swap.slot].to("cpu", copy=True)
        )

    def restore(self, swap: Swap) -> None:
        """Copies blocks and state back into the blocks and the slot that the request owns now."""
        stored = self._stored.pop(swap.request_id)
        device = self._caches.kv.device
        self._caches.kv_words.index_copy_(0, self._index(swap), stored.kv.to(device))
        self._caches.state[swap.slot] = stored.state.to(device)

    def _index(self, swap: Swap) -> torch.Tensor:
        return torch.tensor(swap.block_ids, dtype=torch.int64, device=self._caches.kv.device)

    def drop(self, request_id: str) -> None:
        """Drops the copies of a request that was cancelled while it was preempted."""
        self._stored.pop(request_id, None)
