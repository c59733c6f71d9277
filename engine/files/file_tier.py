"""Starts on their way between host memory and files, and from other servers. It has no clock, and looks at no
file.

* **Out.** A start is written from host memory, one at a time. It can't be given up before it is written.
* **In.** For a request that has come, pages of host memory are reserved, and a start is read into them, from
  files or from another server's host memory. From there it is promoted like any other. The request waits
  until the start is there, or until it is late.

What is read, written and late, and what has ended, comes as :class:`wire.messages.ranks.FileNews`, before the
plan of a step (:mod:`engine.files.file_choices`). With several ranks, all get the same news before the same
step. So each of them makes the same plans, whatever its own files do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.files.start_files import NO_JOBS, FileJob, FileJobs
from engine.memory.cached_start import HostBlock, Place, Reservation
from engine.memory.host_tier import HostTier
from telemetry.engine_metrics import FileCacheFigures, NeighbourCacheFigures
from wire.messages.ranks import FileJobEnded, FileNews, WriteToFiles


@dataclass(eq=False)
class Fetch:
    """A start that is being read, for all requests that wait for it."""

    job: FileJob
    reserved: Reservation
    is_awaited: bool = False
    """Whether a request that could have been admitted has waited for it."""
    has_ended: bool = False
    is_late: bool = False
    """No request waits for it any more."""


class FileTier:
    """Owns the starts that are being read and written. Without news it does nothing."""

    def __init__(
        self,
        host: HostTier,
        figures: FileCacheFigures | None = None,
        neighbour_figures: NeighbourCacheFigures | None = None,
    ) -> None:
        self._host = host
        self.figures = figures or FileCacheFigures()
        self.neighbour_figures = neighbour_figures or NeighbourCacheFigures()
        self.arrived: list[bytes] = []
        """Keys of the starts that host memory has got since the last news: they are to be written."""
        self.writing: FileJob | None = None
        self.fetches: dict[int, Fetch] = {}
        """What is being read, by the number of the job."""
        self._to_read: list[FileJob] = []
        self._to_write: list[FileJob] = []
        self._landed_pages: list[int] = []

    # --- before a plan ---------------------------------------------------------------------------

    def take_news(self, news: FileNews | None) -> None:
        """Takes what has been decided before the plan that is about to be made, except what is to be read."""
        self.arrived.clear()
        if news is None:
            return
        for ended in news.ended:
            self._end(ended)
        for number in news.late:
            self.fetches[number].is_late = True
        if news.write is not None:
            self._begin_write(news.write)

    def _end(self, ended: FileJobEnded) -> None:
        if self.writing is not None and ended.number == self.writing.number:
            start = self._host.start(self.writing.start)
            assert start is not None, "what is being written is not given up"
            self._host.unpin(start)
            self.writing = None
            return
        fetch = self.fetches.pop(ended.number, None)
        if fetch is None:  # a benchmark's own write
            return
        fetch.has_ended = True
        if ended.is_done:
            self._landed_pages += self._host.enter(fetch.reserved, Place(ended.place))
        else:
            self._host.cancel(fetch.reserved)

    def _begin_write(self, write: WriteToFiles) -> None:
        start = self._host.start(write.key)
        assert start is not None, "it was chosen because host memory has it"
        path: list[HostBlock] = []
        block: HostBlock | None = start
        while block is not None and block.num_blocks > write.num_known:
            path.append(block)
            block = block.parent
        path.reverse()
        self._host.pin(start)
        self.writing = FileJob(
            tuple(one.key for one in path),
            b"" if block is None else block.key,
            start.num_blocks,
            tuple(one.page for one in path) if self._host.memory.has_kv else (),
            *(start.state_pages, start.place, write.number),
            salt=start.salt,
        )
        self._to_write.append(self.writing)

    def figures_of(self, address: str) -> FileCacheFigures | NeighbourCacheFigures:
        """Returns the counts of files, or of other servers if ``address`` is one's."""
        return self.neighbour_figures if address else self.figures

    def fetch(self, number: int, keys: Sequence[bytes], salt: str, address: str = "") -> Fetch | None:
        """Begins to read the start behind the blocks with these keys, or lets one more request wait for it.

        It is read from the server at ``address``; empty: from files. ``salt`` is the cache salt that the keys
        are chained to. None if host memory has no room for it, or has all of it by now.
        """
        under_way = self.fetches.get(number)
        if under_way is not None:
            return under_way
        if not self._host.num_missing_pages(keys):
            return None
        reserved = self._host.reserve(keys, salt)
        if reserved is None:
            return None
        parent = b"" if reserved.known is None else reserved.known.key
        pages = reserved.block_pages, reserved.state_pages
        job = FileJob(reserved.keys, parent, len(keys), *pages, number=number, address=address, salt=salt)
        self._to_read.append(job)
        fetch = self.fetches[number] = Fetch(job, reserved)
        return fetch

    # --- in a plan -------------------------------------------------------------------------------

    def holds_up(self, fetch: Fetch | None) -> bool:
        """Whether the request with this fetch, which could be admitted now, waits instead."""
        if fetch is None or fetch.has_ended or fetch.is_late:
            return False
        fetch.is_awaited = True
        return True

    def note(self) -> None:
        """Notes the starts that the plan which host memory made last demotes."""
        self.arrived += [start.key for start in self._host.newcomers]

    def take(self) -> FileJobs:
        """Returns what the plan that is being made asks of the files."""
        self.note()
        if not self._to_read and not self._to_write and not self._landed_pages:
            return NO_JOBS
        jobs = FileJobs(tuple(self._to_read), tuple(self._to_write), tuple(self._landed_pages))
        self._to_read, self._to_write, self._landed_pages = [], [], []
        return jobs
