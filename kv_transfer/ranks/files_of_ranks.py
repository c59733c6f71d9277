"""Files with cached prefixes of a server with several ranks, as rank 0 sees them.

Each rank writes and reads its own share in a folder of its own, and reports to rank 0. A start is there if
all ranks have their shares of it; it is read when all of them have read theirs. Rank 0 alone asks, decides
and tells the others (:mod:`engine.files.file_choices`).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.files.start_files import (
    EndedJob,
    FileJob,
    HostBytes,
    NoFiles,
    PurgedFiles,
    StartFiles,
    StartForm,
)
from engine.files.tier_settings import FileCache
from engine.ranks.processes import RankProcesses
from kv_transfer.files.file_store import FileStore, Settled
from kv_transfer.files.names import BLOCK, STATE, NameChanges
from kv_transfer.ranks.shares import JobEnds, Shares
from telemetry.engine_metrics import FileCacheFigures, RankFileFigures
from wire.messages.purge import PurgePrefixes
from wire.messages.ranks import PurgeFiles, RankFileNews, TakeFolder


def server_files(
    settings: FileCache | None,
    name: str,
    on_fatal: Callable[[BaseException], None],
    ranks: RankProcesses | None,
) -> StartFiles:
    """Makes the files of a server's rank 0. ``ranks`` are its other ranks, if there are any."""
    if settings is None:
        return NoFiles()
    if ranks is None:
        return FileStore(settings, name, on_fatal)
    changes = NameChanges()
    own = FileStore(settings.of_rank(ranks.size), name, on_fatal, changes=changes)
    own.figures.size_bytes = settings.num_bytes
    return FilesOfRanks(own, changes, ranks)


class PurgesOfRanks:
    """Purges that end when all ranks have ended them. Each rank ends them in the order in which they began.
    Any thread may call everything."""

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._num_ranks = num_ranks
        self._begun: deque[Callable[[PurgedFiles], None]] = deque()
        self._ended: list[deque[PurgedFiles]] = [deque() for _ in range(num_ranks)]

    def begin(self, done: Callable[[PurgedFiles], None]) -> None:
        with self._lock:
            self._begun.append(done)

    def ended(self, rank: int, purged: PurgedFiles) -> None:
        """Notes that the oldest purge that a rank has not ended yet has ended there."""
        with self._lock:
            self._ended[rank].append(purged)
            if not all(self._ended):
                return
            done, total = self._begun.popleft(), PurgedFiles()
            for one in self._ended:
                total += one.popleft()
        done(total)


class FilesOfRanks:
    """Implements :class:`engine.files.start_files.StartFiles`."""

    def __init__(self, own: FileStore, changes: NameChanges, ranks: RankProcesses) -> None:
        self._own = own
        self._changes = changes
        self._ranks = ranks
        self._ends = JobEnds(ranks.size)
        self._ended: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        """Numbers of jobs that have ended on another rank, and whether they are done there."""
        self._own_ended: dict[int, EndedJob] = {}
        self._rates: dict[int, float] = {}
        self._purges = PurgesOfRanks(ranks.size)
        self._on_news: Callable[[], None] | None = None
        self._lock = threading.Lock()

    @property
    def figures(self) -> FileCacheFigures:
        return self._own.figures

    def open(self, form: StartForm) -> None:
        """Opens the files of this rank, and then those of the others.

        Their first reports come before their engines, and so this one, are ready.
        """
        self._shares = Shares(self._ranks.size, STATE if form.state_bytes else BLOCK)
        self._own.open(form)
        self._take_own_changes()
        self._ranks.listen(self._take, RankFileNews)
        self._ranks.tell(TakeFolder(self._own.folder_number))

    def start(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        self._own.start(self._take_own_news)

    # --- on the engine's thread ------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._own.is_on

    def num_known(self, keys: Sequence[bytes]) -> int:
        return next((n for n, key in enumerate(keys) if not self._has_block(key)), len(keys))

    def _has_block(self, key: bytes) -> bool:
        name = self._own.index.block_name(key)
        return name is not None and self._shares.is_whole(name)

    def has_start(self, key: bytes) -> bool:
        return self._own.may_read and self._shares.are_whole(self._own.index.start_names(key))

    def changes(self) -> Sequence[tuple[bytes, bool]]:
        """Returns the changes of this rank's files. The others have nearly always the same."""
        return self._own.changes()

    def seconds(self, num_pages: int) -> float:
        """Estimates by the slowest rank. All have the same pages to read."""
        return self._own.seconds(num_pages) * self._slowness

    def read_s(self, num_pages: int) -> float:
        return self._own.read_s(num_pages) * self._slowness

    @property
    def _slowness(self) -> float:
        slowest = min(list(self._rates.values()), default=self._own.bytes_per_s)
        return max(1.0, self._own.bytes_per_s / slowest)

    @property
    def may_write(self) -> bool:
        return self._own.may_write

    def read(self, job: FileJob, memory: HostBytes, settled: Settled) -> None:
        self._own.read(job, memory, settled)

    def write(self, job: FileJob, memory: HostBytes, settled: Settled) -> None:
        self._own.write(job, memory, settled)

    def landed(self) -> list[EndedJob]:
        """Returns the jobs that have ended on all ranks since the last call."""
        ended: list[EndedJob] = []
        for one in self._own.landed():
            self._own_ended[one.job.number] = one
            ended += self._note(one.job.number, one.is_done)
        while not self._ended.empty():
            ended += self._note(*self._ended.get())
        if ended:
            self._take_own_changes()  # what was written is in the index before it has ended
        return ended

    def _note(self, number: int, is_done: bool) -> list[EndedJob]:
        is_done_by_all = self._ends.note(number, is_done)
        if is_done_by_all is None:
            return []
        return [replace(self._own_ended.pop(number), is_done=is_done_by_all)]

    def purge(self, wanted: PurgePrefixes, done: Callable[[PurgedFiles], None]) -> None:
        """Lets all ranks delete their shares. Counts are sums of all ranks."""
        self._purges.begin(done)
        self._ranks.tell(PurgeFiles(wanted))
        self._own.purge(wanted, lambda purged: self._purges.ended(0, purged))

    def close(self) -> None:
        self._own.close()

    # --- on any thread ---------------------------------------------------------------------------

    def _take_own_news(self) -> None:
        """Called on the files' thread of this rank."""
        self._take_own_changes()
        self._tell_news()

    def _take_own_changes(self) -> None:
        with self._lock:
            self._update(0, *self._changes.take())

    def _update(self, rank: int, added: Sequence[bytes], lost: Sequence[bytes]) -> None:
        self._shares.update(rank, added, lost)
        self.figures.incomplete = self._shares.num_incomplete

    def _take(self, rank: int, news: RankFileNews) -> None:
        """Takes another rank's report. Called on the thread that listens to the rank."""
        with self._lock:
            self._update(rank, news.added, news.lost)
            self._rates[rank] = news.bytes_per_s
            self.figures.others[rank] = RankFileFigures(
                news.used_bytes, news.read_bytes, news.written_bytes, news.failures
            )
        if news.pause_reads_s or news.pause_writes_s:
            self._own.pause(news.pause_reads_s, news.pause_writes_s)
        for purged in news.purged:
            self._purges.ended(rank, PurgedFiles(purged.num_records, purged.num_bytes, purged.error))
        for one in news.ended:
            self._ended.put((one.number, one.is_done))
        if news.ended:
            self._tell_news()

    def _tell_news(self) -> None:
        if self._on_news is not None:
            self._on_news()
