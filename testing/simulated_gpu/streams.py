"""Streams and events of the simulated GPU: queues of operations, and the order in which they run.

An operation runs after everything that was queued before it on its stream. Between streams only events order
operations. How far a queue runs ahead of what the host has waited for is decided by a ``Pace``.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

Operation = Callable[[], None]


class Pace(Protocol):
    """Decides how many queued operations run whenever the host calls the device."""

    def turns(self) -> int: ...

    def choose(self, count: int) -> int:
        """Return which of ``count`` streams runs the next operation."""


class AtOnce:
    """Runs every operation as soon as it is queued, like a synchronous device."""

    def turns(self) -> int:
        return 1 << 30

    def choose(self, count: int) -> int:
        return 0


class Late:
    """Runs operations only when the host waits for them. With ``often``, sometimes some run earlier."""

    def __init__(self, seed: int, often: float = 0.05, most: int = 400) -> None:
        self._choose = random.Random(seed)
        self._often = often
        self._most = most

    def turns(self) -> int:
        return self._choose.randrange(self._most) if self._choose.random() < self._often else 0

    def choose(self, count: int) -> int:
        return self._choose.randrange(count)


class Event:
    """Stands for ``torch.cuda.Event``. An event that was never recorded is complete."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._recorded_on: Stream | None = None
        self._completed = self._records = 0
        self._last = 0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_on = stream or self._streams.current
        self._records += 1
        number = self._last = self._records
        self._recorded_on.queue(lambda: self._complete(number))

    def _complete(self, number: int) -> None:
        self._completed = max(self._completed, number)

    def query(self) -> bool:
        return self._completed >= self._last

    def synchronize(self) -> None:
        self.reach(self._last)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def reach(self, number: int) -> None:
        """Run the streams until the record ``number`` of this event has completed."""
        while self._completed < number:
            assert self._recorded_on is not None
            self._recorded_on.run_one()

    @property
    def last_record(self) -> int:
        return self._last


class Stream:
    """Stands for ``torch.cuda.Stream``: operations that run in order."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._queue: deque[Operation] = deque()

    def queue(self, operation: Operation) -> None:
        self._queue.append(operation)

    def wait_event(self, event: Event) -> None:
        number = event.last_record
        self.queue(lambda: event.reach(number))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._streams)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        while self._queue:
            self.run_one()

    def query(self) -> bool:
        return not self._queue

    def run_one(self) -> None:
        """Run the oldest operation, and what it has to wait for on other streams."""
        self._queue.popleft()()


class Streams:
    """All streams of a device. Each thread has its current stream; at first it is the default stream."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._default = Stream(self)
        self._all = [self._default]
        self._local = threading.local()

    @property
    def current(self) -> Stream:
        return getattr(self._local, "current", self._default)

    def make(self) -> Stream:
        self._all.append(Stream(self))
        return self._all[-1]

    def use(self, stream: Stream | None) -> Stream:
        """Make a stream current on this thread; return the one that was."""
        before = self.current
        self._local.current = stream or before
        return before

    def progress(self) -> None:
        """Let the device run for a while. The host has called it; it has not waited for it."""
        for _ in range(self.pace.turns()):
            busy = [stream for stream in self._all if not stream.query()]
            if not busy:
                return
            busy[self.pace.choose(len(busy))].run_one()

    def synchronize(self) -> None:
        for stream in self._all:
            stream.synchronize()
