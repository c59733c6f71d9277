"""One span of a trace: a piece of work that has ended, with its times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Span:
    """A span. Times are seconds of the monotonic clock."""

    name: str
    kind: Kind
    parent: str
    """The parent's ``traceparent``."""
    start_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    """What went wrong. Empty if nothing did."""
    span_id: str = ""
    """16 hex digits, if the id was sent to others before the span was over. Empty: a new id is made."""
