"""Runs all choices of one HTTP request, from dispatch to the last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import groupby
from types import TracebackType

from router.admission.fair_queue import QueuedRequest
from router.admission.place import Place
from router.http.event_stream import WriteNow
from router.observe.request_record import RequestRecord
from router.serving.answer import Answer, Delta
from router.serving.dispatch import Dispatch
from router.serving.inbox import Inbox
from router.serving.services import Services
from router.serving.slice_lane import LIGHT_WEIGHT, OUTPUT_WEIGHT, SLICE_WEIGHT
from router.serving.text_lane import TextLane
from router.serving.text_request import TextRequest
from router.serving.usage import Usage, billed_tokens, usage_of
from wire.errors import (
    CancelledRequestError,
    DeadlineError,
    OverloadedError,
    TwinfangError,
)
from wire.messages.generation import RequestOutput


class Generation:
    """Runs choices and returns their deltas. It is an asynchronous context manager; when the context ends,
    all work for the request ends.

    An error of one choice ends the other choices, too, so that the client gets either an answer or an error.
    """

    def __init__(self, services: Services, request: TextRequest) -> None:
        model, limits = request.model, request.model.servers.limits()
        self._services = services
        self._token_metrics = services.metrics.tokens
        self._model = model
        self._request = request
        self._choices = request.choices()
        self._num_prompt_tokens = sum(len(choice.token_ids) for choice in self._choices)
        self.answers = [
            Answer(
                model.tokenizer,
                choice.params,
                prompt_token_ids=choice.token_ids,
                stop=request.stop,
                include_stop_str_in_output=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                eos_token_ids=limits.eos_token_ids,
                thinking=None if request.reasoning is None else request.reasoning.thinking_tokens(),
            )
            for choice in self._choices
        ]
        self._record = RequestRecord(
            request.id,
            model.name,
            num_prompt_tokens=request.num_prompt_tokens,
            num_choices=len(self._choices),
            count_tokens=self._count_tokens,
            priority=request.priority,
            client=request.client,
            trace=request.trace,
        )
        self._place: Place | None = None
        self._inbox: Inbox[tuple[int, RequestOutput | Delta | Exception]] = Inbox(services.backlog.changed)
        self._lane: TextLane | None = None
        self._receivers = [_ChoiceReceiver(index, self._inbox) for index in range(len(self._choices))]
        self._dispatches: list[Dispatch] = []
        self._unfinished = set(range(len(self._choices)))
        self._last_token_s = [0.0] * len(self._choices)
        self._started_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def _count_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    async def __aenter__(self) -> Generation:
        """Wait until the gate lets the request in. Raises what :meth:`Gate.admit` and :meth:`Gate.wait`
        raise."""
        services, request, gate = self._services, self._request, self._model.gate
        self._started_s = services.metrics.began()
        services.requests.began(self._record)
        queued = QueuedRequest(
            request.client.name,
            request.priority,
            len(self._choices),
            self._num_prompt_tokens,
            since_s=self._started_s,
            begin=self._begin,
        )
        try:
            place = gate.admit(queued)
            if place is None:
                with self._record.abortable_task():
                    place = await gate.wait(queued, deadline=request.deadline)
        except BaseException as error:
            self._ended(error)
            raise
        self._place = place
        self._record.admitted(self._abort)
        services.backlog.add(self._inbox, self._end_unread)
        services.metrics.request_queue.labels(self._model.name).add(place.queue_s)
        self._timer = asyncio.get_running_loop().call_at(request.deadline, self._expire)
        try:
            self._begin()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    def _begin(self) -> None:
        """Start those choices that now have places and have not begun. Choices of one prompt start together,
        and their prompt is computed once."""
        if self._place is not None:
            begun = range(len(self._dispatches), len(self._choices) - self._place.num_left)
            self._dispatches += map(self._dispatch, begun)
            for _, same_prompt in groupby(begun, lambda index: index // self._request.n):
                first, *others = same_prompt
                forks = others if self._choices[first].may_fork else []
                self._dispatches[first].start([self._dispatches[index] for index in forks])
                for index in others[len(forks) :]:
                    self._dispatches[index].start()

    def _expire(self) -> None:
        for index in self._unfinished:
            self._inbox.put((index, DeadlineError.told("the request was not finished within its time limit")))

    def _dispatch(self, index: int) -> Dispatch:
        return Dispatch(
            self._model,
            self._choices[index],
            deadline=self._request.deadline,
            receiver=self._receivers[index],
            on_retry=self._services.metrics.retried,
            timeline=self._record.choices[index],
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dispatch in self._dispatches:
            dispatch.cancel()
        place = self._place
        assert place is not None
        assert self._timer is not None
        place.num_answer_tokens = self._count_tokens()
        if self._record.client.api_key.name:
            self._book(error)
        self._place = None  # breaks reference cycles: the place and the dispatches refer to this
        self._dispatches.clear()
        self._services.recent.requests.add(1, time.monotonic())
        self._timer.cancel()
        self._services.backlog.remove(self._inbox)
        self._model.gate.leave(place)
        self._ended(error)

    def _ended(self, error: BaseException | None) -> None:
        self._services.requests.ended(self._record, error)
        self._services.metrics.ended(self._record.client.api_key.name, self._started_s, error)

    def _book(self, error: BaseException | None) -> None:
        """Count what the request has cost its key."""
        usage = self.usage()
        self._services.metrics.keys.used(
            self._record.client.api_key.name,
            prompt=usage.num_prompt_tokens,
            cached=usage.cached_tokens or 0,
            generation=usage.num_answer_tokens,
            reasoning=usage.num_thinking_tokens or 0,
        )
        self._request.reservation.settle(billed_tokens(usage, error))

    def usage(self) -> Usage:
        """Return what the request has cost so far. Choices of one prompt share what was cached of it."""
        begun = range(0, len(self._dispatches), self._request.n)
        return usage_of(self._request.num_prompt_tokens, self.answers, sum(map(self.cached_tokens, begun)))

    def _abort(self, error: TwinfangError) -> None:
        self._inbox.put((min(self._unfinished, default=0), error))

    def _end_unread(self) -> None:
        """End the request, because its client leaves so much unread that the router may run out of memory."""
        for dispatch in self._dispatches:
            dispatch.cancel()
        error = OverloadedError(
            f"{self._inbox.weight} log-probabilities wait for this client, which reads them more slowly than "
            "they come, and the router has no memory left for more: read faster, or ask for fewer"
        )
        self._inbox.close((min(self._unfinished, default=0), error))

    def cached_tokens(self, index: int) -> int:
        """Return how many prompt tokens of a finished choice came from a prefix cache."""
        reply, stats = self._dispatches[index].prefill_reply, self.answers[index].stats
        if reply is not None:
            return reply.cached_tokens
        return 0 if stats is None else stats.cached_tokens

    def take_lane(self, watched: str | None, write_now: WriteNow, event: Callable[[str], bytes]) -> None:
        """Let the tokens that come next take a lane to the client, if they come while the caller waits in
        :meth:`step`. This method then returns only what the lane did not write. To be called only if there is
        a single choice; see :class:`TextLane`.

        ``watched`` is :attr:`PartReader.watched`. None: the next text must not take a lane.
        """
        (dispatch,) = self._dispatches
        if watched is None:
            self._lane = None
            dispatch.divert(None)
        elif self._lane is None or watched or self._lane.watched:
            self._lane = TextLane(
                self.answers[0],
                self._model.tokenizer.own_json,
                answer_ids=dispatch.answer_ids,
                last_token_s=self._last_token_s,
                inbox=self._inbox,
                metrics=self._token_metrics,
                long_way=self._receivers[0],
                write_now=write_now,
                event=event,
                watched=watched,
            )
            dispatch.divert(self._lane.take_tokens)

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended."""
        return not self._unfinished

    async def step(self) -> list[tuple[int, Delta]]:
        """Return the next deltas, at most one for each choice, in the order of the choices. The list is empty
        once all choices have ended.

        A call returns at most one slice of what has come (:mod:`router.serving.slice_lane`); later calls
        return the rest, after other requests have had their turns. Raises the first error of any choice, or
        :class:`DeadlineError`.
        """
        deltas: dict[int, Delta] = {}
        while not (self.has_ended or deltas):
            has_waited = await self._inbox.wait()
            # If outputs are here without a wait, this request has just handled earlier ones. It must now wait
            # for its turn, or it would block the event loop.
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
        for index, delta in deltas.items():
            self.answers[index].find_thinking(delta)
        return sorted(deltas.items())

    def _take(self, index: int, event: RequestOutput | Delta | Exception) -> Delta:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Delta):
            return event
        if event.finish_reason == "cancelled":
            raise CancelledRequestError("the request was cancelled on its decode server")
        answer = self.answers[index]
        delta = answer.push(event)
        if delta.token_ids:
            self._measure(index, len(delta.token_ids))
        if answer.finish_reason is not None:
            dispatch = self._dispatches[index]
            dispatch.cancel()  # if a stop string ended the answer, the server does not know that yet
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
        choice, answer = self._choices[index], self.answers[index]
        timeline = self._record.choices[index]
        timeline.ended(answer.stats)
        self._services.recent.choice_ended(
            num_prompt_tokens=len(choice.token_ids),
            num_cached_tokens=self.cached_tokens(index),
            num_tokens=answer.num_tokens,
            decode_s=self._last_token_s[index] - (timeline.first_token_s or self._last_token_s[index]),
            stats=answer.stats,
            worker=timeline.prefill_worker or timeline.decode_worker or "",
        )

    def _measure(self, index: int, num_tokens: int) -> None:
        """Update metrics: ``num_tokens`` tokens of a choice have come."""
        now, before = time.monotonic(), self._last_token_s[index]
        self._last_token_s[index] = now
        if before:
            self._token_metrics.later(num_tokens, now, before)
            return
        self._token_metrics.first(num_tokens, now)
        self._services.metrics.time_to_first_token.observe(now - self._started_s)
        self._services.recent.ttft.observe(now - self._started_s, now)


class _ChoiceReceiver:
    """Puts the outputs of one choice into the inbox."""

    __slots__ = ("_inbox", "_index")

    def __init__(self, index: int, inbox: Inbox[tuple[int, RequestOutput | Delta | Exception]]) -> None:
        self._inbox = inbox
        self._index = index

    def take(self, output: RequestOutput | TwinfangError) -> None:
        weight = OUTPUT_WEIGHT
        if isinstance(output, RequestOutput):
            weight += len(output.token_ids) + output.num_logprobs
        self._inbox.put((self._index, output), weight)

    def take_tokens(self, token_ids: tuple[int, ...], now_s: float) -> None:
        self._inbox.put((self._index, RequestOutput("", token_ids)), OUTPUT_WEIGHT + len(token_ids))

    def take_left(self, left: Delta | Exception, token_ids: tuple[int, ...]) -> None:
        self._inbox.put((self._index, left), OUTPUT_WEIGHT + len(token_ids))
