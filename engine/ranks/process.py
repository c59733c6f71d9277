"""The process of one tensor-parallel rank: its own code, and its handle in the process that started it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from engine.config import EngineConfig
from engine.device_faults import reported, start_faults
from engine.engine import Engine
from engine.files.start_files import NoFiles, StartFiles
from engine.group.lockstep import FollowingLockstep
from engine.group.mesh import Listener
from engine.group.rank_link import RankLink, RankLogHandler
from engine.priority import lower_priority
from engine.ranks.membership import Membership
from engine.ranks.node_links import call_rank_0
from engine.ranks.worker import RankWorker
from telemetry.process_end import DEVICE_FAULT_EXIT_CODE, end_process
from wire.errors import DeviceFaultError, TwinfangError, WireError
from wire.messages.ranks import LeaveServer, RankLeaves, RankLog, RankMet

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


MakeRankFiles = Callable[[EngineConfig, int, RankLink], StartFiles]
"""Makes the files of a rank, in its process, by the number of the rank and its link to rank 0. It must be
defined at the top level of a module."""


def no_files(config: EngineConfig, rank: int, link: RankLink) -> StartFiles:
    return NoFiles()


@dataclass(frozen=True)
class RankPlace:
    """What a rank's process is given at its start."""

    config: EngineConfig
    rank: int
    log_level: int
    files: MakeRankFiles = no_files
    """Makes the rank's files with cached prefixes."""
    meeting_point: Path = Path()
    """File by which the ranks of one host find one another; see
    :func:`engine.parallel.tensor_parallel.join`."""

    def enter(self) -> Membership:
        """Meets the other ranks."""
        return Membership.enter(self.config, self.rank, self.meeting_point)


RankMain = Callable[[Engine, RankLink], None]
"""The function that a rank runs with its engine until rank 0 sends :class:`Stop`. It must be defined at the
top level of a module, since the rank's process imports it by name."""


def work(engine: Engine, link: RankLink) -> None:
    """Runs a rank of a server that hands no state over."""
    RankWorker(engine, link).run()


class RankProcess:
    """Starts a rank's process when it is made. The rank's process ends when this process ends, for whatever
    reason.

    A separate thread calls ``on_report`` with each message of the types ``reports``, and ``on_end`` when the
    process has ended. The rank's log lines are logged in this process.
    """

    def __init__(
        self,
        place: RankPlace,
        main: RankMain,
        *,
        reports: tuple[type, ...] = (),
        on_report: Callable[[int, Any], None] = lambda rank, report: None,
        on_end: Callable[[RankProcess], None],
    ) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold
        ours, theirs = context.Pipe()
        name = f"rank-{place.rank}"
        self.rank = place.rank
        self.link = RankLink(ours)
        self._reports = reports
        self._on_report = on_report
        self._on_end = on_end
        self._process = context.Process(target=_run, args=(main, place, theirs), name=name, daemon=True)
        self._process.start()
        theirs.close()  # so that ours reports the end of the process
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The process's exit code. A negative code names the signal that ended the process; None: it runs."""
        return self._process.exitcode

    def join(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` for the process's end. Returns whether it has ended."""
        self._process.join(timeout_s)
        return not self._process.is_alive()

    def end(self) -> None:
        """Waits for a process that was told to stop; ends the process if it does not stop."""
        if not self.join(STOP_TIMEOUT_S):
            log.error("rank %d did not stop within %s s; ending it", self.rank, STOP_TIMEOUT_S)
            self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()

    def _listen(self) -> None:
        try:
            while True:
                report = self.link.receive(RankLog, *self._reports)
                if isinstance(report, RankLog):
                    logger = logging.getLogger(report.logger)
                    logger.log(report.level, "rank %d: %s", self.rank, report.text)
                else:
                    self._on_report(self.rank, report)
        except (EOFError, OSError):
            self._on_end(self)
        except WireError as error:
            log.error("rank %d sent a message that can't be read: %s", self.rank, error)
            self.kill()
            self._on_end(self)


# --- inside ----------------------------------------------------------------------------------------


def _run(main: RankMain, place: RankPlace, connection: Connection) -> None:
    home = RankLink(connection)
    try:
        lower_priority(place.config.niceness)  # threads made from here on inherit the niceness
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
        logging.basicConfig(level=place.log_level, handlers=[RankLogHandler(home)], force=True)
        is_elsewhere = place.config.nodes.rank > 0  # not on rank 0's host: rank 0 did not start this process
        grace_s = 0.0 if is_elsewhere else STOP_TIMEOUT_S
        threading.Thread(target=_outlive_nobody, args=(grace_s,), name="parent", daemon=True).start()
        link = home
        if is_elsewhere:
            link = call_rank_0(place.config.nodes, place.rank, place.config.tensor_parallel)
            threading.Thread(target=_pass_on, args=(home, link), name="home", daemon=True).start()
        membership = place.enter()
        if is_elsewhere:
            home.send(RankMet())
        files = place.files(place.config, place.rank, link)
        with start_faults():
            engine = _make_engine(place.config, membership, link, files)
        files.start(lambda: None)
        main(engine, link)
        files.close()
        membership.end()
        end_process(0)
    except EOFError:
        log.warning("rank 0 is gone; ending")
        os._exit(1)  # threads of the transfer layer may still run
    except DeviceFaultError as fault:  # whoever noticed it has logged it
        end_rank(fault)
    except TwinfangError as error:
        log.error("%s", error.message)
        os._exit(1)
    except BaseException as error:
        end_rank(reported(error, "this rank"))


def end_rank(fault: BaseException) -> NoReturn:
    """Ends this rank's process at once, because of a fault that is logged. Rank 0 then ends the server."""
    os._exit(DEVICE_FAULT_EXIT_CODE if isinstance(fault, DeviceFaultError) else 1)


def _make_engine(config: EngineConfig, membership: Membership, link: RankLink, files: StartFiles) -> Engine:
    mesh = membership.mesh
    if mesh is None:
        return Engine(config, membership.tp, files=files)
    mesh.start(Listener())  # nothing to do here when the group is lost: rank 0 ends, and so does this rank
    if membership.is_lockstep:
        return Engine(config, membership.tp, lockstep=FollowingLockstep(mesh, link), files=files)
    engine = Engine(config, membership.tp, files=files)
    mesh.watch_closely()
    return engine


def _outlive_nobody(grace_s: float) -> None:
    """Ends this process after its parent process has ended, even if the main thread waits in a collective.

    The main thread first has ``grace_s`` to end by itself. It notices the parent's end if it reads its link.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(grace_s)
    os._exit(1)


def _pass_on(home: RankLink, link: RankLink) -> None:
    """Tells rank 0, on another host, when this host's processes are asked to stop."""
    with contextlib.suppress(EOFError, OSError):
        home.receive(LeaveServer)
        link.send(RankLeaves())
