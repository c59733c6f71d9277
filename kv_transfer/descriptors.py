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
    breaks = np.flatnonzero((np.diff(ours) != 1) | (np.diff(theirs) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(starts, append=len(ours))
    return np.stack([ours[starts], theirs[starts], lengths], axis=1) * unit_bytes


def _checked(layout: Layout, ids: Sequence[int], whose: str) -> NDArray[np.int64]:
    last = layout.num_units - 1
    try:
        array = np.array(ids, dtype=np.int64)
    except OverflowError:  # an id of more than 63 bits is outside any pool
        array = np.empty(0, dtype=np.int64)
        is_good = False
    else:
        is_good = bool(((array >= 1) & (array <= last)).all())
    if not is_good:
        bad = next(index for index in ids if not 1 <= index <= last)
        raise TransferError(
            f"{layout.unit} {bad} is not one that can be read: {whose} pool has {layout.unit}s 1 to {last}"
        )
    return array
