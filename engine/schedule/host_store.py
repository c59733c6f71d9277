"""Blocks and states of preempted requests in host memory. They are restored bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.memory.async_copy import Download, upload
from engine.memory.caches import Caches
from engine.schedule.step_plan import Swap


@dataclass(frozen=True)
class _Stored:
    kv: Download
    state: Download


class HostStore:
    """Copies of the blocks and states of preempted requests, by request id."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._stored: dict[str, _Stored] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use now."""
        return sum(one.kv.host.nbytes + one.state.host.nbytes for one in self._stored.values())

    def save(self, swap: Swap) -> None:
        """Copies a request's blocks and state out of the pools, before another request writes there."""
        kv = self._caches.kv_words.index_select(0, self._index(swap))
        self._stored[swap.request_id] = _Stored(Download(kv), Download(self._caches.state[swap.slot]))

    def restore(self, swap: Swap) -> None:
        """Copies blocks and state back into the blocks and the slot that the request owns now."""
        # The device copies in the order of these calls. So nobody has to wait until the copies to the host
        # have been made.
        stored = self._stored.pop(swap.request_id)
        kv = stored.kv.host.to(self._caches.kv.device, non_blocking=True)
        self._caches.kv_words.index_copy_(0, self._index(swap), kv)
        self._caches.state[swap.slot].copy_(stored.state.host, non_blocking=True)

    def _index(self, swap: Swap) -> torch.Tensor:
        return upload(np.array(swap.block_ids, dtype=np.int64), self._caches.kv.device)

    def drop(self, request_id: str) -> None:
        """Drops the copies of a request that was cancelled while it was preempted."""
        self._stored.pop(request_id, None)
