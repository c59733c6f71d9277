"""What steps that were read back have brought, until a step's result tells of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.request import Request
from wire.outbox import Outbox


@dataclass(slots=True)
class Landed:
    """See :class:`engine.step_result.StepResult`."""

    outputs: Outbox = field(default_factory=Outbox)
    prefilled: list[Request] = field(default_factory=list)
    chunks: list[Request] = field(default_factory=list)
    """Requests that have computed a further chunk, but not the last."""
    kept: list[Request] = field(default_factory=list)


def still_in(table: Mapping[str, Request], requests: Iterable[Request]) -> list[Request]:
    """Those that nobody has cancelled or released meanwhile."""
    return [request for request in requests if table.get(request.request_id) is request]
