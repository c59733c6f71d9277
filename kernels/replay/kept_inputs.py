"""Inputs that recurrent layers keep, so that one slot serves a row however many of its drafts are accepted.

A step runs the ``T = 1 + k`` positions of a row, and only the next step knows how many of them were accepted.
In the *slots* form, each position stores its state in a slot of its own. In the *replay* form, a row has one
slot. Its state is behind by the row's *pending* tokens, whose inputs were kept:

    tokens of the sequence    0 … L-a-1            L-a … L-1            L … L+T-1
                              in the slot's state  pending, a of them   new

A *replay* reads the state, advances it by the pending tokens and stores it, once. Then it runs the new
positions without storing states, and keeps their inputs. In the next step some of them are pending, and the
others are not looked at again. A *flush* only advances the state and stores it. That is needed before anybody
else reads it.

With S bytes of state, a step moves ``2 S`` bytes instead of ``(1 + T) S``. Outputs and states have the bits
of the slots form, because both forms compute a position with the same code and round states of 16 bits behind
every position.

A row of the kept inputs has ``P = 2 T`` places. The inputs of token p are at place ``p % P``. So the new
inputs overwrite no pending ones, and the programs of a launch need no order among them.

| op | replay | flush |
|---|---|---|
| causal_conv1d_update | `causal_conv1d_replay.py` | there too |
| selective_state_update | `selective_state_replay.py` | `selective_state_flush.py` |
| gated_delta_update | `gated_delta_replay.py` | `gated_delta_flush.py` |

All replays have in common: ``read_slots`` ``[R]`` and ``write_slots`` ``[R]`` are int32 and may be equal. The
state after the pending tokens goes to the write slot. If nothing is pending, nothing is stored, and the state
stays in the read slot. Rows with read slot 0 are padding: nothing of them is read, written or kept, and their
outputs are zero. No two rows have the same row of kept inputs or the same write slot. A flush may count fewer
tokens than are pending, with a write slot of its own: this stores an earlier state, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import as_array

NOTHING = np.empty(0, np.float32)
"""An operand of a CPU kernel that has no elements in the present call."""


@dataclass(frozen=True)
class PendingRows:
    """Where each row of a step keeps its inputs, and which of them its state lacks."""

    rows: Tensor
    """``[R]`` int64 rows of the kept inputs"""
    counts: Tensor
    """``[R]`` int32 number a of pending tokens, at most P - T"""
    seq_lens: Tensor
    """``[R]`` int32 tokens of the sequence, including the pending ones and the step's T new ones"""

    def arrays(self, places: int) -> tuple[Any, ...]:
        """Return a CPU kernel's arguments, for rows of so many places."""
        return as_array(self.rows), as_array(self.counts), places

    def without_new(self, num_positions: int) -> PendingRows:
        """Return the same rows before their ``num_positions`` new tokens."""
        return PendingRows(self.rows, self.counts, self.seq_lens - num_positions)


def kept_tensor(
    num_rows: int, num_positions: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return room for the inputs of ``num_rows`` rows: ``[num_rows, 2 T, *shape]``.

    CPU kernels keep float32, whatever the model's dtype is: it holds the values of all narrower ones.
    """
    if torch.device(device).type == "cpu" and dtype != torch.float64:
        dtype = torch.float32
    return torch.zeros((num_rows, 2 * num_positions, *shape), dtype=dtype, device=device)


@dataclass(frozen=True)
class ReferencePending:
    """A row that has pending tokens, with sizes on the host."""

    kept_row: int
    places: list[int]
    num_before: int
    """Tokens of the sequence before the first pending one."""
    read_slot: int
    write_slot: int


def reference_pending(
    read_slots: Tensor, write_slots: Tensor, pending: PendingRows, num_places: int
) -> Iterator[ReferencePending]:
    """Yield the rows of a flush that have pending tokens; waits for the device."""
    columns = read_slots, write_slots, pending.rows, pending.counts, pending.seq_lens
    for read, write, row, count, length in zip(*(column.tolist() for column in columns), strict=True):
        if read != 0 and count > 0:
            places = [p % num_places for p in range(length - count, length)]
            yield ReferencePending(row, places, length - count, read, write)


def reference_keep(kept: Tensor, values: Tensor, read_slots: Tensor, pending: PendingRows) -> None:
    """Keep ``values`` ``[R, T, …]`` of the new positions; waits for the device."""
    num_places, num_positions = kept.shape[1], values.shape[1]
    columns = read_slots, pending.rows, pending.seq_lens
    for r, (read, row, length) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        for i in range(num_positions if read != 0 else 0):
            kept[row, (length - num_positions + i) % num_places] = values[r, i].to(kept.dtype)


def flushed_slots(read_slots: Tensor, write_slots: Tensor, pending: PendingRows) -> Tensor:
    """Return the slot that has each row's state after a flush; 0 in padding rows."""
    return torch.where((read_slots != 0) & (pending.counts > 0), write_slots, read_slots)
