"""What the engine asks of the files behind host memory, and the object that has no files.

A *start* is a position from which a request can resume: a state, and the KV of all tokens before it. It moves
in pages of host memory. The engine's thread calls everything here but :meth:`StartFiles.close`.

Each rank has files with its share of each start. Only rank 0 asks what they hold: it answers for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from telemetry.engine_metrics import FileCacheFigures
from wire.messages.purge import PurgePrefixes

HostBytes = NDArray[np.uint8]
"""Host memory, ``[num_pages, page_bytes]``. Row ``i`` is page ``i + 1``: page 0 is the null page."""


@dataclass(frozen=True)
class StartForm:
    """The form of all starts of a server. Files of another form are of no use to it."""

    fingerprint: str
    """Names the model."""
    layout: str
    """Names the layout of blocks and states."""
    page_bytes: int
    state_bytes: int
    """Bytes of a state; 0 if the model has no states."""
    has_kv: bool = True

    @property
    def state_pages(self) -> int:
        return -(-self.state_bytes // self.page_bytes)


@dataclass(frozen=True, eq=False)
class FileJob:
    """Blocks and a state to be written to files, or to be read from them."""

    keys: tuple[bytes, ...]
    """Keys of the blocks, in order. When a start is written, these are the blocks that files lack."""
    parent: bytes
    """Key of the block before them; empty if there is none."""
    num_blocks: int
    """Number of blocks from the prompt's start to the end of the start."""
    block_pages: tuple[int, ...]
    """The page of each block; empty if the model has no KV."""
    state_pages: tuple[int, ...]
    """Pages of the state; empty: no state is moved."""
    place: int = 0
    """Why the state was kept (:class:`engine.memory.cached_start.Place`)."""
    number: int = 0
    """Names the job, on all ranks. What it has written keeps the number for ever."""
    address: str = ""
    """Address of the server from whose host memory the start is read; empty: it is read from files."""
    salt: str = ""
    """The cache salt of the prompts that the start belongs to (:mod:`wire.messages.cache_salt`)."""

    @property
    def start(self) -> bytes:
        """Key of the start's last block."""
        return self.keys[-1] if self.keys else self.parent

    @property
    def num_pages(self) -> int:
        return len(self.block_pages) + len(self.state_pages)


@dataclass(frozen=True)
class FileJobs:
    """What a plan asks of the files and of other servers, after its copies to and from host memory."""

    reads: tuple[FileJob, ...] = ()
    writes: tuple[FileJob, ...] = ()
    landed_pages: tuple[int, ...] = ()
    """Pages that were filled by reads, and that hold starts since this plan."""


NO_JOBS = FileJobs()


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended: nothing more lands in its pages, and nothing more is read from them."""

    job: FileJob
    is_done: bool
    """False: the job failed. The reason has been counted and logged."""
    is_write: bool
    place: int = 0
    """Of a start that was read: why its state was kept."""


@dataclass(frozen=True)
class PurgedFiles:
    """What a purge has deleted."""

    num_records: int = 0
    num_bytes: int = 0
    """Bytes of these records."""
    error: str = ""
    """Why something may still be there; empty: nothing is."""

    def __add__(self, other: PurgedFiles) -> PurgedFiles:
        return PurgedFiles(
            self.num_records + other.num_records,
            self.num_bytes + other.num_bytes,
            self.error or other.error,
        )


class StartFiles(Protocol):
    """Starts in files. Nothing here waits for a disk."""

    @property
    def figures(self) -> FileCacheFigures: ...

    def open(self, form: StartForm) -> None:
        """Reads what earlier processes have left. The only call that reads files itself, before serving.

        Raises :class:`wire.errors.ConfigError` if the directory can't be used.
        """

    def start(self, on_news: Callable[[], None]) -> None:
        """Begins to work. ``on_news`` is called on any thread when :meth:`landed` may have something, or when
        one more start may be written."""

    @property
    def is_on(self) -> bool:
        """Whether there are files, and :meth:`start` was called."""

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the blocks with these keys, from a prompt's start, the files of all ranks
        have."""

    def has_start(self, key: bytes) -> bool:
        """Whether a request could start behind the block with this key, because all ranks can read their
        shares."""

    def changes(self) -> Sequence[tuple[bytes, bool]]:
        """Returns the starts that came (True) and went (False) since the last call, in order."""

    def seconds(self, num_pages: int) -> float:
        """Estimates how long it takes from now on until ``num_pages`` pages are read."""

    def read_s(self, num_pages: int) -> float:
        """Estimates how long reading ``num_pages`` pages takes when nothing else is read."""

    @property
    def may_write(self) -> bool:
        """Whether a start may be written now."""

    def read(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        """Begins to fill the job's pages. ``settled`` waits for the device's own copies of these pages."""

    def write(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        """Begins to write the job's pages, which nobody changes before the job has ended."""

    def landed(self) -> list[EndedJob]:
        """Returns the jobs that have ended since the last call."""

    def purge(self, wanted: PurgePrefixes, done: Callable[[PurgedFiles], None]) -> None:
        """Begins to delete starts. ``done`` is called on any thread when nothing of them is left. A start of
        these that is being written when the call comes is not written."""

    def close(self) -> None:
        """Ends all work. The last call."""


class NoFiles:
    """A server without files."""

    is_on = False
    may_write = False

    def __init__(self) -> None:
        self.figures = FileCacheFigures()

    def open(self, form: StartForm) -> None:
        pass

    def start(self, on_news: Callable[[], None]) -> None:
        pass

    def num_known(self, keys: Sequence[bytes]) -> int:
        return 0

    def has_start(self, key: bytes) -> bool:
        return False

    def changes(self) -> Sequence[tuple[bytes, bool]]:
        return ()

    def seconds(self, num_pages: int) -> float:
        raise NotImplementedError("without files nothing is read")

    def read_s(self, num_pages: int) -> float:
        raise NotImplementedError("without files nothing is read")

    def read(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        raise NotImplementedError("without files nothing is read")

    def write(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        raise NotImplementedError("without files nothing is written")

    def landed(self) -> list[EndedJob]:
        return []

    def purge(self, wanted: PurgePrefixes, done: Callable[[PurgedFiles], None]) -> None:
        done(PurgedFiles())

    def close(self) -> None:
        pass


def longest_start(files: StartFiles, keys: Sequence[bytes], longer_than: int) -> int:
    """Returns the number of blocks of the longest start in files among those of a prompt with these keys.

    0 if files have none that is longer than ``longer_than`` blocks.
    """
    return next((n for n in range(len(keys), longer_than, -1) if files.has_start(keys[n - 1])), 0)
