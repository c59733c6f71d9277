"""Decides at which lengths of a prompt its Mamba state is kept for later requests: one small class per mode.

| mode | states kept | how |
|---|---|---|
| `none` | only the newest, for the request itself | |
| `align` | at chunk ends on a block boundary | the scheduler cuts chunks there |
| `all` | at every multiple of the state block, in prompt and answer | the scan writes them |

The scan is the kernel that computes a chunk's states.

Both caching modes also keep the state at a prompt's last block boundary, where the same prompt or
the next turn of its conversation starts, and at a branch: the end of a prefix whose KV was cached while no
cached state reached that far.

A model without recurrent layers needs no state. `align` and `all` are the same for it: every full block of KV
is kept, and chunks are not cut.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from engine.request import Request

log = logging.getLogger(__name__)

CacheModeName = Literal["none", "align", "all"]


class CacheMode(Protocol):
    """Decides where states are kept. Lengths are in tokens from the prompt's start."""

    caches: bool
    """Whether anything is kept for later requests, be it KV or states."""

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

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Stops at the next boundary whose state has to be kept. If there is none, a chunk that does not
        reach the prompt's end stops at the last block boundary that it reaches."""
        wanted = [mark for mark in _marks(request, self._block_size) if start < mark < end]
        if wanted:
            return min(wanted)
        aligned = end - end % self._block_size
        return aligned if end < request.target and aligned > start else end

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        return []

    def keeps(self, request: Request, length: int) -> bool:
        return length % self._block_size == 0 and length < request.num_given

    def next_kept(self, request: Request, length: int) -> int | None:
        """Returns the next length if it is a block boundary of the prompt.

        A chunk of one token is a decode row and may end there.
        """
        following = length + 1
        return following if self.keeps(request, following) else None


class StateBlocks:
    """Keeps states at every multiple of ``state_block``; cuts no chunk."""

    caches = True

    def __init__(self, block_size: int, state_block: int) -> None:
        self._block_size = block_size
        self._state_block = state_block

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        return end

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        first = start + self._state_block - start % self._state_block
        lengths = set(range(first, end, self._state_block))
        lengths.update(mark for mark in _marks(request, self._block_size) if start < mark < end)
        return sorted(lengths)

    def keeps(self, request: Request, length: int) -> bool:
        return length % self._state_block == 0 or length in _marks(request, self._block_size)

    def next_kept(self, request: Request, length: int) -> int | None:
        regular = length + self._state_block - length % self._state_block
        if length >= request.num_given:
            return regular
        return min([regular, *(mark for mark in _marks(request, self._block_size) if mark > length)])


def _marks(request: Request, block_size: int) -> tuple[int, ...]:
    """Returns the branch, if there is one, and the last block boundary that leaves a token to compute."""
    lengths = (request.branch, request.num_given - 1)
    return tuple(length - length % block_size for length in lengths if length >= block_size)


def make_cache_mode(
    name: CacheModeName, block_size: int, state_block: int, *, has_state: bool = True
) -> CacheMode:
    """Makes the mode of that name, which keeps states at multiples of ``block_size`` or ``state_block``
    tokens.

    ``has_state``: whether the model has recurrent layers.
    """
    if name == "none":
        return NoCaching()
    if not has_state:
        log.info("cache mode %s: the model has no recurrent state, so every full block of KV is kept", name)
        return BlocksAlone()
    if name == "align":
        return AlignedChunks(block_size)
    return StateBlocks(block_size, state_block)
