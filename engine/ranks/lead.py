"""Rank 0 of several ranks: each call of its engine is repeated on the other ranks' engines."""

from __future__ import annotations

from collections.abc import Callable

from engine.engine import Engine
from engine.request import Request
from engine.schedule.purges import Purges
from engine.step_result import StepResult
from wire.errors import TwinfangError
from wire.messages.generation import ErrorReply, ForkedChoice, RequestOutput
from wire.messages.handoff import Digests, Ticket
from wire.messages.purge import PurgePrefixes
from wire.messages.ranks import (
    AddRequest,
    CancelRequest,
    EndTransfer,
    MoveRequests,
    ReleaseRequest,
    RunStep,
    SumDigests,
)
from wire.messages.sessions import SessionNews, TendSession


class LeadEngine:
    """The engine of rank 0, as its server uses it.

    It sends each call to the other ranks before it carries the call out, so that all ranks work at the same
    time.

    Ranks wait for each other within a step, where each needs the results of the others. Between steps the
    other ranks may carry out a call earlier than rank 0. That is safe for memory that a call frees: the
    memory is written only in a later step, which rank 0 sends after it has carried out that call, and by then
    the epoch of the memory's lease has changed.
    """

    def __init__(self, own: Engine, tell: Callable[[object], None]) -> None:
        """Wraps ``own``, the engine of rank 0. The attributes copied from ``own`` concern no other rank."""
        self.own = own
        self._tell = tell
        self.config, self.device, self.bursts = own.config, own.device, own.bursts
        self.model, self.fingerprint = own.model, own.fingerprint
        self.capacity, self.caches, self.grammars = own.capacity, own.caches, own.grammars
        self.measures, self.stats, self.prefix_news = own.measures, own.stats, own.prefix_news
        self.purges = LeadPurges(own.purges, tell)

    def add(self, request: Request) -> None:
        self.own.open_grammar(request)  # only rank 0 waits for the first masks and limits the wait
        self._tell(_call(request))
        self.own.add(request)

    def cancel(self, request_id: str) -> Request | None:
        self._tell(CancelRequest(request_id))
        return self.own.cancel(request_id)

    def release(self, request_id: str) -> None:
        self._tell(ReleaseRequest(request_id))
        self.own.release(request_id)

    def move_all(self) -> None:
        self._tell(MoveRequests())
        self.own.move_all()

    def transferred(
        self, request: Request, *, error: TwinfangError | None, settled: bool
    ) -> list[RequestOutput]:
        reply = None if error is None else ErrorReply(error.code, error.message)
        ticket = request.ticket if isinstance(request.ticket, Ticket) else None
        self._tell(EndTransfer(request.request_id, ticket, reply, settled))
        return self.own.transferred(request, error=error, settled=settled)

    def digests(self, request_id: str) -> Digests | None:
        if self.config.sanitize:
            self._tell(SumDigests(request_id))
        return self.own.digests(request_id)

    def tend(self, call: TendSession) -> SessionNews:
        self._tell(call)
        return self.own.tend(call)

    def step(self) -> StepResult:
        news = self.own.grammar_news()  # only rank 0 waits for masks
        files = self.own.file_choices.news()  # and asks what has been read and written
        self._tell(RunStep(news, files))
        return self.own.step_with(news, files)


class LeadPurges:
    """Rank 0's purges: what it deletes, all ranks delete."""

    def __init__(self, own: Purges, tell: Callable[[object], None]) -> None:
        self._own = own
        self._tell = tell
        self.begin, self.under_way = own.begin, own.under_way

    def purge(self, wanted: PurgePrefixes) -> int:
        self._tell(wanted)
        return self._own.purge(wanted)


def _call(request: Request) -> AddRequest:
    return AddRequest(
        request_id=request.request_id,
        tokens=tuple(request.tokens),
        params=request.params,
        ticket=request.ticket,
        prompt_logprobs_wanted=request.prompt_logprobs_wanted,
        stop_token_ids=tuple(sorted(request.stop_token_ids)),
        seed=request.seed,
        keeps_state=request.keeps_state,
        cache_salt=request.cache_salt,
        client=request.client,
        num_answered=request.num_answered,
        forks=tuple(ForkedChoice(fork.request_id, fork.seed) for fork in request.forks),
        session=request.session,
    )
