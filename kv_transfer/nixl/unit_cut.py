"""How one rank's unit (a block or a slot) is put together from units of a peer's ranks.

Both sides say by ranges of the whole model's heads and channels what stands where
(:attr:`wire.messages.layout.Segment.ranges`). Each range of ours is found in theirs, whatever the two numbers
of ranks: KV heads are one range, the convolution's channels three (x, B, C), SSM heads one a layer. Where
several ranks of the peer hold a copy of a head, ours choose different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wire.errors import HandshakeError
from wire.messages.layout import Layout, Segment


@dataclass(frozen=True)
class Piece:
    """``num_bytes`` at ``remote`` of a peer's unit belong at ``local`` of ours; offsets in bytes."""

    local: int
    remote: int
    num_bytes: int


Cut = tuple[Piece, ...]
"""What of a unit of ours comes from one rank of the peer; empty: nothing."""


def whole(layout: Layout) -> Cut:
    """All of a unit."""
    return (Piece(0, 0, layout.unit_bytes),) if layout.unit_bytes else ()


def cut_unit(local: Layout, remotes: Sequence[Layout], *, rank: int) -> list[Cut]:
    """What our rank ``rank`` reads of each of the peer's ranks, for one unit.

    Raises :class:`HandshakeError` where the peer's ranks together lack something of ours.
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
    """Which of the peer's ranks our ``rank`` reads an entry from, and what :func:`_find` says of it there."""
    places = [(i, _find(segment, entry)) for i, segment in enumerate(segments)]
    held = [(i, *place) for i, place in places if place is not None]
    if not held:
        name = segments[0].axes[0].name
        raise HandshakeError(f"no rank of the peer holds {name} {entry} of {segments[0].name!r}")
    return held[rank % len(held)]


def _find(segment: Segment, entry: int) -> tuple[int, int] | None:
    """Where in the peer's unit an entry of the outermost axis stands, and the end of the range it is in."""
    offset = segment.offset
    for start, stop in segment.ranges:
        if start <= entry < stop:
            return offset + (entry - start) * segment.axes[0].stride, stop
        offset += (stop - start) * segment.axes[0].stride
    return None


def _append(cut: list[Piece], piece: Piece) -> None:
    """Joins the piece with the last one where both sides are adjacent."""
    if cut:
        last = cut[-1]
        if (last.local + last.num_bytes, last.remote + last.num_bytes) == (piece.local, piece.remote):
            cut[-1] = Piece(last.local, last.remote, last.num_bytes + piece.num_bytes)
            return
    cut.append(piece)
