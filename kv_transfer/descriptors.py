"""Which bytes go where: from block ids on both sides to few, long, bounds-checked spans.

Pure arithmetic over two :class:`Layout`; the layouts name their axes and nothing is inferred from a size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.unit_cut import Cut, whole
from wire.errors import TransferError
from wire.layout import Layout

Spans = NDArray[np.int64]
"""``[n, 3]``: offset in our pool, offset in the peer's pool, length; all in bytes."""


def unit_spans(
    local: Layout,
    local_ids: Sequence[int],
    remote: Layout,
    remote_ids: Sequence[int],
    cut: Cut | None = None,
) -> Spans:
    """Spans that copy unit ``remote_ids[i]`` of a peer's pool, or a cut of it, to unit ``local_ids[i]``.

    Whole units that are neighbours on both sides become one span. Raises :class:`TransferError` for an id
    that is the null entry or outside its pool, and for lists of different length.
    """
    if len(local_ids) != len(remote_ids):
        raise TransferError(f"{len(remote_ids)} {remote.unit}s can't be read into {len(local_ids)}")
    ours = _checked(local, local_ids, "this server's")
    theirs = _checked(remote, remote_ids, "the prefill server's")
    unit_bytes = local.unit_bytes
    if unit_bytes == 0 or len(ours) == 0:
        return np.empty((0, 3), dtype=np.int64)
    if cut is not None and (cut != whole(local) or unit_bytes != remote.unit_bytes):
        starts = np.stack([ours * unit_bytes, theirs * remote.unit_bytes, np.zeros_like(ours)], axis=1)
        pieces = np.array([(one.local, one.remote, one.num_bytes) for one in cut], dtype=np.int64)
        return (starts[:, None] + pieces.reshape(1, -1, 3)).reshape(-1, 3)
    if len(ours) == 1:  # a state always is one
        return np.array([(ours[0], theirs[0], 1)], dtype=np.int64) * unit_bytes
    # Slices and assignments: np.diff and np.stack take several times as long for the few items there are.
    breaks = np.flatnonzero((ours[1:] != ours[:-1] + 1) | (theirs[1:] != theirs[:-1] + 1)) + 1
    bounds = np.empty(len(breaks) + 2, dtype=np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = 0, breaks, len(ours)
    starts = bounds[:-1]
    spans = np.empty((len(starts), 3), dtype=np.int64)
    spans[:, 0], spans[:, 1], spans[:, 2] = ours[starts], theirs[starts], bounds[1:] - starts
    return spans * unit_bytes


def _checked(layout: Layout, ids: Sequence[int], whose: str) -> NDArray[np.int64]:
    last = layout.num_units - 1
    try:
        array = np.array(ids, dtype=np.int64)
    except OverflowError:  # an id of more than 63 bits is outside any pool
        array = np.empty(0, dtype=np.int64)
        is_good = False
    else:
        is_good = len(array) == 0 or bool(array.min() >= 1 and array.max() <= last)
    if not is_good:
        bad = next(index for index in ids if not 1 <= index <= last)
        raise TransferError(
            f"{layout.unit} {bad} is not one that can be read: {whose} pool has {layout.unit}s 1 to {last}"
        )
    return array
