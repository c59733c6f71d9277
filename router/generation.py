"""All choices of one HTTP request, from dispatch to the last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from router.admission.gate import Asked
from router.admission.place import Place
from router.answer import Answer, Delta
from router.choice import Choice
from router.dispatch import Dispatch
from router.inbox import Inbox
from router.model_catalog import ServedModel
from router.request_record import RequestRecord
from router.services import Services
from router.slice_lane import LIGHT_WEIGHT, OUTPUT_WEIGHT, SLICE_WEIGHT
from wire.errors import (
    CancelledRequestError,
    DeadlineError,
    OverloadedError,
    TwinfangError,
)
from wire.generation import RequestOutput


class Generation:
    """Runs choices and yields their deltas; an asynchronous context manager that leaves nothing behind.

    One choice's error ends the others: the client gets an answer or an error, not a mixture.
    """

    def __init__(
        self,
        services: Services,
        model: ServedModel,
        choices: Sequence[tuple[Choice, Answer]],
        record: RequestRecord,
        *,
        deadline: float,
    ) -> None:
        self._services = services
        self._token_metrics = services.metrics.tokens
        self._model = model
        self._record = record
        num_tokens = sum(len(choice.token_ids) for choice, _ in choices)
        self._asked = Asked(record.client.name, record.priority, len(choices), num_tokens)
        self._place: Place | None = None
        self._choices = choices
        self._inbox: Inbox[tuple[int, RequestOutput | Delta | Exception]] = Inbox(services.backlog.changed)
        self.pass_on: Callable[[tuple[int, ...]], Delta | None] | None = None
        """Of a single choice: is given tokens, but the last ones, that come while :meth:`step` is waited for.
        What it returns :meth:`step` brings."""
        self._dispatches: list[Dispatch] = []
        self._unfinished = set(range(len(choices)))
        self._last_token_s = [0.0] * len(choices)
        self._started_s = 0.0
        self._deadline = deadline
        self._exits = AsyncExitStack()

    @property
    def answers(self) -> list[Answer]:
        return [answer for _, answer in self._choices]

    async def __aenter__(self) -> Generation:
        """Waits for its turn. Raises what :meth:`Gate.enter` raises."""
        metrics = self._services.metrics
        self._started_s = time.monotonic()
        async with AsyncExitStack() as exits:
            exits.enter_context(metrics.request(self._record.client.api_key.name))
            exits.enter_context(self._services.requests.follow(self._record))
            with self._record.abortable_task():
                entry = self._model.gate.enter(self._asked, deadline=self._deadline)
                self._place = await exits.enter_async_context(entry)  # a 429 is counted as well
            self._record.admitted()
            exits.enter_context(self._record.abortable(self._abort))
            exits.enter_context(self._services.backlog.of(self._inbox, self._end_unread))
            self._exits = exits.pop_all()
        metrics.request_queue.observe(self._place.queue_s)
        timer = asyncio.get_running_loop().call_at(self._deadline, self._expire)
        self._exits.callback(timer.cancel)
        self._place.begin = self._begin
        self._begin(self._place.num_places)
        return self

    def _begin(self, count: int) -> None:
        """So many further choices, those that come next."""
        begun = len(self._dispatches)
        for index in range(begun, begun + count):
            self._start(index)

    def _expire(self) -> None:
        for index in self._unfinished:
            self._inbox.put((index, DeadlineError.told("the request was not finished within its time limit")))

    def _start(self, index: int) -> None:
        choice = self._choices[index][0]
        dispatch = Dispatch(
            self._model.servers,
            choice,
            hold=self._model.hold,
            deadline=self._deadline,
            receiver=_ChoiceReceiver(self, index, self._inbox),
            on_retry=self._services.metrics.retried,
            timeline=self._record.choices[index],
        )
        self._dispatches.append(dispatch)
        dispatch.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dispatch in self._dispatches:
            dispatch.cancel()
        if self._place is not None:
            asked, num_answer_tokens = self._asked, sum(answer.num_tokens for answer in self.answers)
            self._place.num_answer_tokens = num_answer_tokens
            self._services.metrics.keys.used(
                self._record.client.api_key.name,
                num_prompt_tokens=asked.num_tokens,
                num_answer_tokens=num_answer_tokens,
            )
        self._services.recent.requests.add(1, self._services.recent.now_s)
        await self._exits.__aexit__(kind, error, trace)

    def _abort(self, error: TwinfangError) -> None:
        self._inbox.put((min(self._unfinished, default=0), error))

    def _end_unread(self) -> None:
        """The client leaves so much untaken that the router's memory is at stake."""
        for dispatch in self._dispatches:
            dispatch.cancel()
        error = OverloadedError(
            f"{self._inbox.weight} log-probabilities wait for this client, which takes them more slowly than "
            "they come, and the router has no memory left for more: read faster, or ask for fewer"
        )
        self._inbox.close((min(self._unfinished, default=0), error))

    def cached_tokens(self, index: int) -> int:
        """Prompt tokens of a finished choice that some prefix cache held."""
        reply, stats = self._dispatches[index].prefill_reply, self._choices[index][1].stats
        if reply is not None:
            return reply.cached_tokens
        return 0 if stats is None else stats.cached_tokens

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return not self._unfinished

    async def step(self) -> list[tuple[int, Delta]]:
        """The next deltas, one a choice, in the order of the choices; empty once all have ended.

        It brings no more than a slice; the rest stands in line behind other requests' slices. Raises the
        first error of any choice, or :class:`DeadlineError`.
        """
        deltas: dict[int, Delta] = {}
        while not (self.has_ended or deltas):
            has_waited = await self._inbox.wait()
            # Who finds news without a wait has just handled some: with them it would keep the event loop.
            if not has_waited or self._inbox.weight > LIGHT_WEIGHT:
                await self._services.slices.turn()
            for index, event in self._inbox.take(SLICE_WEIGHT):
                if index not in self._unfinished:
                    continue
                delta = self._take(index, event)
                if delta.finish_reason is not None:
                    self._unfinished.discard(index)
                if index in deltas:
                    deltas[index] += delta
                elif delta.token_ids or delta.finish_reason is not None:
                    deltas[index] = delta
        return sorted(deltas.items())

    def _take(self, index: int, event: RequestOutput | Delta | Exception) -> Delta:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Delta):
            return event
        if event.finish_reason == "cancelled":
            raise CancelledRequestError("the request was cancelled on its decode server")
        answer = self._choices[index][1]
        delta = answer.push(event)
        if delta.token_ids:
            self.measure(index, len(delta.token_ids))
        if answer.finish_reason is not None:
            dispatch = self._dispatches[index]
            dispatch.cancel()  # a stop string: the server does not know yet
            self._note_end(index)
            if self._place is not None and len(self._unfinished) > 1:
                self._model.gate.choice_ended(self._place)
            if answer.stats is not None:
                self._services.metrics.phases.decoded(
                    answer.stats, dispatch.first_output_s, was_early=dispatch.was_early
                )
            if dispatch.prefill_reply is not None:
                self._services.metrics.phases.prefilled(dispatch.prefill_reply, dispatch.prefill_call_s)
        return delta

    def _note_end(self, index: int) -> None:
        choice, answer = self._choices[index]
        timeline = self._record.choices[index]
        timeline.ended(answer.stats)
        self._services.recent.choice_ended(
            num_prompt_tokens=len(choice.token_ids),
            num_cached_tokens=self.cached_tokens(index),
            num_tokens=answer.num_tokens,
            decode_s=self._last_token_s[index] - (timeline.first_token_s or self._last_token_s[index]),
            stats=answer.stats,
        )

    def measure(self, index: int, num_tokens: int) -> None:
        """So many tokens of a choice have come."""
        now, before = time.monotonic(), self._last_token_s[index]
        self._last_token_s[index] = now
        if before:
            self._token_metrics.later(num_tokens, now, before)
            return
        self._token_metrics.first(num_tokens, now)
        self._services.metrics.time_to_first_token.observe(now - self._started_s)
        self._services.recent.ttft.observe(now - self._started_s, now)


class _ChoiceReceiver:
    """Puts what comes for one choice into the inbox, or passes it on."""

    __slots__ = ("_generation", "_inbox", "_index")

    def __init__(
        self, generation: Generation, index: int, inbox: Inbox[tuple[int, RequestOutput | Delta | Exception]]
    ) -> None:
        self._generation = generation
        self._inbox = inbox
        self._index = index

    def take(self, output: RequestOutput | TwinfangError) -> None:
        weight = OUTPUT_WEIGHT
        if isinstance(output, RequestOutput):
            weight += len(output.token_ids) + output.num_logprobs
        self._inbox.put((self._index, output), weight)

    def take_tokens(self, token_ids: tuple[int, ...]) -> None:
        pass_on = self._generation.pass_on
        weight = OUTPUT_WEIGHT + len(token_ids)
        if pass_on is None or not self._inbox.is_awaited:
            self._inbox.put((self._index, RequestOutput("", token_ids)), weight)
            return
        try:
            left = pass_on(token_ids)
        except Exception as error:
            self._inbox.put((self._index, error))
            return
        if left is not None:
            self._inbox.put((self._index, left), weight)
