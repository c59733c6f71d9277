"""A part of a transfer: some blocks, and with the last of them states, that are read from one peer at once.

Reading a part validates nothing: :mod:`kv_transfer.epoch_check` does that once for all parts of a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kv_transfer.agent import Ranges
from kv_transfer.descriptors import unit_spans
from kv_transfer.unit_cut import Cut
from wire.handoff import Region
from wire.layout import Layout


@dataclass(frozen=True)
class Part:
    """Unit ``remote_…[i]`` of the peer's pool is read into unit ``local_…[i]`` of ours."""

    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    local_slots: Sequence[int] = ()
    remote_slots: Sequence[int] = ()


class Pools(Protocol):
    """Where a server's two pools lie; a handshake's reply says it of a peer's."""

    @property
    def kv_layout(self) -> Layout: ...
    @property
    def state_layout(self) -> Layout: ...
    @property
    def kv_region(self) -> Region: ...
    @property
    def state_region(self) -> Region: ...


@dataclass(frozen=True)
class OwnPools:
    """This server's."""

    kv_layout: Layout
    state_layout: Layout
    kv_region: Region
    state_region: Region


@dataclass(frozen=True)
class Share:
    """What of a block and of a slot is read from one rank of a peer."""

    block: Cut
    slot: Cut


def part_ranges(part: Part, ours: Pools, theirs: Pools, share: Share) -> Ranges:
    """The part's addresses on both sides; :class:`TransferError` for a unit outside either side's pools."""
    blocks = unit_spans(ours.kv_layout, part.local_blocks, theirs.kv_layout, part.remote_blocks, share.block)
    slots = unit_spans(
        ours.state_layout, part.local_slots, theirs.state_layout, part.remote_slots, share.slot
    )
    ranges = np.empty((len(blocks) + len(slots), 3), dtype=np.uint64)
    for rows, spans, here, there in (
        (ranges[: len(blocks)], blocks, ours.kv_region, theirs.kv_region),
        (ranges[len(blocks) :], slots, ours.state_region, theirs.state_region),
    ):
        rows[:] = spans
        rows[:, 0] += np.uint64(here.address)
        rows[:, 1] += np.uint64(there.address)
    return ranges
