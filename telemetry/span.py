"""One span of a trace: something that took its time and is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Span:
    """Times are seconds of the monotonic clock."""

    name: str
    kind: Kind
    parent: str
    """Its ``traceparent``."""
    start_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    """What went wrong; empty: nothing."""
    span_id: str = ""
    """16 hex digits, if others were told before it was over; empty: any."""
