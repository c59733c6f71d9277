"""A server's other ranks, as rank 0 sees them: processes on this host, and links to ranks on other hosts."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.group.rank_link import RankLink
from engine.parallel.tensor_parallel import leave
from engine.ranks.membership import Membership
from engine.ranks.node_links import NodeLinks
from engine.ranks.process import MakeRankFiles, RankMain, RankPlace, RankProcess, no_files
from telemetry.process_end import DEVICE_FAULT_EXIT_CODE
from wire.codec import encode
from wire.errors import DeviceFaultError, TwinfangError, WireError
from wire.messages.ranks import RankLeaves, Stop

log = logging.getLogger(__name__)

FAILURE_GRACE_S = 1.0
"""If a rank ends before all ranks have met, rank 0 has this much time to find and report a more exact
reason."""


class RankProcesses:
    """Ranks 1 and up. They end when this process ends, for whatever reason.

    ``files`` makes each rank's files with cached prefixes. ``reports`` are the types of messages that a rank
    may send; see :meth:`listen`. ``on_fatal`` is called when a rank has ended. ``on_leaving`` is called, on
    another thread, when another host is asked to stop; it gets a rank of that host.
    """

    def __init__(
        self,
        config: EngineConfig,
        main: RankMain,
        *,
        files: MakeRankFiles = no_files,
        reports: tuple[type, ...] = (),
        on_fatal: Callable[[BaseException], None],
        on_leaving: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._reports = reports
        self._unheard: list[tuple[int, Any]] = []
        self._listeners: dict[type, Callable[[int, Any], None]] = {}
        self._files = files
        self._on_fatal = on_fatal
        self._on_leaving = on_leaving
        self._has_joined = self._is_stopping = False
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._report_lock = threading.Lock()
        self._config = config
        nodes, self.size = config.nodes, config.tensor_parallel
        self._others = NodeLinks(nodes, self.size) if nodes.size > 1 else None
        self._folder = tempfile.TemporaryDirectory(prefix="twinfang-ranks-")
        self._processes = [
            RankProcess(
                self._place(rank),
                main,
                reports=reports,
                on_report=self._take,
                on_end=lambda one: self._give_up(one.rank, one),
            )
            for rank in nodes.ranks(self.size)[1:]
        ]
        self._links = {process.rank: process.link for process in self._processes}

    def join(self) -> Membership:
        """Waits until all ranks are there, and returns this process's own place, as rank 0."""
        try:
            if self._others is not None:
                for rank, link in self._others.accept():
                    self._links[rank] = link
                    name = f"rank-{rank}"
                    threading.Thread(target=self._listen, args=(rank, link), name=name, daemon=True).start()
            membership = self._place(0).enter()
        except TwinfangError:
            self._has_failed.set()
            raise
        self._has_joined = True
        return membership

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks on this host."""
        return [process.pid for process in self._processes if process.pid is not None]

    def listen(self, on_report: Callable[[int, Any], None], *types: type) -> None:
        """Passes each report of these types, and the rank that sent it, to ``on_report`` on that rank's
        thread.

        Reports that came before this call are passed at once.
        """
        with self._report_lock:
            self._listeners |= dict.fromkeys(types, on_report)
            unheard, self._unheard = self._unheard, []
            for rank, report in unheard:
                self._hear(rank, report)

    def _hear(self, rank: int, report: Any) -> None:
        listener = self._listeners.get(type(report))
        if listener is None:
            self._unheard.append((rank, report))
        else:
            listener(rank, report)

    def tell(self, message: object) -> None:
        """Sends a message to every other rank, in order. May be called from any thread."""
        data = encode(message)
        with self._lock:
            for link in self._links.values():
                link.send_encoded(data)

    def stop(self) -> None:
        """Ends the processes after they have carried out all calls that were sent earlier."""
        self._is_stopping = True
        try:
            self.tell(Stop())
        except OSError as error:
            log.warning("a rank was gone before it was told to stop: %s", error)
        leave()
        for process in self._processes:
            process.end()
        self._folder.cleanup()

    def _place(self, rank: int) -> RankPlace:
        level, folder = logging.getLogger().level, Path(self._folder.name)
        return RankPlace(self._config, rank, level, files=self._files, meeting_point=folder / "meeting-point")

    def _listen(self, rank: int, link: RankLink) -> None:
        """Listens to a rank of another host. Its log lines are logged on that host."""
        try:
            while True:
                report = link.receive(RankLeaves, *self._reports)
                if isinstance(report, RankLeaves):
                    self._on_leaving(rank)
                else:
                    self._take(rank, report)
        except (EOFError, OSError):
            self._give_up(rank, None)
        except WireError as error:
            log.error("rank %d sent a message that can't be read: %s", rank, error)
            self._give_up(rank, None)

    def _take(self, rank: int, report: Any) -> None:
        try:
            with self._report_lock:
                self._hear(rank, report)
        except BaseException as error:
            log.exception("a report of rank %d could not be taken", rank)
            self._on_fatal(error)

    def _give_up(self, rank: int, process: RankProcess | None) -> None:
        """Ends the server because one rank has ended: no rank can compute a step without it."""
        if self._is_stopping:
            return
        if process is None:
            host = self._config.nodes.host_of(rank, self.size)
            message = f"rank {rank} has ended; the log of host {host} says why"
        else:
            process.end()
            message = f"rank {rank} has ended with exit code {process.exit_code}"
        if self._has_joined:
            log.error("%s", message)
            is_device_fault = process is not None and process.exit_code == DEVICE_FAULT_EXIT_CODE
            self._on_fatal(DeviceFaultError(message) if is_device_fault else RuntimeError(message))
        elif not self._has_failed.wait(FAILURE_GRACE_S):
            log.error("%s", message)
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)  # the main thread waits for that rank inside the store and can't be interrupted
