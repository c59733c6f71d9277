"""What the engine asks of other servers' host memory, and the object that asks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.files.start_files import EndedJob, FileJob, HostBytes, StartForm
from telemetry.engine_metrics import NeighbourCacheFigures


class StartNeighbours(Protocol):
    """Starts in the host memory of other servers. Nothing here waits for a network. The engine's thread calls
    everything."""

    @property
    def figures(self) -> NeighbourCacheFigures: ...

    def open(self, form: StartForm) -> None:
        """Notes the form of this server's starts. Only starts of the same form are read."""

    @property
    def is_on(self) -> bool:
        """Whether anything can be read from other servers."""

    def may_read(self, address: str) -> bool:
        """Whether a start may be read now from the server at an address."""

    def seconds(self, num_pages: int) -> float:
        """Estimates how long it takes from now on until ``num_pages`` pages are read."""

    def read(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        """Begins to fill the job's pages from the server at ``job.address``. ``settled`` waits for the
        device's own copies of these pages."""

    def landed(self) -> list[EndedJob]:
        """Returns the jobs that have ended since the last call."""


class NoNeighbours:
    """A server that reads from no other server's host memory."""

    is_on = False

    def __init__(self) -> None:
        self.figures = NeighbourCacheFigures()

    def open(self, form: StartForm) -> None:
        pass

    def may_read(self, address: str) -> bool:
        return False

    def seconds(self, num_pages: int) -> float:
        raise NotImplementedError("without neighbours nothing is read")

    def read(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        raise NotImplementedError("without neighbours nothing is read")

    def landed(self) -> list[EndedJob]:
        return []
