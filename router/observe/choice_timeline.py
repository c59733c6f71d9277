"""What has happened to one choice, and when. The choice's dispatch reports this a few times in all, not for
each token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal

from wire.messages.generation import RequestStats
from wire.messages.traceparent import with_span

EventName = Literal[
    "received",
    "queued",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode_queue",
    "first_token",
    "decode",
    "done",
    "retry",
    "moved",
]
Stage = Literal["queued", "prefill", "transfer", "decode", "finished"]


@dataclass(slots=True)
class TimelineEvent:
    """Something that took ``duration_s``, is under way (None), or happened at one moment (0)."""

    name: EventName
    at_s: float
    """In seconds of the monotonic clock."""
    worker: str = ""
    attempt: int = 0
    duration_s: float | None = 0.0
    detail: str = ""
    """For a retry: the code of the error that led to it."""


_values_of = attrgetter(*(field.name for field in fields(TimelineEvent)))


@dataclass(slots=True)
class ServerCall:
    """A call to a server, for the request's trace."""

    name: Literal["prefill", "decode"]
    worker: str
    attempt: int
    at_s: float
    span_id: str
    end_s: float | None = None
    error: str = ""


class ChoiceTimeline:
    """Events in the order in which they became known. Times that servers report later replace the times that
    the router measured.

    ``traceparent`` is that of the request. Calls are noted only if the request's trace is recorded.
    """

    def __init__(self, traceparent: str = "", *, is_traced: bool = False) -> None:
        self.calls: list[ServerCall] = []
        self._traceparent = traceparent
        self._is_traced = is_traced
        self.events: list[TimelineEvent] = []
        self.stage: Stage = "queued"
        self.prefill_worker: str | None = None
        self.decode_worker: str | None = None
        self.first_token_s: float | None = None
        self._attempt = 0
        self._prefilled_s = 0.0
        self._submitted: TimelineEvent | None = None

    @classmethod
    def unpacked(
        cls, prefill_worker: str | None, decode_worker: str | None, *events: Sequence[Any]
    ) -> ChoiceTimeline:
        """Return the timeline of a choice that has ended, from what :meth:`packed` returned for it."""
        timeline = cls()
        timeline.prefill_worker, timeline.decode_worker = prefill_worker, decode_worker
        timeline.events = [TimelineEvent(*event) for event in events]
        timeline.stage = "finished"
        return timeline

    def packed(self) -> list[Any]:
        """Return what is shown of a choice after its end, as values of JSON."""
        events = [_values_of(event) for event in self.events]
        return [self.prefill_worker, self.decode_worker, *events]

    def call(self, name: Literal["prefill", "decode"], worker: str) -> str:
        """Note that a server is about to be called. Return the ``traceparent`` for the call."""
        if not self._is_traced:
            return self._traceparent
        call = ServerCall(name, worker, self._attempt, time.monotonic(), secrets.token_hex(8))
        self.calls.append(call)
        return with_span(self._traceparent, call.span_id)

    @property
    def servers(self) -> str:
        """Ids of the servers that were asked last, for a line in the log."""
        return ", ".join(filter(None, (self.prefill_worker, self.decode_worker)))

    def prefill_called(self, worker: str) -> None:
        self.prefill_worker = worker
        self._begin("prefill", worker, time.monotonic())

    def prefilled(self, *, queue_s: float, prefill_s: float) -> None:
        """Note that the prefill server has answered. ``queue_s`` and ``prefill_s`` are the times that the
        server measured."""
        now = self._prefilled_s = time.monotonic()
        self._end_calls(now, "", "prefill")
        called = self._under_way("prefill")
        if called is None:
            return
        start = max(called.at_s, now - prefill_s)
        queue = TimelineEvent(
            "prefill_queue", max(called.at_s, start - queue_s), called.worker, self._attempt
        )
        queue.duration_s = start - queue.at_s
        self.events.insert(self.events.index(called), queue)
        called.at_s, called.duration_s = start, now - start
        if self._submitted is not None:
            self.stage = "transfer"

    def submitted(self, worker: str, *, reads: bool) -> None:
        """Note that the decode server has the request. ``reads``: the server reads a state from another
        server, now or when the prompt has been computed."""
        self.decode_worker = worker
        is_early = self._under_way("prefill") is not None
        self._submitted = self._begin("transfer" if reads else "prefill", worker, time.monotonic())
        if is_early:
            self.stage = "prefill"

    def progressed(self) -> None:
        """Note that the first token of an attempt has arrived. Further calls in the same attempt have no
        effect."""
        if self.stage == "decode" or self.decode_worker is None:
            return
        now = time.monotonic()
        self._end_all(now)
        if self.first_token_s is None:
            self.first_token_s = now
            self.events.append(TimelineEvent("first_token", now, self.decode_worker, self._attempt))
        self._begin("decode", self.decode_worker, now)

    def retried(self, detail: str) -> None:
        self._leave("retry", detail)

    def moved(self, stats: RequestStats | None) -> None:
        """Note that the decode server gives up the request and another server continues it."""
        self._told(stats)
        self._leave("moved")

    def ended(self, stats: RequestStats | None, error: str = "") -> None:
        """Note that the choice has ended: all its tokens have come, or it was given up. ``error`` is the code
        of the error that ended it, if there was an error."""
        self._told(stats)
        now = time.monotonic()
        self._end_calls(now, error)
        self._end_all(now)
        if self.stage != "finished":
            self.events.append(TimelineEvent("done", now, self.decode_worker or "", self._attempt))
        self.stage = "finished"

    def _leave(self, name: Literal["retry", "moved"], detail: str = "") -> None:
        now = time.monotonic()
        self._end_calls(now, detail)
        self._end_all(now)
        worker = self.decode_worker or self.prefill_worker or ""
        self.events.append(TimelineEvent(name, now, worker, self._attempt, detail=detail))
        self._attempt += 1
        self._submitted = None
        self.stage = "prefill"

    def _told(self, stats: RequestStats | None) -> None:
        """Replace the times that the router measured by the decode server's own times."""
        event = self._submitted
        if stats is None or event is None or event.duration_s is None:
            return
        end = event.at_s + event.duration_s
        queue = TimelineEvent("decode_queue", event.at_s, event.worker, event.attempt)
        queue.duration_s = min(stats.queue_s, event.duration_s)
        self.events.insert(self.events.index(event), queue)
        is_read = event.name == "transfer"
        event.at_s = max(queue.at_s + queue.duration_s, self._prefilled_s if is_read else 0.0)
        took_s = stats.transfer_s if is_read else stats.first_token_s
        event.duration_s = max(0.0, min(took_s, end - event.at_s))
        self._submitted = None

    def _begin(
        self, name: Literal["prefill", "transfer", "decode"], worker: str, now: float
    ) -> TimelineEvent:
        event = TimelineEvent(name, now, worker, self._attempt, duration_s=None)
        self.events.append(event)
        self.stage = name
        return event

    def _under_way(self, name: EventName) -> TimelineEvent | None:
        return next((e for e in reversed(self.events) if e.name == name and e.duration_s is None), None)

    def _end_calls(self, now: float, error: str, *names: str) -> None:
        for call in self.calls:
            if call.end_s is None and (not names or call.name in names):
                call.end_s, call.error = now, error

    def _end_all(self, now: float) -> None:
        for event in self.events:
            if event.duration_s is None:
                event.duration_s = now - event.at_s
