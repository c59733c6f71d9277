"""A rank other than 0: its engine carries out the calls of rank 0's engine one by one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from engine.engine import Engine
from engine.group.rank_link import RankLink
from engine.request import Request
from wire.errors import TwinfangError, error_from_code
from wire.messages.generation import ForkedChoice
from wire.messages.purge import PurgePrefixes
from wire.messages.ranks import (
    AddRequest,
    CancelRequest,
    EndTransfer,
    MoveRequests,
    ReleaseRequest,
    RunStep,
    Stop,
    SumDigests,
)
from wire.messages.sessions import TendSession

CALLS: tuple[type[Any], ...] = (
    AddRequest,
    CancelRequest,
    ReleaseRequest,
    MoveRequests,
    EndTransfer,
    RunStep,
    Stop,
    SumDigests,
    TendSession,
    PurgePrefixes,
)


class RankWorker:
    """Carries out rank 0's calls until rank 0 says stop or is gone; passes other messages to their takers."""

    def __init__(self, engine: Engine, link: RankLink) -> None:
        self._engine = engine
        self._link = link

    def run(self) -> None:
        """Runs until :class:`Stop` comes. Raises :class:`EOFError` if rank 0 has ended."""
        while True:
            call: Any = self._link.receive(*CALLS, *self._link.takers)
            if isinstance(call, Stop):
                return
            taker = self._link.takers.get(type(call))
            if taker is not None:
                taker(call)
            else:
                self._carry_out(call)

    def _carry_out(self, call: object) -> None:
        engine = self._engine
        if isinstance(call, RunStep):
            engine.step_with(call.news, call.files)
        elif isinstance(call, AddRequest):
            with contextlib.suppress(TwinfangError):  # rank 0 refuses the request too, and tells the sender
                engine.add(_request(call))
        elif isinstance(call, EndTransfer):
            request = engine.reading(call.request_id)
            request.ticket = call.ticket or request.ticket
            error = None if call.error is None else error_from_code(call.error.code, call.error.message)
            engine.transferred(request, error=error, settled=call.settled)
        elif isinstance(call, SumDigests):
            engine.digests(call.request_id)
        elif isinstance(call, TendSession):
            engine.tend(call)
        elif isinstance(call, PurgePrefixes):
            engine.purges.purge(call)
        elif isinstance(call, CancelRequest):
            engine.cancel(call.request_id)
        elif isinstance(call, ReleaseRequest):
            engine.release(call.request_id)
        else:
            engine.move_all()


def _forked(call: AddRequest, fork: ForkedChoice) -> AddRequest:
    params = None if call.params is None else replace(call.params, seed=fork.seed)
    return replace(call, request_id=fork.request_id, params=params, ticket=None, seed=fork.seed, forks=())


def _request(call: AddRequest) -> Request:
    return Request(
        call.request_id,
        list(call.tokens),
        params=call.params,
        ticket=call.ticket,
        prompt_logprobs_wanted=call.prompt_logprobs_wanted,
        stop_token_ids=frozenset(call.stop_token_ids),
        seed=call.seed,
        keeps_state=call.keeps_state,
        cache_salt=call.cache_salt,
        client=call.client,
        num_answered=call.num_answered,
        forks=[_request(_forked(call, fork)) for fork in call.forks],
        session=call.session,
    )
