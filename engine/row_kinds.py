"""Which rows of a step are decode rows and which are prefill rows: decided from host integers.

| row | new tokens | tokens before | becomes |
|---|---|---|---|
| decode | 1, and up to k drafts | > 0 | decode row |
| recompute of token N, or a last chunk of one token | 1 | > 0 | decode row, prompt finished or not |
| first token of a prompt | 1 | 0 | prefill row, zero state |
| chunk | > 1 | any | prefill row |

A one-token row with a prior state must be a decode row: on the prefill path under a decode graph it
lost that state (vllm 42430). The first token of a prompt must not be one: it has no prior state. Where caches
round (:mod:`engine.memory.cache_formats`), it depends on the token's place alone: those before the prompt's
last one are chunks, of one token too, and no step with a chunk runs under a decode graph.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.memory.index_pool import NULL_INDEX
from engine.request import Request, StateBoundary


class PlannedRow(NamedTuple):
    """One request's share of a step: compute ``num_new`` tokens behind ``num_before``.

    A named tuple since each step makes one a request: in a third of a frozen dataclass' time.

    A decode row counts as one new token; drafts that turn out right come on top. Where an earlier step is
    still in flight, ``num_before`` of a decoding row is the least it can be: the device knows.
    """

    request: Request
    num_before: int
    num_new: int
    boundaries: tuple[StateBoundary, ...] = ()
    """States that are kept, in slots of their own: of a decode row at most one, and it may pass it later."""

    @property
    def is_decode(self) -> bool:
        request, num_before, num_new, _ = self
        return is_decode_row(num_new=num_new, num_before=num_before, chunks_until=request.chunks_until)

    @property
    def samples(self) -> bool:
        """Whether the row's last token is the newest known one, so that its logits choose the next."""
        request, num_before, num_new, _ = self
        return request.params is not None and num_before + num_new >= request.num_given

    @property
    def end(self) -> int:
        """Tokens before and new ones."""
        return self.num_before + self.num_new

    @property
    def write_slot(self) -> int:
        """Where the state after the row's last token goes: a slot of its own if that is kept."""
        last = self.boundaries[-1] if self.boundaries else None
        return last.slot if last is not None and last.length == self.end else self.request.memory.chunk_slot

    @property
    def next_token(self) -> int:
        """The prompt's token behind the row's last, or -1 where the row samples it."""
        return -1 if self.samples else self.request.tokens[self.end]


def decode_slots(row: PlannedRow, num_positions: int) -> list[int]:
    """Where a decode row leaves the state after each position: a kept one in its boundary's slot."""
    slots = row.request.memory.slots[:num_positions] or [NULL_INDEX] * num_positions
    for boundary in row.boundaries:
        if 0 < boundary.length - row.num_before <= num_positions:
            slots[boundary.length - row.num_before - 1] = boundary.slot
    return slots


def is_decode_row(*, num_new: int, num_before: int, chunks_until: int = 0) -> bool:
    """The table above; a token before place ``chunks_until`` is a chunk."""
    return num_new == 1 and num_before > 0 and num_before >= chunks_until
