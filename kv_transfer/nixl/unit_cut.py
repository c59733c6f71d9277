"""Computes how one rank's unit (a block or a slot) is put together from units of a peer's ranks.

Both sides describe the content of a unit by ranges of the whole model's heads and channels
(:attr:`wire.messages.layout.Segment.ranges`): KV heads are one range, the convolution's channels three
(x, B, C), SSM heads one per layer. Each of our ranges is looked up in the peer's ranges, so the two servers
may have any numbers of ranks. If several ranks of the peer hold a copy of a head, our ranks choose different
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import HandshakeError
from wire.messages.layout import Layout, Segment


@dataclass(frozen=True)
class Piece:
    """``num_bytes`` at ``remote`` in a peer's unit belong at ``local`` in ours; offsets in bytes."""

    local: int
    remote: int
    num_bytes: int


Cut = tuple[Piece, ...]
"""The pieces of our unit that come from one rank of the peer; may be empty."""


def whole(layout: Layout) -> Cut:
    """Returns the cut that takes a whole unit."""
    return (Piece(0, 0, layout.unit_bytes),) if layout.unit_bytes else ()


def cut_unit(local: Layout, remotes: Sequence[Layout], *, rank: int) -> list[Cut]:
    """Returns the pieces of one unit that our rank ``rank`` reads from each of the peer's ranks.

    Raises :class:`HandshakeError` if the peer's ranks together lack a part of our unit.
    """
    if len(remotes) == 1 and local.same_unit(remotes[0]):
        return [whole(local)]
    cuts: list[list[Piece]] = [[] for _ in remotes]
    for index, segment in enumerate(local.segments):
        theirs = [remote.segments[index] for remote in remotes]
        offset = segment.offset
        for start, stop in segment.ranges:
            while start < stop:
                owner, remote_offset, end = _owner(theirs, start, rank)
                end = min(stop, end)
                piece = Piece(offset, remote_offset, (end - start) * segment.axes[0].stride)
                _append(cuts[owner], piece)
                offset += piece.num_bytes
                start = end
    return [tuple(cut) for cut in cuts]


def _owner(segments: Sequence[Segment], entry: int, rank: int) -> tuple[int, int, int]:
    """Returns the peer's rank from which our ``rank`` reads an entry, and the two values that :func:`_find`
    returns for that rank's segment."""
    places = [(i, _find(segment, entry)) for i, segment in enumerate(segments)]
    held = [(i, *place) for i, place in places if place is not None]
    if not held:
        name = segments[0].axes[0].name
        raise HandshakeError(f"no rank of the peer holds {name} {entry} of {segments[0].name!r}")
    return held[rank % len(held)]


def _find(segment: Segment, entry: int) -> tuple[int, int] | None:
    """Returns an entry's offset in the peer's unit and the end of the entry's range; None if it isn't there.

    An entry is an index of the segment's outermost axis, such as a head.
    """
    offset = segment.offset
    for start, stop in segment.ranges:
        if start <= entry < stop:
            return offset + (entry - start) * segment.axes[0].stride, stop
        offset += (stop - start) * segment.axes[0].stride
    return None


def _append(cut: list[Piece], piece: Piece) -> None:
    """Appends the piece. If it follows the last piece directly on both sides, joins the two."""
    if cut:
        last = cut[-1]
        if (last.local + last.num_bytes, last.remote + last.num_bytes) == (piece.local, piece.remote):
            cut[-1] = Piece(last.local, last.remote, last.num_bytes + piece.num_bytes)
            return
    cut.append(piece)
