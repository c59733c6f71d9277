"""Ranks on the CPUs of one machine, which exchange tensors through memory that they share."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.collectives.rank_memory import RankMemory
from wire.errors import GroupLostError

log = logging.getLogger(__name__)


class SharedMemory:
    """This rank's place in the memory. Sums add in the order of the ranks, whatever the tensor's size."""

    is_recorded = True

    def __init__(self, memory: RankMemory, size: int) -> None:
        self.memory = memory
        self._size = size

    @classmethod
    def meet(
        cls, rank: int, size: int, group: dist.ProcessGroup | None, limit_s: float
    ) -> SharedMemory | None:
        """Map the memory, together with the other ranks of ``group``.

        Its file has no name: it is a descriptor of rank 0, and goes with the processes. A rank that waits
        longer than ``limit_s`` for another one gives up. Return None, on all ranks alike, if the system
        refuses any of them; the reason is logged.
        """
        num_bytes = RankMemory.num_bytes(size)
        made: int | None = None
        fds: list[int] = []
        memory, refusal = None, None
        try:
            made = _new_file(num_bytes) if rank == 0 else None
        except (OSError, AttributeError) as error:
            refusal = error
        places = _gathered((os.getpid(), made), size, group)
        try:
            if refusal is None:
                memory = _map(places[0], num_bytes)
                fds = [os.pidfd_open(pid) for pid, _ in places[:rank] + places[rank + 1 :]]
        except (OSError, AttributeError) as error:
            refusal = error
        have_all = all(_gathered(refusal is None, size, group))
        if made is not None:
            os.close(made)  # every rank has mapped it
        if memory is None or not have_all:
            why = refusal or "the system refuses another rank"
            log.warning("tensor-parallel ranks exchange sums in messages, not in shared memory: %s", why)
            _close(fds)
            return None
        shared = cls(RankMemory(rank, memory, fds, limit_s=limit_s), size)
        weakref.finalize(shared, _close, fds)
        return shared

    def sum(self, x: Tensor) -> None:
        """See :meth:`engine.parallel.transport.Transport.sum`. Other floating-point types add in float32."""
        if not x.is_floating_point():
            parts = self.gather_columns(x.reshape(1, -1), self._size * x.numel())
            x.copy_(parts.view(self._size, *x.shape).sum(0))
        elif x.dtype == torch.float32 and x.is_contiguous():
            self.memory.sum(x)
            self.check()
        else:
            total = x.to(torch.float32, memory_format=torch.contiguous_format)
            self.sum(total)
            x.copy_(total)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """See :meth:`engine.parallel.transport.Transport.gather_columns`."""
        if x.itemsize < 4:
            return self.gather_columns(x.float(), width).to(x.dtype)
        gathered = self.memory.gather_columns(x, width)
        self.check()
        return gathered

    def in_rank_order(self) -> SharedMemory:
        """Return this transport: it always adds in the order of the ranks."""
        return self

    def check(self) -> None:
        """See :meth:`engine.parallel.transport.Transport.check`."""
        loss = self.memory.loss()
        if loss is None:
            return
        log.error("a step can't be completed: %s", loss)
        raise GroupLostError(f"{loss}; no tensor-parallel rank computes without it")


def _new_file(num_bytes: int) -> int:
    fd = os.memfd_create("twinfang-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def _map(place: tuple[int, int | None], num_bytes: int) -> Any:
    pid, fd = place
    if fd is None:
        raise OSError("rank 0 has no memory to share")
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(own, num_bytes), dtype=np.uint8)
    finally:
        os.close(own)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _gathered(value: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values
