"""One HTTP request for text as operators see it: what it waits for, and what it got."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Literal

import orjson

from router.access.api_keys import ApiKey
from router.access.client import ANYBODY, Client
from router.heap import fitted
from router.observe.choice_timeline import ChoiceTimeline
from router.observe.request_trace import UNTRACED, RequestTrace, TraceEnd
from wire.errors import AbortedRequestError, CancelledRequestError, TwinfangError

RequestState = Literal["queued", "prefill", "transfer", "decode", "finished", "failed", "cancelled"]

STAGES: tuple[RequestState, ...] = ("queued", "prefill", "transfer", "decode", "finished")
PACKED = (
    "id",
    "model",
    "num_prompt_tokens",
    "priority",
    "received_s",
    "admitted_s",
    "ended_s",
    "error",
    "error_message",
    "_end",
    "_num_tokens",
)
"""The attributes that :meth:`RequestRecord.packed` takes as they are."""
_values_of = attrgetter(*PACKED)
MIN_PACKED_BYTES = 512
"""Python keeps smaller objects in arenas of a megabyte. An arena can't be returned to the system while it
contains a single object."""


class RequestRecord:
    """What the router remembers of a request: numbers and names, but no prompt, no answer and no key.

    ``count_tokens`` returns the number of tokens so far. It is not called after the request has ended.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        num_prompt_tokens: int,
        num_choices: int,
        count_tokens: Callable[[], int],
        priority: int = 0,
        client: Client = ANYBODY,
        trace: RequestTrace = UNTRACED,
    ) -> None:
        self.id = request_id
        self.model = model
        self.num_prompt_tokens = num_prompt_tokens
        self.priority = priority
        self.client = client
        self.choices: Sequence[ChoiceTimeline] = [
            ChoiceTimeline(trace.traceparent, is_traced=trace.is_recorded) for _ in range(num_choices)
        ]
        self._trace = trace
        self.received_s = time.monotonic()
        self.admitted_s: float | None = None
        self.ended_s: float | None = None
        self.error: str | None = None
        """Code of the error that ended the request early."""
        self.error_message: str | None = None
        """The error's message, for operators."""
        self._end: RequestState | None = None
        self._count_tokens: Callable[[], int] | None = count_tokens
        self._num_tokens = 0
        self._abort: Callable[[TwinfangError], None] | None = None

    @property
    def state(self) -> RequestState:
        """The state of the request. With several choices, it is the state of the choice that has progressed
        least."""
        if self._end is not None:
            return self._end
        if self.admitted_s is None:
            return "queued"
        return min((choice.stage for choice in self.choices), key=STAGES.index)

    @property
    def num_generated_tokens(self) -> int:
        return self._num_tokens if self._count_tokens is None else self._count_tokens()

    def age_s(self, now_s: float) -> float:
        """Return the seconds from the request's arrival to now, or to its end."""
        return (now_s if self.ended_s is None else self.ended_s) - self.received_s

    def admitted(self, abort: Callable[[TwinfangError], None]) -> None:
        """Note that the request was let in and waits no longer. ``abort`` can end it from now on."""
        self.admitted_s = time.monotonic()
        self._abort = abort

    def abort(self, error: TwinfangError) -> bool:
        """End the request with ``error``. Return False if it has ended already."""
        if self._abort is None:
            return False
        self._abort(error)
        return True

    @contextmanager
    def abortable_task(self) -> Iterator[None]:
        """While the block runs, let an abort cancel the current task. The block then raises the abort's
        error."""
        task = asyncio.current_task()
        assert task is not None
        aborted_by: TwinfangError | None = None

        def abort(error: TwinfangError) -> None:
            nonlocal aborted_by
            aborted_by = error
            task.cancel()

        self._abort = abort
        try:
            yield
        except asyncio.CancelledError:
            if aborted_by is not None and task.uncancel() == 0:
                raise aborted_by from None
            raise
        finally:
            self._abort = None

    def ended(self, error: BaseException | None) -> None:
        """Note the end of the request. Called once, by :class:`RequestLog`."""
        self.ended_s = time.monotonic()
        self._end, self._abort = _end_of(error), None
        if isinstance(error, TwinfangError):
            self.error, self.error_message = error.code, error.message
        self._num_tokens, self._count_tokens = self.num_generated_tokens, None
        for choice in self.choices:
            choice.ended(None, self.error or "")
        if self._trace.span is not None:
            self._end_trace(error)

    def packed(self) -> bytes:
        """Return the ended request as one piece of memory, for :meth:`unpacked`. It begins with the id.

        As objects, an ended request would be some forty small ones. If they were made while a body of
        megabytes was parsed, they would lie in the same arenas as the body's objects, and keep all of that
        memory from being returned to the system.
        """
        names = self.client.name, self.client.api_key.name
        choices = [choice.packed() for choice in self.choices]
        return fitted(orjson.dumps((*_values_of(self), names, choices)).ljust(MIN_PACKED_BYTES))

    @classmethod
    def unpacked(cls, data: bytes) -> RequestRecord:
        """Return the request that ``data`` was packed from, without its trace. Of its client and its API key,
        the names are left."""
        *values, (name, key_name), choices = orjson.loads(data)
        client = Client(name, ApiKey(key_name, b""))
        record = cls("", "", num_prompt_tokens=0, num_choices=0, count_tokens=int, client=client)
        for attribute, value in zip(PACKED, values, strict=True):
            setattr(record, attribute, value)
        record._count_tokens = None
        record.choices = [ChoiceTimeline.unpacked(*packed) for packed in choices]
        return record

    def _end_trace(self, error: BaseException | None) -> None:
        waited = None if self.admitted_s is None else (self.received_s, self.admitted_s)
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": self.num_prompt_tokens,
            "gen_ai.usage.output_tokens": self.num_generated_tokens,
        }
        first_s = min((c.first_token_s for c in self.choices if c.first_token_s is not None), default=None)
        if first_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first_s - self.received_s
        if self.error is not None:
            attributes["error.type"] = self.error
        status = (
            error.http_status if isinstance(error, TwinfangError) else 200 if self._end != "failed" else 500
        )
        end = TraceEnd(status, self.error or str(self._end), attributes)
        self._trace.ended(waited, [choice.calls for choice in self.choices], end)


def _end_of(error: BaseException | None) -> RequestState:
    if error is None:
        return "finished"
    if isinstance(error, CancelledRequestError | AbortedRequestError) or not isinstance(error, Exception):
        return "cancelled"  # also a cancelled task, and a closed generator of a stream
    return "failed"
