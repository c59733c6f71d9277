"""Reads and writes starts on a thread of its own. The engine's thread asks, and learns later what has ended.

Reads go first. Writes are cut into pieces and limited to a rate, so that they take little of what the engine
needs. Nothing that a file or a disk does ends the process: a start was not found, and that is counted.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.files.start_files import EndedJob, FileJob, HostBytes, PurgedFiles, StartForm
from engine.files.tier_settings import FileCache
from kv_transfer.files.directory import Directory
from kv_transfer.files.file_index import Page, runs
from kv_transfer.files.names import NameChanges
from kv_transfer.files.offline_purge import purge_others
from kv_transfer.files.purge import Purge
from kv_transfer.files.record import Record, header_bytes, owner_tag, pack_header, record_bytes
from kv_transfer.files.seal import Sealer
from kv_transfer.files.segments import Extent, Segment, Segments
from kv_transfer.files.write_pace import WritePace
from kv_transfer.nixl.file_agent import FileAgent
from kv_transfer.nixl.poll_thread import PollThread
from telemetry.engine_metrics import FileCacheFigures, FileFailure
from wire.errors import ConfigError, TransferError
from wire.messages.purge import PurgePrefixes
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

BUFFER_BYTES = 4 << 20
WRITE_PIECE_BYTES = 1 << 20
IO_DEADLINE_S = 30.0
"""If a piece takes longer, it counts as failed."""
PAUSE_S = 30.0
"""After a failed write or read, this long nothing is written or read."""
UPKEEP_S = 10.0
"""Between two looks for segments that are too old or were deleted."""
FIRST_RATE, LATENCY_S = 1e9, 2e-3
"""Bytes/s of a disk that nothing was read from yet, and the time until a read begins."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Settled = Callable[[], None]


@dataclass(frozen=True)
class _Task:
    job: FileJob
    memory: HostBytes
    settled: Settled


