"""Decides at which lengths of a prompt its Mamba state is kept for later requests: one small class per mode.

| mode | states kept | how |
|---|---|---|
| `none` | only the newest, for the request itself | |
| `align` | at chunk ends on a block boundary | the scheduler cuts chunks there |
| `all` | at every multiple of the state block, in prompt and answer | the scan writes them |
| `all`, learned | where requests are expected to start; in answers as `all` | as `all` |

The scan is the kernel that computes a chunk's states.

`align` and `all` with fixed distances also *mark* two places of each prompt, and keep the states there: its
last block boundary, where the same prompt or the next turn of its conversation starts, and a branch: the end
of a prefix whose KV was cached while no cached state reached that far. Learned places are marks, too
(:mod:`engine.memory.state_placement`).

A model without recurrent layers needs no state. `align` and `all` are the same for it: every full block of KV
is kept, and chunks are not cut.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from engine.memory.cached_start import Match, Place
from engine.memory.state_placement import StatePlacement
from engine.request import Request

log = logging.getLogger(__name__)

CacheModeName = Literal["none", "align", "all"]


class CacheMode(Protocol):
    """Decides where states are kept. Lengths are in tokens from the prompt's start."""

    caches: bool
    """Whether anything is kept for later requests, be it KV or states."""

    def mark(self, request: Request, match: Match, block_size: int) -> dict[int, Place]:
        """Returns :attr:`engine.request.Request.marks` of a request that is admitted with this cached prefix.

        ``block_size`` is the number of tokens of the match's blocks. Called once for each request.
        """

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Returns the length at which a chunk has to stop. Without a cache it would run from ``start`` to
        ``end``."""

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        """Returns the lengths strictly inside a chunk at which the scan has to write the state."""

    def keeps(self, request: Request, length: int) -> bool:
        """Whether the state at ``length``, where a chunk ends, is to be kept."""

    def next_kept(self, request: Request, length: int) -> int | None:
        """Returns the first length greater than ``length`` at which a decode row's state is kept, if any."""


class NoStates:
    """Keeps no state anywhere and cuts no chunk."""

    caches: bool

    def mark(self, request: Request, match: Match, block_size: int) -> dict[int, Place]:
        return {}

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        return end

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        return []

    def keeps(self, request: Request, length: int) -> bool:
        return False

    def next_kept(self, request: Request, length: int) -> int | None:
        return None


class NoCaching(NoStates):
    """Caches nothing: every request computes its whole prompt."""

    caches = False


class BlocksAlone(NoStates):
    """Keeps each full block of KV, which serves later requests if the model has no recurrent layers."""

    caches = True


class AlignedChunks:
    """Keeps states at chunk ends; needs no support from the scan."""

    caches = True

    def __init__(self, unit: int) -> None:
        self._unit = unit

    def mark(self, request: Request, match: Match, block_size: int) -> dict[int, Place]:
        return _branch_and_end(request, match, block_size, self._unit)

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Stops at the next mark. If there is none, a chunk that does not reach the prompt's end stops at the
        last block boundary that it reaches."""
        for mark in request.marks:
            if start < mark < end:
                return mark
        aligned = end - end % self._unit
        return aligned if end < request.target and aligned > start else end

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        return []

    def keeps(self, request: Request, length: int) -> bool:
        return length % self._unit == 0 and length < request.num_given

    def next_kept(self, request: Request, length: int) -> int | None:
        """Returns the next length if it is a block boundary of the prompt.

        A chunk of one token is a decode row and may end there.
        """
        following = length + 1
        return following if self.keeps(request, following) else None


class StateBlocks:
    """Keeps states at every multiple of ``state_block``; cuts no chunk."""

    caches = True

    def __init__(self, unit: int, state_block: int) -> None:
        self._unit = unit
        self._state_block = state_block

    def mark(self, request: Request, match: Match, block_size: int) -> dict[int, Place]:
        return _branch_and_end(request, match, block_size, self._unit)

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        return end

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        lengths = set(range(self._next_multiple(start), end, self._state_block))
        lengths.update(mark for mark in request.marks if start < mark < end)
        return sorted(lengths)

    def keeps(self, request: Request, length: int) -> bool:
        return length % self._state_block == 0 or length in request.marks

    def next_kept(self, request: Request, length: int) -> int | None:
        regular = self._next_multiple(length)
        if length >= request.num_given:
            return regular
        return min([regular, *(mark for mark in request.marks if mark > length)])

    def _next_multiple(self, length: int) -> int:
        return length + self._state_block - length % self._state_block


class LearnedPlaces(StateBlocks):
    """Keeps prompts' states where requests are expected to start, and answers' states at every multiple of
    ``state_block``; cuts no chunk.
    """

    def __init__(self, unit: int, state_block: int, placement: StatePlacement) -> None:
        super().__init__(unit, state_block)
        self._placement = placement

    def mark(self, request: Request, match: Match, block_size: int) -> dict[int, Place]:
        start = len(match.nodes) * block_size
        marks: dict[int, Place] = {}
        for mark in self._placement.mark(match):
            length = _aligned(mark.num_blocks * block_size, self._unit)
            if length > start:
                marks[length] = mark.place
        return marks

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        # A request that was preempted computes its answer's tokens in chunks again.
        in_answer = range(self._next_multiple(max(start, request.num_given - 1)), end, self._state_block)
        return [*(mark for mark in request.marks if start < mark < end), *in_answer]

    def keeps(self, request: Request, length: int) -> bool:
        return length in request.marks or (length >= request.num_given and super().keeps(request, length))

    def next_kept(self, request: Request, length: int) -> int | None:
        if length < request.num_given - 1:
            for mark in request.marks:
                if mark > length:
                    return mark
        return self._next_multiple(max(length, request.num_given - 1))


def _branch_and_end(request: Request, match: Match, block_size: int, unit: int) -> dict[int, Place]:
    """Returns the branch, if there is one, and the last multiple of ``unit`` that leaves a token to
    compute."""
    end = _aligned(request.num_given - 1, unit)
    branch = _aligned(match.num_matched_blocks * block_size, unit) if match.beyond else 0
    marks = {branch: Place.BRANCH, end: Place.END} if branch < end else {end: Place.BRANCH}
    marks.pop(0, None)
    return marks


def _aligned(length: int, unit: int) -> int:
    return length - length % unit


def make_cache_mode(
    name: CacheModeName,
    unit: int,
    state_block: int,
    *,
    has_state: bool = True,
    placement: StatePlacement | None = None,
) -> CacheMode:
    """Makes the mode of that name, which keeps states at multiples of ``unit`` or ``state_block`` tokens.

    ``has_state``: whether the model has recurrent layers. ``placement``: chooses the places in prompts, in
    mode ``all``; None: they lie at fixed distances.
    """
    if name == "none":
        return NoCaching()
    if not has_state:
        log.info("cache mode %s: the model has no recurrent state, so every full block of KV is kept", name)
        return BlocksAlone()
    if name == "align":
        return AlignedChunks(unit)
    return (
        StateBlocks(unit, state_block) if placement is None else LearnedPlaces(unit, state_block, placement)
    )
