"""Results of the steps of :class:`engine.engine.Engine`, for the server to act on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.request import Request
from engine.step.launched_step import RowResult
from wire.messages.generation import ErrorReply, RequestOutput, StepOutputs
from wire.messages.handoff import AnyTicket
from wire.outbox import Outbox

NO_OUTPUTS = StepOutputs({})


@dataclass(frozen=True)
class StepResult:
    """Result of a step. ``did_nothing``: no step has work until a new event comes (a request, a transfer)."""

    outputs: StepOutputs = NO_OUTPUTS
    prefilled: list[Request] = field(default_factory=list)
    """Requests whose h(N-1) and blocks are now held until ``Engine.release``."""
    progressed: list[Request] = field(default_factory=list)
    """Requests that are only prefilled and have computed one more chunk, but not their last."""
    to_transfer: list[Request] = field(default_factory=list)
    """Admitted requests whose state must be read from another server; report the end of each transfer with
    ``Engine.transferred``."""
    kept: list[Request] = field(default_factory=list)
    """Ended or moved requests whose blocks and state are held until ``Engine.release``."""
    to_give_up: list[str] = field(default_factory=list)
    """Ids of kept requests whose memory other requests wait for: end their leases, then release them."""
    did_nothing: bool = False
    may_rest: bool = False
    """Whether no request waits or runs any more, and no other rank waits for this one. The next step only
    clears up."""
    wait_s: float | None = None
    """Seconds after which a step may have work without a new event: a request then no longer waits for its
    cached prefix from files. None: no request waits."""


def last_output(
    request: Request, *, ticket: AnyTicket | None = None, error: ErrorReply | None = None
) -> RequestOutput:
    """Returns the last output of a request that ended without a further token: it has moved, or failed."""
    return RequestOutput(
        request_id=request.request_id,
        token_ids=(),
        finish_reason=request.finish_reason,
        error=error,
        stats=request.measured.stats(),
        ticket=ticket,
    )


@dataclass(slots=True)
class Landed:
    """Results of steps that were read back, until a :class:`StepResult` reports them."""

    outputs: Outbox = field(default_factory=Outbox)
    prefilled: list[Request] = field(default_factory=list)
    progressed: list[Request] = field(default_factory=list)
    kept: list[Request] = field(default_factory=list)

    def gained(self, request: Request, result: RowResult) -> None:
        """Adds the output for a row's new tokens. Nearly all of these outputs hold nothing but tokens."""
        token_ids, reason = result.tokens, request.finish_reason
        prompt_logprobs = None
        if request.prompt_logprobs and request.num_output == len(token_ids):
            prompt_logprobs = tuple(request.prompt_logprobs)
        if reason is None and result.logprobs is None and prompt_logprobs is None:
            self.outputs.add_tokens(request.request_id, token_ids)
            return
        self.outputs.add(
            RequestOutput(
                request_id=request.request_id,
                token_ids=token_ids,
                logprobs=result.logprobs,
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                stop_token_id=token_ids[-1] if reason == "stop" else None,
                stats=None if reason is None else request.measured.stats(),
            )
        )


def still_in(table: Mapping[str, Request], requests: Iterable[Request]) -> list[Request]:
    """Returns the requests that have not been cancelled or released meanwhile."""
    return [request for request in requests if table.get(request.request_id) is request]
