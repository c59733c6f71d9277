"""Blocks and states of preempted requests in host memory. They are restored bit for bit.

Choices that start from another choice's state (:mod:`engine.schedule.forks`) get their copies here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.memory.async_copy import Download, upload
from engine.memory.caches import Caches
from engine.schedule.step_plan import Fork, Swap


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
        stored = {id(one): one for one in self._stored.values()}  # forks share one copy
        return sum(one.kv.host.nbytes + one.state.host.nbytes for one in stored.values())

    def save(self, swaps: Iterable[Swap]) -> None:
        """Copies requests' blocks and states out of the pools, before other requests write there."""
        self._stored |= {swap.request_id: self._read(swap) for swap in swaps}

    def fork(self, forks: Iterable[Fork]) -> None:
        """Copies blocks and states of computed prompts for the choices that start from them."""
        caches = self._caches
        for fork in forks:
            source = fork.source
            for copy in fork.copies:
                last = source.block_ids[len(source.block_ids) - len(copy.block_ids) :]
                caches.kv_words.index_copy_(0, self._index(copy.block_ids), self._blocks(last))
                caches.state[copy.slot].copy_(caches.state[source.slot])
            if fork.stored:
                self._stored |= dict.fromkeys(fork.stored, self._read(source))

    def restore(self, swaps: Iterable[Swap]) -> None:
        """Copies blocks and states back into the blocks and the slots that the requests own now."""
        # The device copies in the order of these calls. So nobody has to wait until the copies to the host
        # have been made.
        for swap in swaps:
            stored = self._stored.pop(swap.request_id)
            kv = stored.kv.host.to(self._caches.kv.device, non_blocking=True)
            self._caches.kv_words.index_copy_(0, self._index(swap.block_ids), kv)
            self._caches.state[swap.slot].copy_(stored.state.host, non_blocking=True)

    def _read(self, swap: Swap) -> _Stored:
        return _Stored(Download(self._blocks(swap.block_ids)), Download(self._caches.state[swap.slot]))

    def _blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        return self._caches.kv_words.index_select(0, self._index(block_ids))

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return upload(np.array(block_ids, dtype=np.int64), self._caches.kv.device)

    def drop(self, request_id: str) -> None:
        """Drops the copies of a request that was cancelled while it was preempted."""
        self._stored.pop(request_id, None)
