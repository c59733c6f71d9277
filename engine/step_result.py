"""What a step of :class:`engine.engine.Engine` brought, for the server to act on."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from wire.generation import StepOutputs

NO_OUTPUTS = StepOutputs({})


@dataclass(frozen=True)
class StepResult:
    """What a step brought. ``did_nothing``: only a new event (a request, a transfer) can change that."""

    outputs: StepOutputs = NO_OUTPUTS
    prefilled: list[Request] = field(default_factory=list)
    """Requests whose h(N-1) and blocks are now held until ``Engine.release``."""
    progressed: list[Request] = field(default_factory=list)
    """Requests that are only prefilled and have computed a further chunk, but not the last."""
    to_transfer: list[Request] = field(default_factory=list)
    """Admitted requests to read from another server; answer with ``Engine.transferred``."""
    kept: list[Request] = field(default_factory=list)
    """Answered requests whose blocks and state are held, as they asked, until ``Engine.release``."""
    to_give_up: list[str] = field(default_factory=list)
    """Kept requests whose memory others wait for: end their leases, then release them."""
    did_nothing: bool = False
