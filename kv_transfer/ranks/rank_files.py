"""Files with cached prefixes, on a rank other than 0. They do what they are told, and report to rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from engine.files.start_files import FileJob, HostBytes, NoFiles, PurgedFiles, StartFiles, StartForm
from engine.group.rank_link import RankLink
from engine.ranks.process import end_rank
from kv_transfer.files.file_store import FileStore, Settled
from kv_transfer.files.names import NameChanges
from wire.messages.ranks import FileJobEnded, PurgeFiles, RankFileNews, RankPurged, TakeFolder

MAX_NAMES = 100_000
"""Most names in a message. A restart may find millions of blocks."""


def rank_files(config: EngineConfig, rank: int, link: RankLink) -> StartFiles:
    """Makes the files of a rank other than 0."""
    if config.file_cache is None:
        return NoFiles()
    changes = NameChanges()
    settings = config.file_cache.of_rank(config.tensor_parallel)
    return RankFiles(FileStore(settings, f"rank {rank}", end_rank, changes=changes), changes, link)


class RankFiles(NoFiles):
    """Implements :class:`engine.files.start_files.StartFiles`. Nobody asks this rank what it has."""

    def __init__(self, store: FileStore, changes: NameChanges, link: RankLink) -> None:
        self.figures = store.figures
        self._store = store
        self._changes = changes
        self._link = link
        self._told: RankFileNews | None = None
        self._purged: list[RankPurged] = []
        """Purges that have ended since the last report."""

    def open(self, form: StartForm) -> None:
        """Takes the folder that goes with rank 0's, and reports what is in it."""
        self._store.open(form, self._link.receive(TakeFolder).number)
        self._link.takers[PurgeFiles] = self._purge
        self._report()

    def start(self, on_news: Callable[[], None]) -> None:
        self._store.start(self._report)

    def read(self, job: FileJob, memory: HostBytes, settled: Settled) -> None:
        self._store.read(job, memory, settled)

    def write(self, job: FileJob, memory: HostBytes, settled: Settled) -> None:
        self._store.write(job, memory, settled)

    def _purge(self, call: Any) -> None:
        self._store.purge(call.wanted, self._note_purged)

    def _note_purged(self, purged: PurgedFiles) -> None:
        self._purged.append(RankPurged(purged.num_records, purged.num_bytes, purged.error))
        self._report()

    def close(self) -> None:
        self._store.close()

    def _report(self) -> None:
        """Tells rank 0 what has changed: on the files' thread, except for the first report."""
        ended = [FileJobEnded(one.job.number, one.is_done) for one in self._store.landed()]
        added, lost = self._changes.take()
        with contextlib.suppress(OSError):  # rank 0 is gone, and this process is about to end
            while len(added) + len(lost) > MAX_NAMES:
                self._link.send(self._news([], added[:MAX_NAMES], lost[:MAX_NAMES]))
                added, lost = added[MAX_NAMES:], lost[MAX_NAMES:]
            news = replace(self._news(ended, added, lost), purged=tuple(self._purged))
            self._purged.clear()
            if news.purged or news != self._told:
                self._link.send(news)
                self._told = news

    def _news(
        self, ended: list[FileJobEnded], added: tuple[bytes, ...], lost: tuple[bytes, ...]
    ) -> RankFileNews:
        figures = self._store.figures
        return RankFileNews(
            *(tuple(ended), added, lost),
            *(figures.used_bytes, figures.read_bytes, figures.written_bytes),
            {kind: count for kind, count in figures.failures.items() if count},
            self._store.bytes_per_s,
            *self._store.pauses_s,
        )
