"""Deletes prompts from files: those of one owner, those of an age, or all.

A segment holds records of several owners. For one owner, the records' bytes are overwritten with zeros,
headers last: if the process dies meanwhile, the same purge finds the rest later. A segment in which nothing
else is left is deleted. So are segments that can't be overwritten, and all of them in the other kinds of
purges. The end of a segment that can't be read, such as a record that was being written when the process
was killed, may be of anybody and is overwritten too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from engine.files.start_files import PurgedFiles
from kv_transfer.files.record import pack_purged
from kv_transfer.files.segments import Extent, Segment, Segments
from wire.messages.purge import PurgePrefixes

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Bytes that are overwritten before other work of the files' thread goes on."""
_ZEROS = bytes(PIECE_BYTES)


class Purge:
    """One purge, in pieces. ``done`` is for whoever lets it go on."""

    def __init__(
        self, segments: Segments, wanted: PurgePrefixes, done: Callable[[PurgedFiles], None]
    ) -> None:
        self.purged = PurgedFiles()
        self.done = done
        self._segments = segments
        self.wanted = wanted
        self._pieces = self._run()

    def go_on(self) -> bool:
        """Deletes a piece. Returns False when nothing is left to delete."""
        return next(self._pieces, None) is not None

    def _run(self) -> Iterator[int]:
        """Yields the bytes of each piece."""
        owner, older_than_s = self.wanted.owner, self.wanted.older_than_s
        for segment in self._segments.all:
            is_old = older_than_s is None or segment.header.created_s <= time.time() - older_than_s
            if not self._segments.has(segment) or not is_old:
                continue  # dropped while other work went on, or too young
            if owner is not None:
                yield from self._purge_owner(segment, segment.seal.tag(owner))
            else:
                self._count(one for one in segment.extents if one.owner is not None)
                self._delete(segment)
                yield segment.end
        if older_than_s is None:
            self._delete_strays()

    def _delete_strays(self) -> None:
        """Deletes files that can't be opened: nobody knows whose prompts they hold."""
        for path in self._segments.strays():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self._failed(path, error)

    def _failed(self, path: Path, error: OSError) -> None:
        self.purged = replace(self.purged, error=f"{path} can't be deleted: {error.strerror}")

    def _purge_owner(self, segment: Segment, owner: bytes) -> Iterator[int]:
        self._segments.index.drop(segment.contents, lambda record: record.owner == owner)
        gone = [extent for extent in segment.extents if extent.owner in (owner, None)]
        try:
            for extent in gone:
                for piece in _overwrite(segment, extent):
                    yield piece
                    if not self._segments.has(segment):
                        return
                segment.extents.remove(extent)
                self._count([extent] if extent.owner is not None else ())
            if gone:
                os.fdatasync(segment.fd)
        except OSError as error:
            log.warning("file cache: %s can't be overwritten: %s", segment.path.name, error.strerror)
            self._count(one for one in segment.extents if one.owner == owner)
            self._delete(segment)
            return
        if gone and not segment.extents and not self._segments.is_current(segment):
            self._delete(segment)

    def _count(self, extents: Iterable[Extent]) -> None:
        sizes = [extent.num_bytes for extent in extents]
        before = self.purged
        self.purged = replace(
            before,
            num_records=before.num_records + len(sizes),
            num_bytes=before.num_bytes + sum(sizes),
        )

    def _delete(self, segment: Segment) -> None:
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            self._failed(segment.path, error)
        self._segments.drop(segment)


def _overwrite(segment: Segment, extent: Extent) -> Iterator[int]:
    """Overwrites a record's pages, and then its header, with what says how long the record was."""
    at, end = extent.offset + extent.header_bytes, extent.offset + extent.num_bytes
    while at < end:
        num_bytes = min(PIECE_BYTES, end - at)
        os.pwrite(segment.fd, _ZEROS[:num_bytes], at)
        at += num_bytes
        yield num_bytes
    if extent.owner is not None:
        first = pack_purged(extent.num_bytes, extent.offset, segment.seal)
        os.pwrite(segment.fd, first.ljust(extent.header_bytes, b"\0"), extent.offset)
        yield extent.header_bytes
