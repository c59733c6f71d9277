"""Runs ranks of a server on a host that does not have rank 0. These ranks carry out rank 0's calls."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
from typing import Any

from engine.config import EngineConfig
from engine.ranks.membership import check_model
from engine.ranks.process import MakeRankFiles, RankMain, RankPlace, RankProcess, no_files
from wire.errors import GroupLostError
from wire.messages.ranks import LeaveServer, RankMet

log = logging.getLogger(__name__)


def run(config: EngineConfig, main: RankMain, files: MakeRankFiles = no_files) -> None:
    """Runs this host's ranks until the server's rank 0 says that it stops.

    SIGTERM or SIGINT asks rank 0 to stop; until it has stopped, this host's ranks compute with it. A second
    signal ends them at once. If this host's ranks have not met the other ranks yet, the first signal already
    ends them, and this function raises :class:`KeyboardInterrupt`.

    Raises :class:`GroupLostError` if one of the ranks has ended for another reason, and :class:`ConfigError`
    if the model can't be divided among the ranks.
    """
    check_model(config)
    nodes, ranks = config.nodes, config.nodes.ranks(config.tensor_parallel)
    met = set[int]()
    ended = queue.SimpleQueue[RankProcess]()
    processes: list[RankProcess] = []

    def ask_to_stop(signum: int, _frame: Any) -> None:
        name = signal.Signals(signum).name
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)
        if len(met) < len(ranks):
            log.info("%s: ending, before all ranks have met", name)
            for process in processes:
                process.kill()
            raise KeyboardInterrupt
        log.info("%s: the server is asked to stop", name)
        with contextlib.suppress(OSError):  # the rank has ended, and the queue is about to say so
            processes[0].link.send(LeaveServer())

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, ask_to_stop)
    log.info(
        "host %d of %d: ranks %d to %d of the server at %s",
        *(nodes.rank, nodes.size, ranks.start, ranks.stop - 1, nodes.store.address),
    )
    for rank in ranks:
        place = RankPlace(config, rank, logging.getLogger().level, files=files)
        processes.append(
            RankProcess(
                place,
                main,
                reports=(RankMet,),
                on_report=lambda rank, _: met.add(rank),
                on_end=ended.put,
            )
        )
    _wait(processes, ended)
    log.info("the server has stopped")


def _wait(processes: list[RankProcess], ended: queue.SimpleQueue[RankProcess]) -> None:
    for _ in processes:
        process = ended.get()
        process.end()
        if process.exit_code != 0:
            for other in processes:
                other.end()
            raise GroupLostError(
                f"rank {process.rank} has ended with exit code {process.exit_code}; the server does not go "
                "on without it"
            )
