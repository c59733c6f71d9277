"""Decides from host integers which rows of a step are decode rows and which are prefill rows.

| row | new tokens | tokens before | becomes |
|---|---|---|---|
| decode | 1, and up to k drafts | > 0 | decode row |
| token N after a handoff, or a last chunk of one token | 1 | > 0 | decode row, with the exception below |
| first token of a prompt | 1 | 0 | prefill row, zero state |
| chunk | > 1 | any | prefill row |

A one-token row with a prior state must be a decode row: when vLLM computed such a row on the prefill path
under a decode graph, the state was lost (vllm 42430). The first token of a prompt must not be a decode
row, since it has no prior state.

The exception: if the caches round their values, or the engine is batch-invariant
(:mod:`engine.memory.cache_formats`), a row's kind depends only on the place of its tokens. Tokens before the
prompt's last one are computed in chunks, even if a chunk has only one token. No step with a chunk runs under
a decode graph.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.memory.index_pool import NULL_INDEX
from engine.request import Request, StateBoundary


class PlannedRow(NamedTuple):
    """One request's row in a step: it computes ``num_new`` tokens after ``num_before`` earlier ones.

    It is a named tuple because each step makes one for every request, and making a frozen dataclass takes
    three times as long.

    A decode row counts as one new token here; its accepted drafts are counted when the step is read back.
    While an earlier step is in flight, ``num_before`` of a decoding row is a lower bound: only the device
    knows the exact number.
    """

    request: Request
    num_before: int
    num_new: int
    boundaries: tuple[StateBoundary, ...] = ()
    """Boundary states that are kept, each in its own slot. A decode row has at most one boundary.
    If drafts are rejected, its request may reach this boundary only in a later step."""

    @property
    def is_decode(self) -> bool:
        request, num_before, num_new, _ = self
        return is_decode_row(num_new=num_new, num_before=num_before, chunks_until=request.chunks_until)

    @property
    def samples(self) -> bool:
        """Whether the row's last token is the newest known token, so that its logits choose the next one."""
        request, num_before, num_new, _ = self
        return request.params is not None and num_before + num_new >= request.num_given

    @property
    def end(self) -> int:
        """Tokens before this row and new tokens together."""
        return self.num_before + self.num_new

    @property
    def write_slot(self) -> int:
        """Slot for the state after the row's last token: the boundary's own slot if that state is kept."""
        last = self.boundaries[-1] if self.boundaries else None
        return last.slot if last is not None and last.length == self.end else self.request.memory.chunk_slot

    @property
    def next_token(self) -> int:
        """The given token that follows the row's last token, or -1 if the row samples the next token."""
        return -1 if self.samples else self.request.tokens[self.end]


def decode_slots(row: PlannedRow, num_positions: int) -> list[int]:
    """Returns the slots in which a decode row leaves the state after each position.

    A state that is kept goes to its boundary's slot.
    """
    slots = row.request.memory.slots[:num_positions] or [NULL_INDEX] * num_positions
    for boundary in row.boundaries:
        if 0 < boundary.length - row.num_before <= num_positions:
            slots[boundary.length - row.num_before - 1] = boundary.slot
    return slots


def is_decode_row(*, num_new: int, num_before: int, chunks_until: int = 0) -> bool:
    """Whether a row is a decode row in the module's table. A row before place ``chunks_until`` is a chunk."""
    return num_new == 1 and num_before > 0 and num_before >= chunks_until
