"""The processes of a server's other ranks, as rank 0 sees them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.group_mesh import Listener
from engine.lockstep import FollowingLockstep
from engine.membership import Membership
from engine.priority import lower_priority
from engine.rank_link import RankLink, RankLogHandler
from engine.rank_worker import RankWorker
from engine.tensor_parallel import leave
from wire.codec import encode
from wire.ranks import RankLog, Stop

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RankPlace:
    """What a rank's process is told when it is made."""

    config: EngineConfig
    rank: int
    meeting_point: Path
    """Where the ranks find one another; see :func:`engine.tensor_parallel.join`."""
    log_level: int

    def make_engine(self, link: RankLink) -> Engine:
        """Sets the process up, meets the other ranks and makes its engine; the first thing that it does."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which stops the others
        logging.basicConfig(level=self.log_level, handlers=[RankLogHandler(link)], force=True)
        membership = self.enter()
        if membership.mesh is None:
            return Engine(self.config, membership.tp)
        membership.mesh.start(Listener())  # the group lost, rank 0 ends, and so does this one
        lockstep = FollowingLockstep(membership.mesh, link)
        return Engine(self.config, membership.tp, lockstep=lockstep)

    def enter(self) -> Membership:
        """Meets the other ranks."""
        return Membership.enter(self.config, self.rank, self.meeting_point)


RankMain = Callable[[RankPlace, RankLink], None]
"""What a rank's process runs; named in a module, since it is imported there."""


def work(place: RankPlace, link: RankLink) -> None:
    """A rank of a server that hands nothing over."""
    RankWorker(place.make_engine(link), link).run()


class RankProcesses:
    """Ranks 1 and up. They end when this process does, however it does.

    ``reports`` are the messages that a rank may send; see :meth:`listen`. ``on_fatal`` is told that a rank
    has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        main: RankMain,
        *,
        reports: tuple[type, ...] = (),
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._reports = reports
        self._reports_wait = queue.SimpleQueue[tuple[int, Any]]()
        self._on_report: Callable[[int, Any], None] = lambda *report: self._reports_wait.put(report)
        self._on_fatal = on_fatal
        self._folder = tempfile.TemporaryDirectory(prefix="twinfang-ranks-")
        self._has_joined = self._is_stopping = False
        self._lock = threading.Lock()
        self._report_lock = threading.Lock()
        self._place = RankPlace(
            config,
            rank=0,
            meeting_point=Path(self._folder.name) / "meeting-point",
            log_level=logging.getLogger().level,
        )
        self._ranks = [self._start(rank, main) for rank in range(1, config.tensor_parallel)]

    def join(self) -> Membership:
        """This process's own place, rank 0, once all are there."""
        membership = self._place.enter()
        self._has_joined = True
        return membership

    @property
    def size(self) -> int:
        """Ranks, this process's included."""
        return 1 + len(self._ranks)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def listen(self, on_report: Callable[[int, Any], None]) -> None:
        """``on_report`` is told of each report and of who sent it, on a thread of that rank; of what came
        before at once."""
        with self._report_lock:
            self._on_report = on_report
            while not self._reports_wait.empty():
                on_report(*self._reports_wait.get())

    def tell(self, message: object) -> None:
        """Sends a message to every other rank. From any thread; order is kept."""
        data = encode(message)
        with self._lock:
            for rank in self._ranks:
                rank.link.send_encoded(data)

    def stop(self) -> None:
        """Ends the processes after what they were told before."""
        self._is_stopping = True
        try:
            self.tell(Stop())
        except OSError as error:
            log.warning("a rank was gone before it was told to stop: %s", error)
        leave()
        for rank in self._ranks:
            rank.process.join(STOP_TIMEOUT_S)
            if rank.process.is_alive():
                log.error("rank %d did not stop within %s s; ending it", rank.number, STOP_TIMEOUT_S)
                rank.process.kill()
        self._folder.cleanup()

    def _start(self, number: int, main: RankMain) -> _Rank:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks as they stand
        ours, theirs = context.Pipe()
        place = replace(self._place, rank=number)
        process = context.Process(target=_run, args=(main, place, theirs), name=f"rank-{number}", daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the process
        rank = _Rank(number, process, RankLink(ours))
        threading.Thread(target=self._listen, args=(rank,), name=f"rank-{number}", daemon=True).start()
        return rank

    def _listen(self, rank: _Rank) -> None:
        try:
            while True:
                report = rank.link.receive(RankLog, *self._reports)
                if not isinstance(report, RankLog):
                    with self._report_lock:
                        self._on_report(rank.number, report)
                    continue
                logger = logging.getLogger(report.logger)
                logger.log(report.level, "rank %d: %s", rank.number, report.text)
        except (EOFError, OSError):
            if not self._is_stopping:
                self._give_up(rank)
        except BaseException as error:
            log.exception("a report of rank %d could not be taken", rank.number)
            self._on_fatal(error)

    def _give_up(self, rank: _Rank) -> None:
        """One rank has ended, so all must: none can compute a step without it."""
        rank.process.join(STOP_TIMEOUT_S)
        message = f"rank {rank.number} has ended with exit code {rank.process.exitcode}"
        log.error("%s", message)
        if self._has_joined:
            self._on_fatal(RuntimeError(message))
        else:
            os._exit(1)  # the main thread waits for that rank inside the store and can't be reached


@dataclass(frozen=True)
class _Rank:
    number: int
    process: SpawnProcess
    link: RankLink


def _outlive_nobody() -> None:
    """Ends this process after rank 0, also where its main thread waits in a collective for that."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(STOP_TIMEOUT_S)  # the main thread learns of it by its link, if it listens
    os._exit(1)


def _run(main: RankMain, place: RankPlace, connection: Connection) -> None:
    try:
        lower_priority(place.config.niceness)  # threads made from here on inherit it
        threading.Thread(target=_outlive_nobody, name="parent", daemon=True).start()
        main(place, RankLink(connection))
        leave()
    except EOFError:
        log.warning("rank %d: rank 0 is gone; ending", place.rank)
        os._exit(1)  # threads of the transfer layer may be about
    except BaseException:
        log.exception("rank %d failed", place.rank)
        os._exit(1)
