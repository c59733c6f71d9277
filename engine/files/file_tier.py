"""Which starts go from host memory to files, and which come back for a request that waits.

* **Out.** Each start that has come to host memory is written, in the order in which they came, one at a time.
  It stays in host memory until it is written, or until host memory needs its room: then it is not written.
* **In.** When a request comes for which files have a longer start than the device and host memory, pages of
  host memory are reserved, and the start is read into them. From there it is promoted like any other.
* **No longer than computing.** A request that could be admitted waits for its start for at most the time that
  computing the same tokens would take. If reading is not expected to end by then, nothing is read.

Reads and writes end at any time, so this object has a clock. Only servers of one rank have files: the plans
of several ranks must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.files.start_files import NO_JOBS, EndedJob, FileJob, FileJobs, NoFiles, StartFiles, longest_start
from engine.memory.cached_start import HostBlock, Match, Place, Reservation
from engine.memory.host_tier import HostTier
from engine.memory.prefix_journal import ReadCost, Tier


@dataclass(eq=False)
class Fetch:
    """A start that is being read from files, for all requests that wait for it."""

    job: FileJob
    reserved: Reservation
    limit_s: float
    """For how long a request may wait."""
    until_s: float | None = None
    """The end of the wait. The wait begins when a request could have been admitted."""
    has_ended: bool = False
    is_late: bool = False
    is_purged: bool = False
    """Whether the start was purged while it was being read: then it is not kept."""

    def is_awaited(self, now_s: float) -> bool:
        """Whether a request that could be admitted now waits instead."""
        if self.has_ended:
            return False
        if self.until_s is None:
            self.until_s = now_s + self.limit_s
        return now_s < self.until_s


class FileTier:
    """Moves starts between host memory and files. Without files it does nothing.

    ``compute_s(start, end)`` estimates the seconds in which the device computes the blocks from ``start`` to
    ``end``. ``wait_s`` is the least that a request may wait, whatever computing takes. ``read_cost`` returns
    what routers are told that reading a start costs.
    """

    def __init__(
        self,
        host: HostTier,
        files: StartFiles | None = None,
        *,
        compute_s: Callable[[int, int], float] = lambda start, end: 0.0,
        wait_s: float = 0.0,
        read_cost: Callable[[], ReadCost] = lambda: ReadCost(0.0, 0.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._files = files or NoFiles()
        self._compute_s = compute_s
        self._wait_s = wait_s
        self._read_cost = read_cost
        self._clock = clock
        self.figures = self._files.figures
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
        if not self._files.is_on:
            return
        for ended in self._files.landed():
            if not ended.is_write:
                self._end_fetch(ended)
            elif self._writing is not None:
                self._host.unpin(self._writing)
                self._writing = None
        self.tell_routers()

    def tell_routers(self) -> None:
        """Notes for routers which starts have come to files and which have gone."""
        changes = self._files.changes()
        for key, is_there in changes:
            (self._host.journal.add if is_there else self._host.journal.remove)(key, Tier.FILES)
        if changes:
            self._price()

    def _price(self) -> None:
        """Notes for routers what reading a start costs now."""
        self._host.journal.price(Tier.FILES, self._read_cost())

    def purge(self, covers: Callable[[str], bool]) -> None:
        """Lets no start enter that is being read and whose cache salt ``covers`` holds for."""
        for fetch in self._fetches.values():
            fetch.is_purged = fetch.is_purged or covers(fetch.job.salt)
        self.land()

    def _end_fetch(self, ended: EndedJob) -> None:
        fetch = self._fetches.pop(ended.job.start)
        fetch.has_ended = True
        if ended.is_done and not fetch.is_purged:
            self._landed_pages += self._host.enter(fetch.reserved, Place(ended.place))
        else:
            self._host.cancel(fetch.reserved)

    def note(self) -> None:
        """Notes the starts that the plan which host memory made last demotes: they are to be written."""
        if not self._files.is_on:
            return
        self._unwritten |= dict.fromkeys(self._host.newcomers)
        if len(self._unwritten) > 64 + 2 * self._host.num_starts:
            self._unwritten = {start: None for start in self._unwritten if start.is_start}

    def take(self) -> FileJobs:
        """Returns what the plan that is being made asks of the files."""
        if not self._files.is_on:
            return NO_JOBS
        self.note()
        reads, self._to_read = tuple(self._to_read), []
        landed, self._landed_pages = tuple(self._landed_pages), []
        writes = self._next_write()
        return FileJobs(reads, writes, landed) if reads or writes or landed else NO_JOBS

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
            start.salt,
        )

    # --- in --------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._files.is_on

    def fetch(self, found: Match, most_blocks: int, salt: str = "") -> Fetch | None:
        """Begins to read the longest start of at most ``most_blocks`` blocks for a request that has come.

        None if there is none that is longer than what the device and host memory have, or if reading it takes
        too long. ``found`` is what the device has, ``salt`` the request's cache salt.
        """
        self._price()
        keys = found.keys[:most_blocks]
        in_host = self._host.longest(found, most_blocks)
        known = len(found.nodes) if in_host is None else in_host.num_blocks
        length = longest_start(self._files, keys, known)
        if not length:
            return None
        under_way = self._fetches.get(keys[length - 1])
        if under_way is not None:
            return under_way
        num_pages = self._host.num_missing_pages(keys[:length])
        limit_s = max(self._compute_s(known, length), self._wait_s)
        if self._files.seconds(num_pages) > limit_s:
            self.figures.computed += 1
            return None
        return self._reserve(keys[:length], limit_s, salt)

    def _reserve(self, keys: Sequence[bytes], limit_s: float, salt: str) -> Fetch | None:
        reserved = self._host.reserve(keys, salt)
        if reserved is None:
            self.figures.computed += 1
            return None
        parent = b"" if reserved.known is None else reserved.known.key
        job = FileJob(
            *(reserved.keys, parent, len(keys), reserved.block_pages, reserved.state_pages), salt=salt
        )
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
            self.figures.late += 1
        return is_awaited

    @property
    def wait_s(self) -> float | None:
        """Seconds until a request has waited long enough; None: no request waits."""
        now_s = self._clock()
        ends = [
            one.until_s for one in self._fetches.values() if one.until_s is not None and one.until_s > now_s
        ]
        return min(ends) - now_s if ends else None
