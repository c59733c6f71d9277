"""A float32 copy of the few slots that one step uses, for CPU kernels that need float32 pools.

numpy has no bfloat16, so a bfloat16 pool can't be passed to numba. The copy has only the slots that rows read
or write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StagedSlots:
    """``pool`` holds the slots that rows read or write, and the null slot. The indices refer to it."""

    pool: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor

    @classmethod
    def gather(cls, pool: torch.Tensor, read_slots: torch.Tensor, write_slots: torch.Tensor) -> StagedSlots:
        """Copy the slots in ``read_slots`` ``[R]``. The null slot keeps its number and is not copied."""
        num_rows = len(read_slots)
        named = torch.cat([read_slots.new_zeros(1), read_slots, write_slots.reshape(-1)])
        distinct, numbers = torch.unique(named, return_inverse=True)  # ascending: null is first
        numbers = numbers[1:].to(torch.int32)
        staged = torch.empty((len(distinct), *pool.shape[1:]), dtype=torch.float32)
        live = read_slots != 0
        staged[numbers[:num_rows][live]] = pool[read_slots[live]].float()
        return cls(staged, numbers[:num_rows], numbers[num_rows:].view(write_slots.shape))

    def scatter(self, pool: torch.Tensor, write_slots: torch.Tensor) -> None:
        """Copy the step's new states back to ``write_slots`` of the whole ``pool``. Skip the null slot."""
        written = write_slots != 0
        pool[write_slots[written]] = self.pool[self.write_slots[written]].to(pool.dtype)
