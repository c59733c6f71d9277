"""Which starts go from host memory to files, and which come from files or from other servers for a request.

* **Out.** Each start that has come to host memory is written, in the order in which they came, one at a time.
  It stays in host memory until it is written, or until host memory needs its room: then it is not written.
* **In.** When a request comes for which files have a longer start than the device and host memory, pages of
  host memory are reserved, and the start is read into them. From there it is promoted like any other. If a
  router says that another server has a still longer one, it is read from that server's host memory.
* **No longer than computing.** A request that could be admitted waits for its start for at most the time that
  computing the same tokens would take. If reading is not expected to end by then, nothing is read.

Reads and writes end at any time, so this object has a clock. Only servers of one rank have files, and read
from others: the plans of several ranks must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.files.neighbours import NoNeighbours, StartNeighbours
from engine.files.start_files import NO_JOBS, EndedJob, FileJob, FileJobs, NoFiles, StartFiles, longest_start
from engine.memory.cached_start import HostBlock, Match, Place, Reservation
from engine.memory.host_tier import HostTier

OnRead = Callable[[bool], None]
"""Gets whether a start was read."""


@dataclass(eq=False)
class Fetch:
    """A start that is being read, for all requests that wait for it."""

    job: FileJob
    reserved: Reservation
    limit_s: float
    """For how long a request may wait."""
    on_read: OnRead = lambda is_read: None
    until_s: float | None = None
    """The end of the wait. The wait begins when a request could have been admitted."""
    has_ended: bool = False
    is_late: bool = False

    def is_awaited(self, now_s: float) -> bool:
        """Whether a request that could be admitted now waits instead."""
        if self.has_ended:
            return False
        if self.until_s is None:
            self.until_s = now_s + self.limit_s
        return now_s < self.until_s


class FileTier:
    """Moves starts between host memory and files, and from other servers to host memory. Without files and
    ``neighbours`` it does nothing.

    ``compute_s(start, end)`` estimates the seconds in which the device computes the blocks from ``start`` to
    ``end``. ``wait_s`` is the least that a request may wait for files, whatever computing takes;
    ``neighbour_wait_s`` the same for another server.
    """

    def __init__(
        self,
        host: HostTier,
        files: StartFiles | None = None,
        neighbours: StartNeighbours | None = None,
        *,
        compute_s: Callable[[int, int], float] = lambda start, end: 0.0,
        wait_s: float = 0.0,
        neighbour_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._files = files or NoFiles()
        self._neighbours = neighbours or NoNeighbours()
        self._compute_s = compute_s
        self._wait_s = wait_s
        self._neighbour_wait_s = neighbour_wait_s
        self._clock = clock
        self.figures = self._files.figures
        self.neighbour_figures = self._neighbours.figures
        self._unwritten: dict[HostBlock, None] = {}
        """Starts that came to host memory and are not in files yet; some may have left host memory."""
        self._writing: HostBlock | None = None
        self._fetches: dict[bytes, Fetch] = {}
        """Starts that are being read, by their keys."""
        self._to_read: list[FileJob] = []
        self._landed_pages: list[int] = []

    # --- a plan ----------------------------------------------------------------------------------

    def land(self) -> None:
        """Takes what has been read or written since the last plan."""
        for ended in self._neighbours.landed():
            self._end_fetch(ended)
        if not self._files.is_on:
            return
        for ended in self._files.landed():
            if not ended.is_write:
                self._end_fetch(ended)
            elif self._writing is not None:
                self._host.unpin(self._writing)
                self._writing = None

    def _end_fetch(self, ended: EndedJob) -> None:
        fetch = self._fetches.pop(ended.job.start)
        fetch.has_ended = True
        if ended.is_done:
            self._landed_pages += self._host.enter(fetch.reserved, Place(ended.place))
        else:
            self._host.cancel(fetch.reserved)
        fetch.on_read(ended.is_done)

    def note(self) -> None:
        """Notes the starts that the plan which host memory made last demotes: they are to be written."""
        if not self._files.is_on:
            return
        self._unwritten |= dict.fromkeys(self._host.newcomers)
        if len(self._unwritten) > 64 + 2 * self._host.num_starts:
            self._unwritten = {start: None for start in self._unwritten if start.is_start}

    def take(self) -> FileJobs:
        """Returns what the plan that is being made asks of the files and of other servers."""
        self.note()
        writes = self._next_write() if self._files.is_on else ()
        if not writes and not self._to_read and not self._landed_pages:
            return NO_JOBS
        reads, self._to_read = tuple(self._to_read), []
        landed, self._landed_pages = tuple(self._landed_pages), []
        return FileJobs(reads, writes, landed)

    # --- out -------------------------------------------------------------------------------------

    def _next_write(self) -> tuple[FileJob, ...]:
        if self._writing is not None or not self._files.may_write:
            return ()
        while self._unwritten:
            start = next(iter(self._unwritten))
            del self._unwritten[start]
            if not start.is_start:
                self.figures.dropped += 1
            elif not self._files.has_start(start.key):
                job = self._job_of(start)
                self._host.pin(start)
                self._writing = start
                return (job,)
        return ()

    def _job_of(self, start: HostBlock) -> FileJob:
        path: list[HostBlock] = []
        block: HostBlock | None = start
        while block is not None and not self._files.has_block(block.key):
            path.append(block)
            block = block.parent
        path.reverse()
        return FileJob(
            tuple(one.key for one in path),
            b"" if block is None else block.key,
            start.num_blocks,
            tuple(one.page for one in path) if self._host.memory.has_kv else (),
            start.state_pages,
            start.place,
        )

    # --- in --------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._files.is_on

    @property
    def is_reading(self) -> bool:
        """Whether any request may have to wait for a start."""
        return bool(self._fetches)

    def may_read(self, address: str) -> bool:
        """Whether anything may be read for a request for which the server at ``address`` has a start."""
        return self._files.is_on or (address != "" and self._neighbours.may_read(address))

    def fetch(self, found: Match, most_blocks: int, address: str = "", num_blocks: int = 0) -> Fetch | None:
        """Begins to read the longest start of at most ``most_blocks`` blocks for a request that has come.

        None if there is none that is longer than what the device and host memory have, or if reading it takes
        too long. ``found`` is what the device has. The server at ``address`` has a start of ``num_blocks``
        blocks; empty: no other server has one.
        """
        keys = found.keys[:most_blocks]
        in_host = self._host.longest(found, most_blocks)
        known = len(found.nodes) if in_host is None else in_host.num_blocks
        length = longest_start(self._files, keys, known) if self._files.is_on else 0
        if max(length, known) < num_blocks <= len(keys) and self._neighbours.may_read(address):
            length = num_blocks
        else:
            address = ""
        if not length:
            return None
        under_way = self._fetches.get(keys[length - 1])
        if under_way is not None:
            return under_way
        num_pages = self._host.num_missing_pages(keys[:length])
        source = self._neighbours if address else self._files
        limit_s = max(self._compute_s(known, length), self._neighbour_wait_s if address else self._wait_s)
        fetch = None
        if source.seconds(num_pages) <= limit_s:
            fetch = self._reserve(keys[:length], limit_s, address)
        if fetch is None:
            source.figures.computed += 1
        return fetch

    def take_over(self, keys: Sequence[bytes], address: str, most_pages: int, on_read: OnRead) -> int:
        """Begins to read the start with the last key from a server that leaves.

        Returns the pages that it takes. 0: nothing is read, because there is no room, the start is here or on
        its way, or it takes more than ``most_pages``.
        """
        num_pages = self._host.num_missing_pages(keys)
        is_here = self._host.usable(keys[-1]) is not None or keys[-1] in self._fetches
        if is_here or num_pages > most_pages or not self._neighbours.may_read(address):
            return 0
        fetch = self._reserve(keys, self._compute_s(0, len(keys)), address)
        if fetch is None:
            return 0
        fetch.on_read = on_read
        return num_pages

    def _reserve(self, keys: Sequence[bytes], limit_s: float, address: str) -> Fetch | None:
        """Takes pages for a start and begins to read it; None: there is no room."""
        reserved = self._host.reserve(keys)
        if reserved is None:
            return None
        parent = b"" if reserved.known is None else reserved.known.key
        pages = reserved.block_pages, reserved.state_pages
        job = FileJob(reserved.keys, parent, len(keys), *pages, address=address)
        self._to_read.append(job)
        fetch = self._fetches[job.start] = Fetch(job, reserved, limit_s)
        return fetch

    def holds_up(self, fetch: Fetch | None) -> bool:
        """Whether the request with this fetch, which could be admitted now, waits instead."""
        if fetch is None or fetch.has_ended:
            return False
        is_awaited = fetch.is_awaited(self._clock())
        if not is_awaited and not fetch.is_late:
            fetch.is_late = True
            figures = self.neighbour_figures if fetch.job.address else self.figures
            figures.late += 1
        return is_awaited

    @property
    def wait_s(self) -> float | None:
        """Seconds until a request has waited long enough; None: no request waits."""
        now_s = self._clock()
        ends = [
            one.until_s for one in self._fetches.values() if one.until_s is not None and one.until_s > now_s
        ]
        return min(ends) - now_s if ends else None
