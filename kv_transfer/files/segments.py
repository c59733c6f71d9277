"""The segments of one server: what they hold, room for new records, and which segment goes first.

Segments go as a whole, oldest first: when all together exceed the size, or when they are too old. Then the
blocks of other segments that follow theirs are of no use any more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.files.start_files import StartForm
from engine.files.tier_settings import FileCache
from kv_transfer.files.directory import Directory
from kv_transfer.files.file_index import Contents, FileIndex
from kv_transfer.files.names import NameChanges
from kv_transfer.files.record import (
    ALIGNMENT,
    PREFIX_BYTES,
    Record,
    SegmentHeader,
    align,
    body_bytes,
    parse_record,
    purged_bytes,
)
from kv_transfer.files.seal import Seal, Sealer
from telemetry.engine_metrics import FileFailure

NUM_SEGMENTS = 64
"""A segment is closed when it has this part of the whole size."""
AGES_PER_SEGMENT = 4
"""A segment is closed when it has this part of the greatest age, since it is deleted as a whole."""


@dataclass(frozen=True)
class Extent:
    """Bytes of a segment that hold prompts, whether or not the index knows them."""

    offset: int
    num_bytes: int
    header_bytes: int
    """Bytes of the record's header, at its beginning."""
    owner: bytes | None
    """Of a record (:attr:`Record.owner`). None: the end of a segment that can't be read, of anybody."""


@dataclass(eq=False)
class Segment:
    """An open segment. ``end`` is where the next record begins."""

    path: Path
    fd: int
    header: SegmentHeader
    seal: Seal
    capacity: int
    end: int = ALIGNMENT
    contents: Contents = field(default_factory=Contents)
    extents: list[Extent] = field(default_factory=list)
    """All bytes that are or were written, but what was purged."""

    @property
    def is_deleted(self) -> bool:
        """Whether somebody has deleted the file."""
        return os.fstat(self.fd).st_nlink == 0


