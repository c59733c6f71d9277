"""Runs all choices of one HTTP request, from dispatch to the last token."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import groupby
from types import TracebackType

from router.admission.fair_queue import QueuedRequest
from router.admission.place import Place
from router.observe.request_record import RequestRecord
from router.serving.answer import Answer, Delta
from router.serving.dispatch import Dispatch
from router.serving.inbox import Inbox
from router.serving.services import Services
from router.serving.slice_lane import LIGHT_WEIGHT, OUTPUT_WEIGHT, SLICE_WEIGHT
from router.serving.text_lane import Lane
from router.serving.text_request import TextRequest
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
        self.lane: Lane | None = None
        """May only be set if there is a single choice. It writes tokens to the client at once if they come
        while the caller waits in :meth:`step`, which then returns only what the lane did not write."""
        self._dispatches: list[Dispatch] = []
        self._unfinished = set(range(len(self._choices)))
        self._last_token_s = [0.0] * len(self._choices)
        self._started_s = 0.0
        self._exits = AsyncExitStack()

    def _count_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    async def __aenter__(self) -> Generation:
        """Wait until the gate lets the request in. Raises what :meth:`Gate.enter` raises."""
        metrics = self._services.metrics
        self._started_s = time.monotonic()
        async with AsyncExitStack() as exits:
            exits.enter_context(metrics.request(self._record.client.api_key.name))
            exits.enter_context(self._services.requests.follow(self._record))
            with self._record.abortable_task():
                queued = QueuedRequest(
                    self._request.client.name,
                    self._request.priority,
                    len(self._choices),
                    self._num_prompt_tokens,
                    since_s=self._started_s,
                    begin=self._begin,
                )
                entry = self._model.gate.enter(queued, deadline=self._request.deadline)
                self._place = await exits.enter_async_context(entry)  # within metrics, which count a 429, too
            self._record.admitted()
            exits.enter_context(self._record.abortable(self._abort))
            exits.enter_context(self._services.backlog.of(self._inbox, self._end_unread))
            self._exits = exits.pop_all()
        metrics.request_queue.labels(self._model.name).observe(self._place.queue_s)
        timer = asyncio.get_running_loop().call_at(self._request.deadline, self._expire)
        self._exits.callback(timer.cancel)
        self._begin()
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
            receiver=_ChoiceReceiver(self, index, self._inbox),
            on_retry=self._services.metrics.retried,
            timeline=self._record.choices[index],
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for dispatch in self._dispatches:
            dispatch.cancel()
        if self._place is not None:
            self._place.num_answer_tokens = self._count_tokens()
            self._services.metrics.keys.used(
                self._record.client.api_key.name,
                num_prompt_tokens=self._num_prompt_tokens,
                num_answer_tokens=self._place.num_answer_tokens,
            )
            self._place = None  # breaks reference cycles: the place and the dispatches refer to this
        self._dispatches.clear()
        self._services.recent.requests.add(1, self._services.recent.now_s)
        await self._exits.__aexit__(kind, error, trace)

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
            self.measure(index, len(delta.token_ids))
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
        )

    def measure(self, index: int, num_tokens: int) -> None:
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
    """Puts the outputs of one choice into the inbox, or passes tokens to the lane."""

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
        generation, lane, weight = self._generation, self._generation.lane, OUTPUT_WEIGHT + len(token_ids)
        if lane is None or not self._inbox.is_awaited:
            self._inbox.put((self._index, RequestOutput("", token_ids)), weight)
            return
        try:
            left = lane.write(generation.answers[self._index], token_ids)
            generation.measure(self._index, len(token_ids))
        except Exception as error:
            self._inbox.put((self._index, error))
            return
        if left is not None:
            self._inbox.put((self._index, left), weight)
