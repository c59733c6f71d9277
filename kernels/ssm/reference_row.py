"""Rows of a batch, as the reference functions process them: one after the other, with sizes on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats.stochastic_round import GRID_TOKENS, StateRounding, round_bfloat16_reference
from kernels.ssm.boundaries import Boundaries


@dataclass(frozen=True)
class ReferenceRow:
    """A row that has tokens and is not padding."""

    tokens: slice
    num_before: int
    """Number of tokens of the sequence before the row's tokens."""
    read_slot: int | None
    """None: the row starts from zeros."""
    stores: dict[int, int]
    """For each number of the row's tokens after which the state is stored: the slot that receives it."""
    grid: int = GRID_TOKENS
    """With a pool of 16 bits, the state is rounded after each multiple of this many tokens of the sequence,
    and where it is stored."""

    def initial(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the state from which the row starts; ``pool`` ``[num_slots, …]``."""
        if self.read_slot is None:
            return torch.zeros(pool.shape[1:], dtype=dtype, device=pool.device)
        return pool[self.read_slot].to(dtype)

    def leave(self, pool: Tensor, offset: int, state: Tensor, rounding: StateRounding) -> Tensor:
        """Rounds and stores the state after ``offset`` tokens if required; returns the state to use next."""
        position = self.num_before + offset
        if pool.dtype == torch.bfloat16 and (position % self.grid == 0 or offset in self.stores):
            seen = torch.tensor(position, device=state.device)
            state = round_bfloat16_reference(state.float(), seen, rounding).to(state.dtype)
        if offset in self.stores:
            pool[self.stores[offset]] = state
        return state

    def scan(
        self,
        step: Callable[..., tuple[Tensor, Tensor]],
        tokens: Iterable[Iterable[Tensor]],
        pool: Tensor,
        out: Tensor,
        rounding: StateRounding,
    ) -> None:
        """Scans ``tokens``: ``step(state, *token)`` returns the next state and an output."""
        state = self.initial(pool, torch.promote_types(out.dtype, torch.float32))
        for offset, (token, out_t) in enumerate(zip(tokens, out[self.tokens], strict=True), start=1):
            state, out_t[:] = step(state, *token)
            state = self.leave(pool, offset, state, rounding)


def reference_rows(
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    boundaries: Boundaries | None,
    num_before: Tensor | None = None,
) -> Iterator[ReferenceRow]:
    """Yields a prefill batch's rows in order, without empty and padding rows; waits for the device."""
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


def reference_decode_rows(
    read_slots: Tensor, write_slots: Tensor, seq_lens: Tensor | None
) -> Iterator[ReferenceRow]:
    """Yields decode rows without padding, with their positions as consecutive tokens; waits for the device.

    Without seq_lens, ``num_before`` is 0 in all rows, which is wrong, so nothing may depend on it.
    """
    size = write_slots.shape[1]
    lengths = [size] * len(read_slots) if seq_lens is None else seq_lens.tolist()
    slots = zip(read_slots.tolist(), write_slots.tolist(), lengths, strict=True)
    for row, (source, targets, length) in enumerate(slots):
        if source != 0:
            kept = {offset: target for offset, target in enumerate(targets, start=1) if target != 0}
            yield ReferenceRow(slice(row * size, (row + 1) * size), length - size, source, kept, grid=1)
