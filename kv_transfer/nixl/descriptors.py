"""Turns block and slot ids of both sides into bounds-checked indices of descriptor lists. Pure arithmetic.

A list names every piece (:class:`kv_transfer.nixl.unit_cut.Piece`) of every block and slot. NIXL prepares the
list once for each peer; a read then only names indices (measured: 5 to 50 µs instead of 80 to 250 µs for a
read with its own descriptors). NIXL joins entries that are neighbours on both sides. Layouts name their axes,
and nothing is inferred from a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_transfer.nixl.unit_cut import Cut
from wire.errors import HandshakeError, TransferError
from wire.messages.handoff import RankMemory, Region
from wire.messages.layout import Layout

Descriptors = NDArray[np.uint64]
"""``[n, 2]``, one row per descriptor: address, bytes."""
Indices = NDArray[np.int64]
EPOCH_BYTES = 8
MAX_DESCRIPTORS = 1 << 22
"""Maximum number of descriptors of one pool or of an epoch table. With the copy that is made for NIXL
they take 160 MiB. No server has so many
blocks, but a peer could name any number."""


@dataclass(frozen=True)
class Share:
    """The pieces of a block and of a slot that are read from one rank of a peer."""

    block: Cut
    slot: Cut


def local_descriptors(layout: Layout, address: int, cut: Cut) -> Descriptors:
    """Returns the pieces of all units of our pool at ``address``.

    With ``P`` pieces per unit, piece ``p`` of unit ``u`` has index ``u P + p``.
    """
    return _descriptors(layout, address, [(piece.local, piece.num_bytes) for piece in cut])


def remote_descriptors(layout: Layout, address: int, cut: Cut) -> Descriptors:
    """Like :func:`local_descriptors`, for a peer's pool."""
    return _descriptors(layout, address, [(piece.remote, piece.num_bytes) for piece in cut])


def cells_of(epochs: Region) -> Descriptors:
    """Returns a descriptor for each cell of a table of epochs."""
    num_cells = epochs.num_bytes // EPOCH_BYTES
    _check_length(num_cells, "epochs")
    starts = np.arange(num_cells, dtype=np.uint64) * np.uint64(EPOCH_BYTES) + np.uint64(epochs.address)
    return np.stack([starts, np.full_like(starts, EPOCH_BYTES)], axis=1)


def own_list(ours: RankMemory, share: Share) -> Descriptors:
    """Returns the descriptors of our memory for reads from one rank of a peer: pieces of all blocks, then of
    all slots."""
    return np.concatenate(
        [
            local_descriptors(ours.kv_layout, ours.kv_region.address, share.block),
            local_descriptors(ours.state_layout, ours.state_region.address, share.slot),
        ]
    )


def peer_list(theirs: RankMemory, share: Share) -> Descriptors:
    """Like :func:`own_list`, for the memory of the peer's rank."""
    return np.concatenate(
        [
            remote_descriptors(theirs.kv_layout, theirs.kv_region.address, share.block),
            remote_descriptors(theirs.state_layout, theirs.state_region.address, share.slot),
        ]
    )


def null_indices(memory: RankMemory, share: Share) -> Indices:
    """Returns the indices of the null block and the null slot in :func:`own_list` or :func:`peer_list`."""
    num_block, num_slot = len(share.block), len(share.slot)
    first_of_slots = memory.kv_layout.num_units * num_block
    return np.concatenate([np.arange(num_block), first_of_slots + np.arange(num_slot)])


def _check_length(count: int, what: str) -> None:
    if count > MAX_DESCRIPTORS:
        raise HandshakeError(f"a list of {count} {what} is longer than the limit of {MAX_DESCRIPTORS}")


def _descriptors(layout: Layout, address: int, pieces: list[tuple[int, int]]) -> Descriptors:
    _check_length(layout.num_units * len(pieces), f"pieces of {layout.unit}s")
    starts = np.arange(layout.num_units, dtype=np.uint64) * np.uint64(layout.unit_bytes) + np.uint64(address)
    made = np.empty((layout.num_units, len(pieces), 2), dtype=np.uint64)
    for index, (offset, num_bytes) in enumerate(pieces):
        made[:, index, 0] = starts + np.uint64(offset)
        made[:, index, 1] = num_bytes
    return made.reshape(-1, 2)


@dataclass(frozen=True)
class UnitIndices:
    """Indices into both lists: entry ``remote[i]`` is read into entry ``local[i]``."""

    local: Indices
    remote: Indices
    num_runs: int
    """Number of reads that remain when entries that are neighbours on both sides are joined."""


def unit_indices(
    local: Layout, local_ids: Sequence[int], remote: Layout, remote_ids: Sequence[int], num_pieces: int
) -> UnitIndices:
    """Returns the indices that copy a peer's unit ``remote_ids[i]`` to our unit ``local_ids[i]``.

    Raises :class:`TransferError` for an id that is the null entry or outside its pool, and for lists of
    different length.
    """
    if len(local_ids) != len(remote_ids):
        raise TransferError(f"can't read {len(remote_ids)} {remote.unit}s into {len(local_ids)} of ours")
    ours, ours_run = _checked(local, local_ids, "this server's")
    theirs, theirs_run = _checked(remote, remote_ids, "the lending server's")
    if num_pieces == 1:
        return UnitIndices(ours, theirs, 1 if ours_run and theirs_run else _num_runs(ours, theirs))
    pieces = np.arange(num_pieces)
    ours, theirs = ((ids[:, None] * num_pieces + pieces).reshape(-1) for ids in (ours, theirs))
    return UnitIndices(ours, theirs, _num_runs(ours, theirs))


def _checked(layout: Layout, ids: Sequence[int], whose: str) -> tuple[Indices, bool]:
    """Returns the ids, and whether they are one run (each id is its predecessor plus 1).

    Most lists are one run. That case is found and checked without numpy: when a read has just filled the
    processor's caches with its data, each numpy function takes 10 µs. With numpy, a handoff of 4 MB took a
    tenth longer.
    """
    last = layout.num_units - 1
    # Compare the length before `range` makes a list: two ids of a peer may be millions apart.
    spans = bool(ids) and ids[0] >= 1 and ids[-1] <= last and ids[-1] - ids[0] == len(ids) - 1
    if spans and list(ids) == list(range(ids[0], ids[-1] + 1)):
        return np.arange(ids[0], ids[-1] + 1, dtype=np.int64), True
    try:
        array = np.array(ids, dtype=np.int64)
    except OverflowError:  # an id of more than 63 bits is outside any pool
        array = np.empty(0, dtype=np.int64)
        is_good = False
    else:
        is_good = len(array) == 0 or bool(array.min() >= 1 and array.max() <= last)
    if not is_good:
        bad = next(index for index in ids if not 1 <= index <= last)
        raise TransferError(f"{layout.unit} {bad} can't be read: {whose} pool has {layout.unit}s 1 to {last}")
    return array, False


def _num_runs(ours: Indices, theirs: Indices) -> int:
    if len(ours) == 0:
        return 0
    joined = (ours[1:] - ours[:-1] == 1) & (theirs[1:] - theirs[:-1] == 1)
    return len(ours) - int(np.count_nonzero(joined))