class FileStore:
    """Files of one rank. Implements :class:`engine.files.start_files.StartFiles` for a server of one rank.

    ``on_fatal`` gets a bug of the thread. ``changes`` notes what the files have got and lost.
    """

    def __init__(
        self,
        settings: FileCache,
        name: str,
        on_fatal: Callable[[BaseException], None],
        *,
        changes: NameChanges | None = None,
    ) -> None:
        self.figures = FileCacheFigures(size_bytes=settings.num_bytes)
        self._settings = settings
        self._changes = changes
        self._sealer = Sealer.from_file(settings.key_file)
        self._name = f"files of {name}"
        self._thread = PollThread("files", torch.device("cpu"), on_fatal)
        self._on_news: Callable[[], None] | None = None
        self._ended: queue.SimpleQueue[EndedJob] = queue.SimpleQueue()
        # The engine's thread writes the next two.
        self._asked_pages = 0
        self._asked_writes = 0
        # The files' thread writes the next ones.
        self._ended_pages = 0
        self._ended_writes = 0
        self._reads: deque[_Task] = deque()
        self._purges: deque[Purge] = deque()
        self._write: tuple[FileJob, Iterator[int]] | None = None
        self._pace = WritePace()
        self._next_upkeep_s = 0.0
        self._writes_from_s = self._reads_from_s = 0.0
        self.bytes_per_s = FIRST_RATE
        """How fast this rank has read lately."""

    def open(self, form: StartForm, number: int | None = None) -> None:
        """See :class:`StartFiles`. ``number``: see :meth:`Directory.take`.

        Raises :class:`ConfigError` if the size is too small for one start.
        """
        least = record_bytes(FileJob((b"",), b"", 1, (1,) * form.has_kv, (1,) * form.state_pages), form) + 512
        if self._settings.num_bytes < least:
            raise ConfigError(
                f"`file_cache_bytes` gives a rank {self._settings.num_bytes} bytes, which hold no cached "
                f"prefix: a block and a state take {least} bytes; raise it, or leave it out"
            )
        began_s = time.monotonic()
        self._form = form
        self._agent = FileAgent(self._name, max(BUFFER_BYTES, form.page_bytes))
        directory = Directory.take(self._settings.directory, form, number)
        self.folder_number = directory.number
        self._segments = Segments(
            *(directory, self._settings, form, self._sealer, self._changes),
            on_failure=self._failed,
            forget=self._forget,
        )
        self._segments.load()
        self.index = self._segments.index
        self.figures.used_bytes = self._segments.used_bytes
        took_s = time.monotonic() - began_s
        num_blocks, num_bytes = self.index.num_blocks, self.figures.used_bytes
        log.info(
            "file cache %s: %d blocks, %d bytes, read in %.2f s",
            directory.path,
            num_blocks,
            num_bytes,
            took_s,
        )

    def start(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        self._thread.start(self._poll)
        self._thread.post(lambda: None)  # from now on it polls

    # --- on the engine's thread ------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._on_news is not None

    def num_known(self, keys: Sequence[bytes]) -> int:
        # With a block, the index has all blocks before it, and mostly it lacks the last few.
        return next((n for n in range(len(keys), 0, -1) if self.index.has_block(keys[n - 1])), 0)

    def has_start(self, key: bytes) -> bool:
        return self.may_read and self.index.has_start(key)

    def changes(self) -> Sequence[tuple[bytes, bool]]:
        return self.index.start_changes()

    def seconds(self, num_pages: int) -> float:
        return self.read_s(self._asked_pages - self._ended_pages + num_pages)

    def read_s(self, num_pages: int) -> float:
        return LATENCY_S + num_pages * self._form.page_bytes / self.bytes_per_s

    @property
    def may_read(self) -> bool:
        return time.monotonic() >= self._reads_from_s

    @property
    def may_write(self) -> bool:
        return self._asked_writes == self._ended_writes and time.monotonic() >= self._writes_from_s

    def read(self, job: FileJob, memory: HostBytes, settled: Settled) -> None:
        self._asked_pages += job.num_pages
        task = _Task(job, memory, settled)
        self._thread.post(lambda: self._reads.append(task))

    def write(self, job: FileJob, memory: HostBytes, settled: Settled) -> None:
        self._asked_writes += 1
        task = _Task(job, memory, settled)
        self._thread.post(lambda: self._begin_write(task))

    def landed(self) -> list[EndedJob]:
        ended: list[EndedJob] = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    @property
    def pauses_s(self) -> tuple[float, float]:
        """For how many seconds from now on nothing is read, and nothing is written."""
        now_s = time.monotonic()
        return max(0.0, self._reads_from_s - now_s), max(0.0, self._writes_from_s - now_s)

    def pause(self, reads_s: float, writes_s: float) -> None:
        """Reads and writes nothing new for so many seconds: another rank's disk has failed. Thread-safe."""
        now_s = time.monotonic()

        def pause() -> None:
            self._reads_from_s = max(self._reads_from_s, now_s + reads_s)
            self._writes_from_s = max(self._writes_from_s, now_s + writes_s)

        self._thread.post(pause)

    def purge(self, wanted: PurgePrefixes, done: Callable[[PurgedFiles], None]) -> None:
        self._thread.post(lambda: self._begin_purge(wanted, done))

    def close(self) -> None:
        if self._on_news is not None:
            self._thread.stop()
        if not self._agent.is_stuck:
            self._segments.close()
            self._agent.close()

    # --- on the files' thread --------------------------------------------------------------------

    def _poll(self) -> float | None:
        if self._reads:
            self._read(self._reads.popleft())
            return 0.0
        if self._purges:
            self._purge_on(self._purges[0])
            return 0.0
        now_s = time.monotonic()
        if now_s >= self._next_upkeep_s and not self._agent.is_stuck:
            self._keep_up()
            self._next_upkeep_s = now_s + UPKEEP_S
        if self._write is not None:
            if not self._pace.rest_s():
                self._write_on(*self._write)
            return self._pace.rest_s() if self._write is not None else 0.0
        return max(0.0, self._next_upkeep_s - now_s)

    def _keep_up(self) -> None:
        used_bytes = self._segments.used_bytes
        self._segments.purge()
        self.figures.used_bytes = self._segments.used_bytes
        may_write_again = 0.0 < self._writes_from_s <= time.monotonic()
        if may_write_again:
            self._writes_from_s = 0.0
        has_changed = self.figures.used_bytes != used_bytes or (
            self._changes is not None and not self._changes.is_empty
        )
        if self._on_news is not None and (may_write_again or has_changed):
            self._on_news()

    def _end(self, job: FileJob, *, is_done: bool, is_write: bool, place: int = 0) -> None:
        if is_write:
            self._ended_writes += 1
        else:
            self._ended_pages += job.num_pages
        self.figures.used_bytes = self._segments.used_bytes
        self._ended.put(EndedJob(job, is_done, is_write, place))
        if self._on_news is not None:
            self._on_news()

    # reading

    def _read(self, task: _Task) -> None:
        job, is_done = task.job, False
        began_s = time.monotonic()
        try:
            task.settled()
            is_done = self._read_pages(job, task.memory)
        except (OSError, TransferError) as error:
            self._reads_from_s = time.monotonic() + PAUSE_S
            self._failed("read", str(error))
        if is_done:
            num_bytes = job.num_pages * self._form.page_bytes
            rate = num_bytes / max(1e-6, time.monotonic() - began_s)
            self.bytes_per_s += 0.25 * (rate - self.bytes_per_s)
            self.figures.read += 1
            self.figures.read_bytes += num_bytes
        self._end(job, is_done=is_done, is_write=False, place=self.index.place_of(job.start))

    def _read_pages(self, job: FileJob, memory: HostBytes) -> bool:
        pages = self.index.pages_of(job.start, job.keys, num_state_pages=len(job.state_pages))
        if pages is None:
            self._failed("gone", "a cached prefix was given up before it was read")
            return False
        targets = iter((*job.block_pages, *job.state_pages))
        for run in runs(pages, self._agent.buffer.nbytes // self._form.page_bytes):
            segment = self._segments.of(run[0].contents)
            if segment.is_deleted:
                self._segments.purge()
                return False
            if not self._read_run(segment, run, [next(targets) for _ in run], memory):
                return False
        return True

    def _read_run(
        self, segment: Segment, run: Sequence[Page], targets: Sequence[int], memory: HostBytes
    ) -> bool:
        record, size = run[0].record, self._form.page_bytes
        sizes = [self._bytes_of(record.num_block_pages, page.number) for page in run]
        offset = record.pages_at + run[0].number * size
        self._register(segment)
        self._agent.read(segment.fd, offset, sum(sizes), IO_DEADLINE_S)
        for index, (page, target, num_bytes) in enumerate(zip(run, targets, sizes, strict=True)):
            data = self._agent.buffer.data[index * size : index * size + num_bytes]
            opened = segment.seal.open(record.offset, page.number, data, record.check(page.number))
            if opened is None:
                self.index.drop_page(page)
                self._failed(
                    "damaged", f"{segment.path.name}: page {page.number} of the record at {record.offset}"
                )
                return False
            memory[target - 1, :num_bytes] = np.frombuffer(opened, dtype=np.uint8)
        return True

    def _bytes_of(self, num_block_pages: int, page: int) -> int:
        """Returns the bytes of a record's page: the last one of a state may be shorter than the others."""
        before = (page - num_block_pages) * self._form.page_bytes
        return (
            self._form.page_bytes
            if before < 0
            else min(self._form.page_bytes, self._form.state_bytes - before)
        )

    # writing

    def _begin_write(self, task: _Task) -> None:
        self._write = task.job, self._pieces(task)

    def _write_on(self, job: FileJob, pieces: Iterator[int]) -> None:
        """Writes the next piece, then rests."""
        began_cpu_s, num_bytes, is_done = time.thread_time(), 0, False
        try:
            num_bytes = next(pieces, 0)
            is_done = not num_bytes
        except (OSError, TransferError) as error:
            kind: FileFailure = "full" if isinstance(error, OSError) and error.errno in _FULL else "write"
            self._failed(kind, f"{self._segments.folder}: {error}; nothing is written for {PAUSE_S:g} s")
            self._segments.end_current()  # what was written of the record is never written over
            self._writes_from_s = time.monotonic() + PAUSE_S
        self._pace.wrote(num_bytes, time.thread_time() - began_cpu_s)
        if not num_bytes:
            self._write = None
            self._end(job, is_done=is_done, is_write=True)

    def _pieces(self, task: _Task) -> Iterator[int]:
        """Writes one record, and yields the number of bytes after each piece of it."""
        job, memory = task.job, task.memory
        task.settled()
        segment = self._segments.room_for(record_bytes(job, self._form))
        if segment is None or (job.parent and not self.index.has_block(job.parent)):
            self.figures.dropped += 1
            return
        self._register(segment)
        offset = segment.end
        owner = owner_tag(job, segment.seal)
        before_pages = header_bytes(len(job.keys), job.num_pages)
        segment.extents.append(Extent(offset, record_bytes(job, self._form), before_pages, owner))
        at, checks = offset + before_pages, bytearray()
        pages = (*job.block_pages, *job.state_pages)
        most = max(1, WRITE_PIECE_BYTES // self._form.page_bytes)
        for first in range(0, len(pages), most):
            if not self._segments.is_current(segment):  # dropped meanwhile
                self.figures.dropped += 1
                return
            piece = self._gather(memory, pages[first : first + most])
            num_bytes = 0
            for number in range(first, min(first + most, len(pages))):
                size = self._bytes_of(len(job.block_pages), number)
                page = piece[num_bytes : num_bytes + size]
                data, check = segment.seal.close(offset, number, page)
                if data is not page:
                    page[:] = data
                checks += check
                num_bytes += size
            self._agent.write(segment.fd, at, num_bytes, IO_DEADLINE_S)
            at += num_bytes
            yield num_bytes
        self._finish(job, segment, bytes(checks), owner)

    def _gather(self, memory: HostBytes, pages: Sequence[int]) -> memoryview:
        """Copies pages into the buffer, and returns it.

        One call copies all of them, and the interpreter's lock is free meanwhile: the engine's thread would
        have to wait for the lock.
        """
        size = self._form.page_bytes
        piece = self._agent.buffer[: len(pages) * size].reshape(-1, size)
        np.take(memory, np.array(pages) - 1, axis=0, out=piece, mode="clip")  # "raise" copies twice
        return self._agent.buffer.data

    def _finish(self, job: FileJob, segment: Segment, checks: bytes, owner: bytes) -> None:
        """Writes a record's header: from now on it can be read."""
        if not self._segments.is_current(segment):
            self.figures.dropped += 1
            return
        os.pwrite(segment.fd, pack_header(job, checks, segment.end, segment.seal), segment.end)
        num_bytes = record_bytes(job, self._form)
        self._segments.added(
            segment,
            Record(
                *(segment.end, job.keys, job.parent, job.num_blocks, job.place, len(job.block_pages), checks),
                *(num_bytes, job.number, owner),
            ),
        )
        self.figures.written += 1
        self.figures.written_bytes += num_bytes

    # purging

    def _begin_purge(self, wanted: PurgePrefixes, done: Callable[[PurgedFiles], None]) -> None:
        if self._write is not None and wanted.covers(self._write[0].salt):
            job, _ = self._write
            self._write = None
            self._segments.end_current()  # what was written of the record is never written over
            self.figures.dropped += 1
            self._end(job, is_done=False, is_write=True)
        self._purges.append(Purge(self._segments, wanted, done))

    def _purge_on(self, purge: Purge) -> None:
        if purge.go_on():
            return
        self._purges.popleft()
        purge.purged += purge_others(self._segments.folder, purge.wanted, self._sealer)
        self.figures.purged += purge.purged.num_records
        self.figures.used_bytes = self._segments.used_bytes
        purge.done(purge.purged)
        if self._on_news is not None:
            self._on_news()

    # all

    def _failed(self, kind: FileFailure, what: str) -> None:
        self.figures.failures[kind] += 1
        lines.write(logging.WARNING, kind, "file cache: %s: %s", kind, what)

    def _register(self, segment: Segment) -> None:
        if not self._agent.knows(segment.fd):
            self._agent.register(segment.fd, segment.capacity)

    def _forget(self, segment: Segment) -> None:
        self._agent.forget(segment.fd)
