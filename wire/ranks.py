"""What a server's rank 0 tells its other ranks: each call of its engine, in order.

Every rank has an engine of its own that decides for itself; from equal calls in equal order follow equal
decisions, so that no plan, batch or token has to travel.
"""

from __future__ import annotations

from wire.codec import message
from wire.generation import ErrorReply
from wire.handoff import AnyTicket
from wire.sampling_params import SamplingParams


@message
class AddRequest:
    """:meth:`engine.engine.Engine.add`; the fields are those of :class:`engine.request.Request`."""

    request_id: str
    tokens: tuple[int, ...]
    params: SamplingParams | None
    ticket: AnyTicket | None
    prompt_logprobs_wanted: int | None
    stop_token_ids: tuple[int, ...]
    seed: int
    keeps_state: bool
    cache_salt: str
    num_answered: int


@message
class CancelRequest:
    request_id: str


@message
class ReleaseRequest:
    request_id: str


@message
class MoveRequests:
    """All of them, to other servers."""


@message
class EndTransfer:
    """:meth:`engine.engine.Engine.transferred`"""

    request_id: str
    error: ErrorReply | None
    settled: bool


@message
class RunStep:
    pass


@message
class Stop:
    pass


@message
class RankLog:
    """A line for the log, from another rank."""

    level: int
    logger: str
    text: str
