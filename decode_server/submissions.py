"""Turns routers' submissions into requests of the engine, or refuses them, and makes their last outputs."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from engine.engine import Engine
from engine.ranks.lead import LeadEngine
from engine.request import Request
from engine.step_result import StepResult
from wire.errors import InvalidRequestError, TwinfangError, WireError
from wire.messages.generation import ErrorReply, RequestOutput, Submit
from wire.messages.handoff import AnyTicket, Ticket


@dataclass(frozen=True)
class Submissions:
    """Checks submissions against what the server can serve."""

    engine: Engine | LeadEngine
    takes_tickets: bool
    """Whether the server reads state from other servers."""
    needs_tickets: bool
    """Whether the server refuses prompts that no other server has computed."""

    def request(self, submit: Submit) -> Request:
        """Return the request, with its forks. Raises :class:`InvalidRequestError` and :class:`WireError`."""
        num_tokens = len(submit.token_ids)
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        if not 0 <= submit.num_answered < min(num_tokens, max(1, submit.params.max_tokens)):
            raise WireError(
                f"num_answered is {submit.num_answered}: it must be at least 0, and below both the "
                f"{num_tokens} tokens of the message and max_tokens {submit.params.max_tokens}"
            )
        submit.params.check_vocabulary(self.engine.model.config.vocab_size)
        if submit.ticket is not None:
            self._check_ticket(submit.ticket, num_tokens)
        elif num_tokens > 1 and self.needs_tickets:
            raise InvalidRequestError(
                f"a prompt of {num_tokens} tokens came to a decode server without a ticket; "
                "let a prefill server compute it first, or start this server with --local-prefill"
            )
        if submit.forks and (num_tokens < 2 or submit.params.max_tokens == 0):
            raise WireError(
                f"{len(submit.forks)} forks of a prompt of {num_tokens} tokens with max_tokens "
                f"{submit.params.max_tokens}: forks need 2 tokens at least, and an answer"
            )
        if submit.params.max_tokens == 0:
            return _scored_request(submit)
        request = self._generating(submit)
        request.forks = [self._generating(fork) for fork in submit.forked()]
        return request

    def _generating(self, submit: Submit) -> Request:
        params = submit.params
        eos = () if params.ignore_eos else self.engine.model.config.eos_token_ids
        return Request(
            submit.request_id,
            list(submit.token_ids),
            params,
            ticket=submit.ticket,
            prompt_logprobs_wanted=submit.prompt_logprobs,
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            cache_salt=submit.cache_salt,
            client=submit.client,
            keeps_state=submit.keeps_state and self.takes_tickets,
            num_answered=submit.num_answered,
            session=submit.session,
        )

    def _check_ticket(self, ticket: AnyTicket, num_tokens: int) -> None:
        if not self.takes_tickets:
            raise InvalidRequestError("this server computes prompts itself and takes no tickets")
        num_blocks = self.engine.capacity.blocks_for(num_tokens - 1)
        # An early ticket does not name its blocks yet: they are checked when they are reported.
        found = len(ticket.block_ids) if isinstance(ticket, Ticket) else num_blocks
        if (ticket.num_tokens, found) != (num_tokens - 1, num_blocks):
            raise WireError(
                f"the ticket covers {ticket.num_tokens} tokens in {found} blocks; "
                f"the prompt needs {num_tokens - 1} in {num_blocks}"
            )


def _scored_request(submit: Submit) -> Request:
    """Make a request whose prompt is only scored, on a server that computes prompts itself.

    The client wants only the prompt's log-probabilities, no answer. The request ends as on a prefill server,
    with all but its last token computed. Raises :class:`InvalidRequestError` if it can't be scored.
    """
    if submit.ticket is not None or len(submit.token_ids) < 2:
        raise InvalidRequestError(
            "a prompt that is only scored must come without a ticket and have at least two tokens: "
            "the first token has no log-probability"
        )
    return Request(
        submit.request_id,
        list(submit.token_ids),
        params=None,
        prompt_logprobs_wanted=submit.prompt_logprobs,
        cache_salt=submit.cache_salt,
        session=submit.session,
    )


def scores(request: Request) -> RequestOutput:
    """Return the only output of a scored request: the prompt's log-probabilities."""
    return RequestOutput(
        request.request_id,
        (),
        prompt_logprobs=tuple(request.prompt_logprobs),
        finish_reason="length",
        stats=request.measured.stats(),
    )


def last_outputs(result: StepResult) -> dict[str, RequestOutput]:
    """Return the last outputs of requests whose states are kept, by request."""
    kept = {request.request_id for request in result.kept}
    return {
        one.request_id: one
        for one in result.outputs.outputs
        if one.finish_reason is not None and one.request_id in kept
    }


def refusal(request_id: str, error: TwinfangError) -> RequestOutput:
    """Return the only output of a request that is refused."""
    return RequestOutput(request_id, (), finish_reason="error", error=ErrorReply(error.code, error.message))


def choices_of(request: Request) -> list[Request]:
    """Return the request and its forks."""
    return [request, *request.forks]
