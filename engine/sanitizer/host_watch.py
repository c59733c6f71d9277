"""The sanitizer's memory of what was demoted: whose prefix a page of host memory holds, and which bytes.

A start has to come back to the device as it left: with the same bytes, as the same prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.memory.host_tier import HostCopy
from engine.sanitizer.provenance import BlockTags
from engine.sanitizer.state_watch import StateAway, StateWatch
from wire.errors import SanitizerError

OWNER = "host memory"


@dataclass(frozen=True)
class _BlockAway:
    """Tag and checksum of a block."""

    digest: int
    length: int
    sum: int


class HostWatch:
    """Keeps tags and checksums by page. ``sum_blocks`` returns the checksums of whole blocks."""

    def __init__(
        self, blocks: BlockTags, states: StateWatch, sum_blocks: Callable[[Sequence[int]], list[int]]
    ) -> None:
        self._tags = blocks
        self._states = states
        self._sum_blocks = sum_blocks
        self._blocks_away: dict[int, _BlockAway] = {}
        self._states_away: dict[int, StateAway | None] = {}
        """By the first page of the state."""

    def demoted(self, copy: HostCopy) -> None:
        """Notes what was copied. The memory that it left is not written yet."""
        tags = self._tags.last(copy.block_ids)
        sums = self._sum_blocks(copy.block_ids) if copy.block_ids else []
        for page, (digest, length), sum_ in zip(copy.block_pages, tags, sums, strict=True):
            self._blocks_away[page] = _BlockAway(digest, length, sum_)
        if copy.state_pages:
            self._states_away[copy.state_pages[0]] = self._states.leave(copy.slot, OWNER)

    def promoted(self, copy: HostCopy) -> None:
        """Tags what was copied back. A state's bytes are compared before they are read.

        Raises :class:`SanitizerError` if a block has other bytes than it had when it was demoted.
        """
        if copy.block_ids:
            away = [self._blocks_away[page] for page in copy.block_pages]
            for block_id, page, one, found in zip(
                copy.block_ids, copy.block_pages, away, self._sum_blocks(copy.block_ids), strict=True
            ):
                if found != one.sum:
                    raise SanitizerError(
                        f"block {block_id}: expected the bytes that page {page} of host memory got when the "
                        f"device gave up a prefix of {one.length} tokens; found others"
                    )
            self._tags.write(
                np.array(copy.block_ids, dtype=np.int64),
                np.array([one.digest for one in away], dtype=np.uint64),
                np.array([one.length for one in away], dtype=np.int64),
            )
        if copy.state_pages:
            self._states.come_back(copy.slot, self._states_away[copy.state_pages[0]])