class Segments:
    """Owns the segments and the index.

    ``on_failure(kind, what)`` counts and logs; ``forget(segment)`` is called before a file is closed.
    """

    def __init__(
        self,
        directory: Directory,
        settings: FileCache,
        form: StartForm,
        sealer: Sealer,
        changes: NameChanges | None = None,
        *,
        on_failure: Callable[[FileFailure, str], None],
        forget: Callable[[Segment], None],
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._form = form
        self._sealer = sealer
        self._on_failure = on_failure
        self._forget = forget
        self.index = FileIndex(has_kv=form.has_kv, has_state=form.state_bytes > 0, changes=changes)
        self._segments: dict[Contents, Segment] = {}
        """Oldest first."""
        self._current: Segment | None = None
        """The segment that gets new records."""

    @property
    def used_bytes(self) -> int:
        return sum(segment.end for segment in self._segments.values())

    @property
    def folder(self) -> Path:
        return self._directory.path

    def of(self, contents: Contents) -> Segment:
        return self._segments[contents]

    @property
    def all(self) -> list[Segment]:
        """All segments, oldest first."""
        return list(self._segments.values())

    def strays(self) -> list[Path]:
        """Returns the files of the folder that could not be opened as segments."""
        known = {segment.path for segment in self._segments.values()}
        return [path for path in self._directory.segments() if path not in known]

    def has(self, segment: Segment) -> bool:
        """Whether the segment is still open."""
        return segment.contents in self._segments

    # --- what earlier processes have left --------------------------------------------------------

    def load(self) -> None:
        """Reads the headers of all records. Foreign segments are deleted: nobody else uses this folder."""
        for path in self._directory.segments():
            try:
                fd = self._directory.open(path)
            except OSError as error:
                self._on_failure("read", f"{path.name}: {error.strerror}")
                continue
            try:
                segment = self._load(path, fd)
            except OSError as error:
                self._on_failure("read", f"{path.name}: {error.strerror}")
                segment = None
            if segment is None:
                os.close(fd)
                with contextlib.suppress(OSError):
                    path.unlink()
        self.purge()
        while self.used_bytes > self._settings.num_bytes:
            self.drop_oldest()

    def _load(self, path: Path, fd: int) -> Segment | None:
        data = os.pread(fd, ALIGNMENT, 0)
        header = SegmentHeader.parse(data, self._sealer.name, self._form)
        if header is None:
            self._on_failure(
                "foreign",
                f"{path} is of another model, layout or key, or its header is damaged; it is deleted",
            )
            return None
        size = os.fstat(fd).st_size
        segment = Segment(path, fd, header, self._sealer.of(header.segment_id), size)
        self._segments[segment.contents] = segment
        while segment.end < size:
            prefix = os.pread(fd, PREFIX_BYTES, segment.end)
            num_purged = purged_bytes(prefix, segment.end, segment.seal)
            record = None if num_purged else self._record_at(segment, prefix, size)
            if record is not None:
                self.index.add(segment.contents, record)
                before_pages = record.pages_at - record.offset
                segment.extents.append(Extent(record.offset, record.num_bytes, before_pages, record.owner))
            elif not num_purged:
                segment.extents.append(Extent(segment.end, size - segment.end, 0, None))
                break
            segment.end += record.num_bytes if record is not None else num_purged or 0
        if segment.end < size:
            segment.end = size  # what is behind the last good record takes room too
        return segment

    def _record_at(self, segment: Segment, prefix: bytes, size: int) -> Record | None:
        """Reads the header of the record at the segment's end; None: there is none, or it is of no use."""
        offset, name = segment.end, segment.path.name
        if not any(prefix):
            self._on_failure("torn", f"{name}: the record at {offset} was never finished")
            return None
        num_bytes = body_bytes(prefix)
        body = b"" if num_bytes is None else os.pread(segment.fd, num_bytes, offset + PREFIX_BYTES)
        record = None
        if num_bytes is not None and len(body) == num_bytes:
            record = parse_record(prefix, body, offset, segment.seal, self._form)
        if record is None:
            self._on_failure("damaged", f"{name}: the header of the record at {offset}")
        elif offset + record.num_bytes > size:
            self._on_failure("torn", f"{name}: the record at {offset} ends behind the file's end")
            return None
        return record

    # --- new records -----------------------------------------------------------------------------

    def room_for(self, num_bytes: int) -> Segment | None:
        """Returns a segment with room for a record of ``num_bytes`` bytes, and reserves it on the disk.

        Drops the oldest segments until there is room.

        None if the record is larger than all segments together may be. Raises :class:`OSError` if the disk is
        full or can't be used.
        """
        if num_bytes + ALIGNMENT > self._settings.num_bytes:
            return None
        current = self._current
        if current is not None and (self._is_over(current, num_bytes) or current.is_deleted):
            self.end_current()
        while self._segments and self.used_bytes + num_bytes + ALIGNMENT > self._settings.num_bytes:
            self.drop_oldest()
        segment = self._current or self._create(num_bytes)
        os.posix_fallocate(segment.fd, segment.end, num_bytes)
        return segment

    def _is_over(self, segment: Segment, num_bytes: int) -> bool:
        max_age_s = self._settings.max_age_s
        is_old = max_age_s is not None and self._age_s(segment) > max_age_s / AGES_PER_SEGMENT
        return is_old or segment.end + num_bytes > segment.capacity

    def _age_s(self, segment: Segment) -> float:
        return time.time() - segment.header.created_s

    def _create(self, num_bytes: int) -> Segment:
        path, fd = self._directory.create()
        try:
            header = SegmentHeader.new(time.time(), self._sealer.name, self._form)
            os.pwrite(fd, header.pack(), 0)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        capacity = max(self._settings.num_bytes // NUM_SEGMENTS, ALIGNMENT + align(num_bytes))
        segment = Segment(path, fd, header, self._sealer.of(header.segment_id), capacity)
        self._segments[segment.contents] = self._current = segment
        return segment

    def added(self, segment: Segment, record: Record) -> None:
        """Notes that a record has been written to the room that :meth:`room_for` has returned."""
        segment.end += record.num_bytes
        self.index.add(segment.contents, record)

    def is_current(self, segment: Segment) -> bool:
        """Whether new records still go to this segment."""
        return segment is self._current

    def end_current(self) -> None:
        """Lets the next record begin a new segment."""
        self._current = None

    # --- what goes -------------------------------------------------------------------------------

    def drop_oldest(self) -> None:
        self.drop(next(iter(self._segments.values())))

    def drop(self, segment: Segment) -> None:
        """Deletes a segment, and forgets what it holds."""
        if segment is self._current:
            self._current = None
        del self._segments[segment.contents]
        self.index.drop(segment.contents)
        if not segment.is_deleted:
            with contextlib.suppress(OSError):
                segment.path.unlink()
        self._close(segment)

    def purge(self) -> None:
        """Drops segments that are too old, and those that somebody has deleted."""
        max_age_s = self._settings.max_age_s
        for segment in list(self._segments.values()):
            if segment.is_deleted:
                self._on_failure("gone", f"{segment.path.name} was deleted")
                self.drop(segment)
            elif max_age_s is not None and self._age_s(segment) > max_age_s:
                self.drop(segment)

    def _close(self, segment: Segment) -> None:
        self._forget(segment)
        os.close(segment.fd)

    def close_files(self) -> None:
        """Closes all segments."""
        for segment in self._segments.values():
            self._close(segment)
        self._segments = {}

    def close(self) -> None:
        self.close_files()
        self._directory.close()
