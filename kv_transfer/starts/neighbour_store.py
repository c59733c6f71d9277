"""What a server knows of other servers' host memory: from whom it may read now, and how long that takes.

The engine's thread asks, and learns later what has ended. :mod:`kv_transfer.starts.start_reader` reads.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from engine.files.start_files import EndedJob, FileJob, HostBytes, StartForm
from telemetry.engine_metrics import NeighbourCacheFigures, NeighbourFailure
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

FIRST_ASK_S, FIRST_BYTES_PER_S = 5e-3, 1e9
"""Estimates before anything was read: the time until a neighbour has lent a start, the rate of reading."""
WEIGHT = 0.25
"""Weight of the last read in the estimates."""
FORGET_S = 30.0
"""After so long without a read the first estimates count again: otherwise one slow read would be the last."""
PAUSE_S = 30.0
"""A server that did not answer, or sent damage, is not asked again for so long."""
MAX_PAUSED = 1024
_PAUSES = frozenset[NeighbourFailure]({"form", "damaged", "late", "lost"})


class StartReads(Protocol):
    """Reads starts. See :class:`kv_transfer.starts.start_reader.StartReader`."""

    @property
    def has_room(self) -> bool: ...

    def begin(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None: ...


class NeighbourStore:
    """Implements :class:`engine.files.neighbours.StartNeighbours`."""

    def __init__(self) -> None:
        self.figures = NeighbourCacheFigures()
        self.form: StartForm | None = None
        self._reads: StartReads | None = None
        self._post: Callable[..., None] = lambda *arguments: None
        self._wake: Callable[[], None] = lambda: None
        self._ended: queue.SimpleQueue[EndedJob] = queue.SimpleQueue()
        self._num_queued_pages = 0
        """Written by the engine's thread alone."""
        self._ask_s, self._bytes_per_s, self._measured_s = FIRST_ASK_S, FIRST_BYTES_PER_S, 0.0
        self._paused_until_s: dict[str, float] = {}

    def open(self, form: StartForm) -> None:
        self.form = form

    def start(self, reads: StartReads, post: Callable[..., None], wake: Callable[[], None]) -> None:
        """Begins to read. ``post`` runs a function with its arguments on the event loop; ``wake`` lets the
        engine look at what has landed."""
        self._reads, self._post, self._wake = reads, post, wake

    # --- on the engine's thread ------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._reads is not None

    def may_read(self, address: str) -> bool:
        if self._reads is None or not self._reads.has_room:
            return False
        return time.monotonic() >= self._paused_until_s.get(address, 0.0)

    def seconds(self, num_pages: int) -> float:
        assert self.form is not None
        if time.monotonic() > self._measured_s + FORGET_S:
            self._ask_s, self._bytes_per_s = FIRST_ASK_S, FIRST_BYTES_PER_S
        num_bytes = (self._num_queued_pages + num_pages) * self.form.page_bytes
        return self._ask_s + num_bytes / self._bytes_per_s

    def read(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        assert self._reads is not None
        self._num_queued_pages += job.num_pages
        self._post(self._reads.begin, job, memory, settled)

    def landed(self) -> list[EndedJob]:
        ended: list[EndedJob] = []
        while not self._ended.empty():
            one = self._ended.get()
            self._num_queued_pages -= one.job.num_pages
            ended.append(one)
        return ended

    # --- on the event loop, for the reader -------------------------------------------------------

    def was_read(self, job: FileJob, place: int, *, ask_s: float, read_s: float) -> None:
        """Notes that a job's pages are filled. It took ``ask_s`` until the start was lent."""
        assert self.form is not None
        num_bytes = job.num_pages * self.form.page_bytes
        self.figures.read += 1
        self.figures.read_bytes += num_bytes
        self._ask_s += WEIGHT * (ask_s - self._ask_s)
        self._bytes_per_s += WEIGHT * (num_bytes / max(read_s, 1e-6) - self._bytes_per_s)
        self._measured_s = time.monotonic()
        self._end(EndedJob(job, True, False, place))

    def failed(self, job: FileJob, kind: NeighbourFailure, why: str) -> None:
        """Notes that a job could not be done: nothing more lands in its pages."""
        self.figures.failures[kind] += 1
        level = logging.INFO if kind == "gone" else logging.WARNING
        lines.write(level, f"neighbour {kind}", "cached prefix of %s: %s: %s", job.address, kind, why)
        if kind in _PAUSES:
            self._paused_until_s.pop(job.address, None)
            while len(self._paused_until_s) >= MAX_PAUSED:
                del self._paused_until_s[next(iter(self._paused_until_s))]
            self._paused_until_s[job.address] = time.monotonic() + PAUSE_S
        self._end(EndedJob(job, False, False))

    def _end(self, ended: EndedJob) -> None:
        self._ended.put(ended)
        self._wake()
