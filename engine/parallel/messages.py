"""Ranks that exchange tensors in messages of torch.distributed: NCCL among GPUs, gloo among hosts' CPUs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Messages:
    """The ranks of one process group. A collective that fails raises torch's error."""

    size: int
    group: dist.ProcessGroup | None = None
    """The group of these ranks, if torch's default process group has other ranks too."""
    adds_in_rank_order: bool = False
    """Whether this process adds, in the order of the ranks. If not, a collective adds. Its order depends on
    the tensor's size, and therefore on the batch."""
    is_recorded = False

    def sum(self, x: Tensor) -> None:
        """See :meth:`engine.parallel.transport.Transport.sum`."""
        if self.adds_in_rank_order and x.is_floating_point():
            x.copy_(functools.reduce(torch.add, (part.float() for part in self._parts(x))))
        else:
            dist.all_reduce(x, group=self.group)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """See :meth:`engine.parallel.transport.Transport.gather_columns`."""
        return torch.cat(self._parts(x), dim=-1)[:, :width]

    def in_rank_order(self) -> Messages:
        """See :meth:`engine.parallel.transport.Transport.in_rank_order`."""
        return replace(self, adds_in_rank_order=True)

    def check(self) -> None:
        """Do nothing: a collective that fails raises an error by itself."""

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Return the ranks' ``x`` in their order."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts
