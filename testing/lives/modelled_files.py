"""Simulated files behind the modelled device's host memory. Their thread moves one page at a time, when a
test says so.

The index of what they hold is the real one (:mod:`kv_transfer.files.file_index`). A job that is under way
uses pages of host memory: until its end is reported, nobody may free them or write to them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from engine.files.start_files import EndedJob, FileJob
from kv_transfer.files.file_index import Contents, FileIndex, Page
from kv_transfer.files.record import Record
from kv_transfer.files.seal import CHECK_BYTES
from telemetry.engine_metrics import FileCacheFigures

NOT_READ = "not read yet"


@dataclass(eq=False)
class Moving:
    """A job that is under way."""

    job: FileJob
    memory: dict
    """Contents of host memory's pages."""
    moved: list = field(default_factory=list)
    """Contents of the pages that were moved so far."""
    before: dict = field(default_factory=dict)
    """Contents of the pages when a write began."""
    places: list[Page] | None = None
    """Where the pages of a read are; None: it has not begun."""

    @property
    def targets(self) -> tuple[int, ...]:
        return (*self.job.block_pages, *self.job.state_pages)

    @property
    def next(self) -> int:
        return self.targets[len(self.moved)]

    @property
    def is_complete(self) -> bool:
        return len(self.moved) == len(self.targets)


@dataclass(eq=False)
class Segment:
    records: list[Record] = field(default_factory=list)
    contents: Contents = field(default_factory=Contents)


class ModelledFiles:
    """Implements :class:`engine.files.start_files.StartFiles`. ``seen`` counts what has happened."""

    is_on = True

    def __init__(self, *, has_kv, has_state, page_s, records_each, max_segments, seen: Counter):
        self.figures = FileCacheFigures()
        self.seen = seen
        self.accepts_reads = self.accepts_writes = True
        """False for a while after a disk has failed."""
        self._has_kv, self._has_state = has_kv, has_state
        self._page_s = page_s
        self._records_each, self._max_segments = records_each, max_segments
        self._disk: dict[Record, list] = {}
        """Contents of the pages of each record."""
        self._segments: list[Segment] = []
        self._kill()

    def _kill(self) -> None:
        self.index = FileIndex(has_kv=self._has_kv, has_state=self._has_state)
        self._reads: deque[Moving] = deque()
        self._write: Moving | None = None
        self._ended: list[EndedJob] = []
        self.busy: dict[int, FileJob] = {}
        """Pages of host memory that jobs use whose end nobody has heard of."""

    # --- as the engine sees them -----------------------------------------------------------------

    def num_known(self, keys):
        return next((n for n, key in enumerate(keys) if not self.index.has_block(key)), len(keys))

    def has_start(self, key):
        return self.accepts_reads and self.index.has_start(key)

    def changes(self):
        return self.index.start_changes()

    def read_s(self, num_pages):
        return num_pages * self._page_s

    def seconds(self, num_pages):
        queued = sum(len(one.targets) for one in self._reads)
        return (queued + num_pages) * self._page_s

    @property
    def may_write(self):
        return self.accepts_writes and self._write is None and not any(one.is_write for one in self._ended)

    def read(self, job, memory, settled=None):
        moving = Moving(job, memory)
        self._begin(moving)
        self._reads.append(moving)
        memory |= dict.fromkeys(moving.targets, NOT_READ)

    def write(self, job, memory, settled=None):
        assert self.may_write, "two starts are written at a time"
        self._write = Moving(job, memory)
        self._begin(self._write)
        self._write.before = {page: memory[page] for page in self._write.targets}

    def _begin(self, moving):
        assert moving.targets, "a job without pages"
        assert not self.busy.keys() & set(moving.targets), "two jobs use one page of host memory"
        self.busy |= dict.fromkeys(moving.targets, moving.job)

    def landed(self):
        ended, self._ended = self._ended, []
        for one in ended:
            self.busy = {page: job for page, job in self.busy.items() if job is not one.job}
        return ended

    # --- as their thread works -------------------------------------------------------------------

    @property
    def is_idle(self):
        return not self._reads and self._write is None

    def work(self, num_pages=1):
        """Moves pages. Reads go first."""
        for _ in range(num_pages):
            if self._reads:
                self._read_on(self._reads[0])
            elif self._write is not None:
                self._write_on(self._write)

    def _read_on(self, moving):
        job = moving.job
        if moving.places is None:
            moving.places = self.index.pages_of(job.start, job.keys, num_state_pages=len(job.state_pages))
        if moving.places is None:
            assert not self.index.has_start(job.start), "what files have can't be read"
            self._end_read("gone")
            return
        assert len(moving.places) == len(moving.targets)
        page = moving.places[len(moving.moved)]
        content = self._disk[page.record][page.number]
        moving.memory[moving.next] = content
        moving.moved.append(content)
        if moving.is_complete:
            self._end_read("")

    def _write_on(self, moving):
        page = moving.next
        assert moving.memory[page] == moving.before[page], "a page changed while it was written"
        moving.moved.append(moving.memory[page])
        if moving.is_complete:
            self._add_record(moving)
            self._end_write("")

    def _add_record(self, moving):
        job = moving.job
        checks = b"x" * CHECK_BYTES * job.num_pages
        record = Record(
            *(len(self._disk), job.keys, job.parent, job.num_blocks, job.place, len(job.block_pages)),
            *(checks, 1),
        )
        if not self._segments or len(self._segments[-1].records) == self._records_each:
            self._segments.append(Segment())
        self._disk[record] = moving.moved
        self._segments[-1].records.append(record)
        self.index.add(self._segments[-1].contents, record)
        if len(self._segments) > self._max_segments:
            self.drop_oldest()

    def _end_read(self, fault):
        job = self._reads.popleft().job
        self.seen[f"read {fault or 'done'}"] += 1
        self._ended.append(EndedJob(job, not fault, False, self.index.place_of(job.start)))

    def _end_write(self, fault):
        self.seen[f"write {fault or 'done'}"] += 1
        self._ended.append(EndedJob(self._write.job, not fault, True))
        self._write = None

    # --- faults ----------------------------------------------------------------------------------

    def fail(self):
        """Lets the disk fail under the job that is under way. For a while there are no others."""
        if self._reads:
            self.accepts_reads = False
            self._end_read("failed")
        elif self._write is not None:
            self.accepts_writes = False
            self._end_write("failed")

    def damage(self):
        """Lets a page of the read that is under way be a damaged one."""
        if self._reads and self._reads[0].places:
            moving = self._reads[0]
            self.index.drop_page(moving.places[len(moving.moved)])
            self._end_read("damaged")

    def drop_oldest(self):
        """Deletes a segment. The thread reads a start in one piece, so none has been read in part."""
        if not self._segments or (self._reads and self._reads[0].places):
            return
        oldest = self._segments.pop(0)
        self.index.drop(oldest.contents)
        for record in oldest.records:
            del self._disk[record]
        self.seen["segment dropped"] += 1

    def recover(self):
        self.accepts_reads = self.accepts_writes = True

    def restart(self):
        """Lets the process be killed and start again: what was under way is gone, the segments stay."""
        self._kill()
        for segment in self._segments:
            segment.contents = Contents()
            for record in segment.records:
                self.index.add(segment.contents, record)
        self.recover()

    def end_all(self):
        """Ends all that is under way. Nothing is written from now on."""
        while not self.is_idle:
            self.fail()
        self.accepts_writes = False
