"""A part of a transfer: blocks that are read together from one peer. The last part also has the state.

Reading a part validates nothing: :mod:`kv_transfer.reads.epoch_check` validates all parts of a transfer at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.memory.index_pool import NULL_INDEX
from kv_transfer.nixl.descriptors import Indices, Share, unit_indices
from kv_transfer.nixl.unit_cut import Cut
from wire.messages.handoff import RankMemory, UnitDigests


@dataclass(frozen=True)
class Part:
    """Block or slot ``remote_*[i]`` of the peer's pool is read into block or slot ``local_*[i]`` of our
    pool."""

    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    local_slots: Sequence[int] = ()
    remote_slots: Sequence[int] = ()
    digests: UnitDigests | None = None
    """What the lending server says that these units hold; None if it says nothing."""
    num_tokens: int = 0
    """The tokens of the whole prompt, if its last block, which may not be full, is in this part. Else 0."""

    @classmethod
    def last(
        cls,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        local_slot: int,
        remote_slot: int,
        *,
        digests: UnitDigests | None = None,
        num_tokens: int = 0,
    ) -> Part:
        """Returns a transfer's last part, with the state. Both slots are null if the model has no state.

        ``digests`` are those of the whole prompt, ``num_tokens`` its tokens.
        """
        if digests is not None:
            digests = UnitDigests(digests.blocks[len(digests.blocks) - len(remote_blocks) :], digests.state)
        return cls(local_blocks, remote_blocks, _named(local_slot), _named(remote_slot), digests, num_tokens)

    def pieces(self, num_blocks: int) -> Iterator[Part]:
        """Yields the part in pieces: the state, then ``num_blocks`` blocks at a time."""
        if self.local_slots:
            yield Part((), (), self.local_slots, self.remote_slots, self.digests)
        for first in range(0, len(self.remote_blocks), num_blocks):
            last = first + num_blocks
            digests = self.digests and UnitDigests(self.digests.blocks[first:last], 0)
            yield Part(
                self.local_blocks[first:last],
                self.remote_blocks[first:last],
                digests=digests,
                num_tokens=self.num_tokens if last >= len(self.remote_blocks) else 0,
            )


@dataclass(frozen=True)
class PartIndices:
    """A part as indices into the two lists that :mod:`kv_transfer.nixl.descriptors` makes per pair of
    ranks."""

    local: Indices
    remote: Indices
    num_bytes: int
    num_descriptors: int
    """Number of descriptors after those that are neighbours on both sides were joined."""


def _named(slot: int) -> tuple[int, ...]:
    return () if slot == NULL_INDEX else (slot,)


def part_indices(part: Part, ours: RankMemory, theirs: RankMemory, share: Share) -> PartIndices:
    """Returns the part's indices on both sides.

    Raises :class:`TransferError` for a unit outside either side's pools.
    """
    num_block, num_slot = len(share.block), len(share.slot)
    blocks = unit_indices(ours.kv_layout, part.local_blocks, theirs.kv_layout, part.remote_blocks, num_block)
    slots = unit_indices(
        ours.state_layout, part.local_slots, theirs.state_layout, part.remote_slots, num_slot
    )
    return PartIndices(
        np.concatenate([blocks.local, slots.local + ours.kv_layout.num_units * num_block]),
        np.concatenate([blocks.remote, slots.remote + theirs.kv_layout.num_units * num_block]),
        len(part.local_blocks) * _num_bytes(share.block) + len(part.local_slots) * _num_bytes(share.slot),
        blocks.num_runs + slots.num_runs,
    )


def _num_bytes(cut: Cut) -> int:
    return sum(piece.num_bytes for piece in cut)
