"""Which rows of a step are decode rows and which are prefill rows: decided from host integers.

| row | new tokens | tokens before | becomes |
|---|---|---|---|
| decode | 1 | > 0 | decode row |
| recompute of token N, or a last chunk of one token | 1 | > 0 | decode row, prompt finished or not |
| first token of a prompt | 1 | 0 | prefill row, zero state |
| chunk | > 1 | any | prefill row |

A one-token row with a prior state must be a decode row: on the prefill path under a decode graph it
lost that state (vllm 42430). The first token of a prompt must not be one: it has no prior state.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True, slots=True)
class StateBoundary:
    """The state after ``length`` tokens of a prompt is to be written to ``slot``."""

    length: int
    slot: int


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One request's share of a step: compute ``num_new`` tokens behind ``num_before``."""

    request: Request
    num_before: int
    num_new: int
    boundaries: tuple[StateBoundary, ...] = ()
    """States that the scan writes on its way through a prefill row."""

    @property
    def is_decode(self) -> bool:
        return is_decode_row(num_new=self.num_new, num_before=self.num_before)

    @property
    def samples(self) -> bool:
        """Whether the row's last token is the newest known one, so that its logits choose the next."""
        request = self.request
        return not request.prefill_only and self.num_before + self.num_new == len(request.tokens)


def is_decode_row(*, num_new: int, num_before: int) -> bool:
    """The table above."""
    return num_new == 1 and num_before > 0
