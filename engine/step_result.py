"""What steps of :class:`engine.engine.Engine` brought, for the server to act on."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from engine.step.launched_step import RowResult
from wire.messages.generation import ErrorReply, RequestOutput, StepOutputs
from wire.messages.handoff import AnyTicket
from wire.outbox import Outbox

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


def last_output(
    request: Request, *, ticket: AnyTicket | None = None, error: ErrorReply | None = None
) -> RequestOutput:
    """Of a request that ended without a further token: it has moved, or failed."""
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
    """What steps that were read back have brought, until a :class:`StepResult` tells of it."""

    outputs: Outbox = field(default_factory=Outbox)
    prefilled: list[Request] = field(default_factory=list)
    progressed: list[Request] = field(default_factory=list)
    kept: list[Request] = field(default_factory=list)

    def gained(self, request: Request, result: RowResult) -> None:
        """The answer has gained the row's tokens. Nearly all of these outputs are tokens and nothing else."""
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
