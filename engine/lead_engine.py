"""The engine of rank 0: whatever is asked of it, the other ranks' engines are asked as well."""

from __future__ import annotations

from collections.abc import Callable

from engine.config import EngineConfig
from engine.engine import Engine
from engine.lockstep import Lockstep
from engine.request import Request
from engine.step_result import StepResult
from engine.tensor_parallel import TensorParallel
from telemetry.start_up import StartUp
from wire.errors import TwinfangError
from wire.generation import ErrorReply, RequestOutput
from wire.handoff import Digests, Ticket
from wire.ranks import (
    AddRequest,
    CancelRequest,
    EndTransfer,
    MoveRequests,
    ReleaseRequest,
    RunStep,
    SumDigests,
)


class LeadEngine(Engine):
    """Tells of each call before it is carried out; the others carry it out beside this one.

    They meet within a step, where each needs what the others compute. Until then they may be ahead of
    this one, but memory that an event gave back is written in a later step, of which they are told after
    the event: by then its lease's epoch has moved.
    """

    def __init__(
        self,
        config: EngineConfig,
        tp: TensorParallel,
        tell: Callable[[object], None],
        *,
        lockstep: Lockstep | None = None,
        start_up: StartUp | None = None,
    ) -> None:
        self._tell: Callable[[object], None] = lambda _: None  # every rank warms up unasked
        super().__init__(config, tp, lockstep=lockstep, start_up=start_up)
        self._tell = tell

    def add(self, request: Request) -> None:
        self._following.open(request)
        self._tell(
            AddRequest(
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
            )
        )
        super().add(request)

    def cancel(self, request_id: str) -> Request | None:
        self._tell(CancelRequest(request_id))
        return super().cancel(request_id)

    def release(self, request_id: str) -> None:
        self._tell(ReleaseRequest(request_id))
        super().release(request_id)

    def move_all(self) -> None:
        self._tell(MoveRequests())
        super().move_all()

    def transferred(
        self, request: Request, *, error: TwinfangError | None, settled: bool
    ) -> list[RequestOutput]:
        reply = None if error is None else ErrorReply(error.code, error.message)
        ticket = request.ticket if isinstance(request.ticket, Ticket) else None
        self._tell(EndTransfer(request.request_id, ticket, reply, settled))
        return super().transferred(request, error=error, settled=settled)

    def digests(self, request: Request) -> Digests | None:
        if self.config.sanitize:
            self._tell(SumDigests(request.request_id))
        return super().digests(request)

    def step(self) -> StepResult:
        news = self.grammar_news()  # how long that takes is for this rank alone to judge
        self._tell(RunStep(news))
        return self.step_with(news)
