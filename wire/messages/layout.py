"""The layout of a pool's memory, described by names.

A pool is an array of units (blocks or slots). Each unit holds segments, and each segment is a dense
array whose axes have names, sizes and byte strides. A reader of a peer's memory uses only this
description. No axis is ever inferred from a size, so nothing goes wrong if two axes have equal sizes: for
example if ``num_blocks`` is 2, as the size of the K/V axis is, or if ``kv_heads == block_size``.
"""

from __future__ import annotations

from typing import Literal

from wire.codec import message
from wire.errors import WireError

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges ``(start, stop)`` of an axis, in the order of their place in memory."""


@message
class Axis:
    """One axis of a segment: its name, its size, and the distance of two neighbours in bytes."""

    name: str
    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise WireError(f"axis {self.name!r}: size {self.size} and stride {self.stride} must be positive")


@message
class Segment:
    """A dense array inside a unit, ``offset`` bytes after the unit's start; axes outermost first."""

    name: str
    dtype: str
    offset: int
    axes: tuple[Axis, ...]
    holds: tuple[tuple[int, int], ...] = ()
    """The ranges of the outermost axis that one tensor-parallel rank holds here, one after the other. They
    are indices into this axis as the whole model has it. Empty: the whole axis."""

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise WireError(f"segment {self.name!r}: negative offset {self.offset}")
        if not self.axes:
            raise WireError(f"segment {self.name!r} has no axes")
        for outer, inner in zip(self.axes, self.axes[1:], strict=False):
            if outer.stride != inner.stride * inner.size:
                raise WireError(
                    f"segment {self.name!r}: axis {outer.name!r} has stride {outer.stride}, "
                    f"but {inner.size} entries of {inner.name!r} take {inner.stride * inner.size} bytes"
                )
        if self.holds:
            self._check_holds()

    def _check_holds(self) -> None:
        if any(not 0 <= start < stop for start, stop in self.holds):
            raise WireError(f"segment {self.name!r}: {self.holds} are not valid ranges")
        held = sum(stop - start for start, stop in self.holds)
        if held != self.axes[0].size:
            raise WireError(
                f"segment {self.name!r}: the ranges {self.holds} hold {held} entries, "
                f"axis {self.axes[0].name!r} has {self.axes[0].size}"
            )

    @property
    def ranges(self) -> Ranges:
        """The ranges of the outermost axis that are stored here, as indices into the whole model's axis."""
        return self.holds or ((0, self.axes[0].size),)

    @property
    def num_bytes(self) -> int:
        return self.axes[0].size * self.axes[0].stride


@message
class Layout:
    """A pool: ``num_units`` units, ``unit_bytes`` apart, each holding the same segments."""

    unit: Literal["block", "slot"]
    num_units: int
    unit_bytes: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.num_units < 1 or self.unit_bytes < 0:
            raise WireError(f"invalid pool: {self.num_units} {self.unit}s of {self.unit_bytes} bytes each")
        end = 0
        for segment in self.segments:
            if segment.offset < end:
                raise WireError(f"segment {segment.name!r} overlaps the one before it")
            end = segment.offset + segment.num_bytes
        if end > self.unit_bytes:
            raise WireError(f"the segments take {end} bytes, the {self.unit} has {self.unit_bytes}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_units * self.unit_bytes

    def same_kind(self, other: Layout) -> bool:
        """Whether both layouts store an entry (a head, a channel) in the same form.

        The two layouts may hold different entries.
        """
        return self.unit == other.unit and [_kind(one) for one in self.segments] == [
            _kind(one) for one in other.segments
        ]

    def same_unit(self, other: Layout) -> bool:
        """Whether a unit of ``other`` can be copied byte for byte; the pools' sizes may differ."""
        return (self.unit, self.unit_bytes, self.segments) == (other.unit, other.unit_bytes, other.segments)


def _kind(segment: Segment) -> tuple[str, str, str, int, tuple[Axis, ...]]:
    outermost, *inner = segment.axes
    return segment.name, segment.dtype, outermost.name, outermost.stride, tuple(inner)
