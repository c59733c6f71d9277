"""Which bytes go where: from block ids on both sides to few, long, bounds-checked spans.

Pure arithmetic over two :class:`Layout`; the layouts name their axes and nothing is inferred from a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import TransferError
from wire.layout import Layout


@dataclass(frozen=True)
class Span:
    """``num_bytes`` at ``remote`` of a peer's pool belong at ``local`` of ours; offsets in bytes."""

    local: int
    remote: int
    num_bytes: int


def unit_spans(
    local: Layout, local_ids: Sequence[int], remote: Layout, remote_ids: Sequence[int]
) -> list[Span]:
    """Spans that copy unit ``remote_ids[i]`` of a peer's pool to unit ``local_ids[i]`` of ours.

    Neighbours that are adjacent on both sides become one span. Raises :class:`TransferError` for an id that
    is the null entry or outside its pool, and for lists of different length.
    """
    if len(local_ids) != len(remote_ids):
        raise TransferError(f"{len(remote_ids)} {remote.unit}s can't be read into {len(local_ids)}")
    _check(local, local_ids, "this server's")
    _check(remote, remote_ids, "the prefill server's")
    unit_bytes = local.unit_bytes
    spans: list[Span] = []
    if unit_bytes == 0:
        return spans
    start = 0
    for i in range(1, len(local_ids) + 1):
        if i < len(local_ids) and (
            local_ids[i] == local_ids[i - 1] + 1 and remote_ids[i] == remote_ids[i - 1] + 1
        ):
            continue
        spans.append(
            Span(local_ids[start] * unit_bytes, remote_ids[start] * unit_bytes, (i - start) * unit_bytes)
        )
        start = i
    return spans


def _check(layout: Layout, ids: Sequence[int], whose: str) -> None:
    for index in ids:
        if not 1 <= index < layout.num_units:
            raise TransferError(
                f"{layout.unit} {index} is not one that can be read: {whose} pool has "
                f"{layout.unit}s 1 to {layout.num_units - 1}"
            )
