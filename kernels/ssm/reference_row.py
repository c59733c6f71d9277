"""Rows of a batch as references take them: one after the other, their numbers on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats.stochastic_round import GRID_TOKENS, StateRounding, round_bfloat16_reference
from kernels.ssm.boundaries import Boundaries


@dataclass(frozen=True)
class ReferenceRow:
    """One that has tokens and is no padding."""

    tokens: slice
    num_before: int
    """Tokens of its sequence before these."""
    read_slot: int | None
    """None: it starts from zeros."""
    stores: dict[int, int]
    """Slots by the number of its tokens behind which they receive the state."""
    grid: int = GRID_TOKENS
    """A pool of 16 bits has the state rounded at its multiples in the sequence, and where it is stored."""

    def initial(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        """The state that the row starts from; ``pool`` ``[num_slots, …]``."""
        if self.read_slot is None:
            return torch.zeros(pool.shape[1:], dtype=dtype, device=pool.device)
        return pool[self.read_slot].to(dtype)

    def leave(self, pool: Tensor, offset: int, state: Tensor, rounding: StateRounding) -> Tensor:
        """Stores the state behind ``offset`` tokens where it is kept. Returns what the scan goes on from."""
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
        """Takes the row's state through ``tokens``: ``step(state, *token)`` is the next, and an output."""
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
    """The rows of a prefill batch in order, but those that are empty or padding; waits for the device."""
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
    """Decode rows, their positions side by side as tokens, but padding; waits for the device.

    Without seq_lens nobody may ask how many tokens a state has seen.
    """
    size = write_slots.shape[1]
    lengths = [size] * len(read_slots) if seq_lens is None else seq_lens.tolist()
    slots = zip(read_slots.tolist(), write_slots.tolist(), lengths, strict=True)
    for row, (source, targets, length) in enumerate(slots):
        if source != 0:
            kept = {offset: target for offset, target in enumerate(targets, start=1) if target != 0}
            yield ReferenceRow(slice(row * size, (row + 1) * size), length - size, source, kept, grid=1)
