"""A float32 copy of the few slots that one step touches, for CPU kernels over float32 pools.

numpy has no bfloat16, so a pool of another dtype can't be handed to numba. Only the slots that rows read and
write are copied, never the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StagedSlots:
    """Slot ``1 + r`` of ``pool`` is what row r reads; those for ``write_slots`` follow after all of these."""

    pool: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor

    @classmethod
    def gather(cls, pool: torch.Tensor, read_slots: torch.Tensor, write_slots: torch.Tensor) -> StagedSlots:
        """Copy the slots that are read, ``[R]``; null slots stay null and are not looked at."""
        num_rows = len(read_slots)
        ids = torch.arange(1, 1 + num_rows + write_slots.numel(), dtype=torch.int32)
        live = read_slots != 0
        staged = torch.empty((len(ids) + 1, *pool.shape[1:]), dtype=torch.float32)
        staged[ids[:num_rows][live]] = pool[read_slots[live]].float()
        return cls(
            pool=staged,
            read_slots=torch.where(live, ids[:num_rows], 0),
            write_slots=torch.where(write_slots != 0, ids[num_rows:].view(write_slots.shape), 0),
        )

    def scatter(self, pool: torch.Tensor, write_slots: torch.Tensor) -> None:
        """Store the states that the step wrote, all of ``write_slots`` but null, in the pool's dtype."""
        written = write_slots != 0
        pool[write_slots[written]] = self.pool[self.write_slots[written]].to(pool.dtype)
