"""At which lengths of a prompt its Mamba state is kept for later requests: one small class a mode.

| mode | states kept | how |
|---|---|---|
| `none` | the running one | |
| `align` | at chunk ends on a block boundary | the scheduler cuts chunks there |
| `all` | at every state-block boundary, prompt and answer | the scan writes them itself |

Both caching modes also keep the state at a prompt's last block boundary, where the same prompt or
the next turn of its conversation starts, and at a branch: where a request left a cached prefix that no
state could serve.

A model without recurrent layers needs no state: `align` and `all` are the same there, every full block of KV
is kept, and chunks run as they come.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from engine.request import Request

log = logging.getLogger(__name__)

CacheModeName = Literal["none", "align", "all"]


class CacheMode(Protocol):
    """Where states are kept. Lengths are in tokens from the prompt's start."""

    caches: bool
    """Whether anything is kept at all, KV included."""

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Where a chunk that could run from ``start`` to ``end`` has to stop."""

    def inner_boundaries(self, request: Request, start: int, end: int) -> list[int]:
        """Lengths strictly inside a chunk at which the scan has to write the state."""

    def keeps(self, request: Request, length: int) -> bool:
        """Whether the state at ``length``, where a chunk ends, is to be kept."""

    def next_kept(self, request: Request, length: int) -> int | None:
        """The first length beyond ``length`` at which a decode row's state is to be kept, if there is one."""


class NoStates:
    """No state is kept anywhere, and no chunk cut for one."""

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
    """Every request computes its whole prompt."""

    caches = False


class BlocksAlone(NoStates):
    """Of a model without recurrent layers: each full block of KV serves later requests by itself."""

    caches = True


class AlignedChunks:
    """States at chunk ends; needs no support from the scan."""

    caches = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """At the next wanted boundary, else, before the prompt's end, at a block boundary."""
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
        """A chunk of one token, which is a decode row, may end at a block boundary of the prompt."""
        following = length + 1
        return following if self.keeps(request, following) else None


class StateBlocks:
    """States at every multiple of ``state_block``; chunks run as they come."""

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
    """The prompt's last block boundary that leaves a token to compute, and the branch, if there is one."""
    lengths = (request.branch, request.num_given - 1)
    return tuple(length - length % block_size for length in lengths if length >= block_size)


def make_cache_mode(
    name: CacheModeName, block_size: int, state_block: int, *, has_state: bool = True
) -> CacheMode:
    """The mode of that name; states are kept at multiples of ``block_size`` or ``state_block`` tokens.

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
