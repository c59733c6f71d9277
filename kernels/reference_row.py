"""Rows of a prefill batch as references take them: one after the other, its numbers on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.boundaries import Boundaries
from kernels.stochastic_round import GRID_TOKENS, StateRounding, round_bfloat16_reference


@dataclass(frozen=True)
class ReferenceRow:
    """One that has tokens and is no padding."""

    tokens: slice
    num_before: int
    """Tokens of its sequence before these."""
    read_slot: int | None
    """None: it starts from zeros."""
    stores: dict[int, int]
    """Slots by the number of its tokens behind which they receive the state; the last is the row's own."""

    def initial(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        """The state that the row starts from; ``pool`` ``[num_slots, …]``."""
        if self.read_slot is None:
            return torch.zeros(pool.shape[1:], dtype=dtype, device=pool.device)
        return pool[self.read_slot].to(dtype)

    def leave(self, pool: Tensor, offset: int, state: Tensor, rounding: StateRounding) -> Tensor:
        """Stores the state behind ``offset`` tokens where it is kept. Returns what the scan goes on from:
        a pool of 16 bits has it rounded there and at every multiple of GRID_TOKENS."""
        position = self.num_before + offset
        if pool.dtype == torch.bfloat16 and (position % GRID_TOKENS == 0 or offset in self.stores):
            rounded = round_bfloat16_reference(state.float(), torch.tensor(position), rounding)
            state = rounded.to(state.dtype)
        if offset in self.stores:
            pool[self.stores[offset]] = state
        return state


def reference_rows(
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    boundaries: Boundaries | None,
    num_before: Tensor | None = None,
) -> Iterator[ReferenceRow]:
    """The rows of a batch in order, but those that are empty or padding; waits for the device."""
    stores: list[dict[int, int]] = [{} for _ in write_slots]
    if boundaries is not None:
        columns = boundaries.rows, boundaries.offsets, boundaries.slots
        for row, offset, slot in zip(*(column.tolist() for column in columns), strict=True):
            stores[row][offset] = slot
    bounds = cu_seqlens.tolist()
    befores = [0] * len(stores) if num_before is None else num_before.tolist()
    slots = zip(read_slots.tolist(), write_slots.tolist(), has_initial.tolist(), strict=True)
    for row, (source, target, initial) in enumerate(slots):
        start, end = bounds[row], bounds[row + 1]
        if target != 0 and start != end:
            kept = stores[row] | {end - start: target}
            yield ReferenceRow(slice(start, end), befores[row], source if initial else None, kept)
