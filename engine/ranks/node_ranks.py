"""A host of a server that is not its first: it has ranks, which do as rank 0 says, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
from typing import Any

from engine.config import EngineConfig
from engine.ranks.membership import check_model
from engine.ranks.process import RankMain, RankPlace, RankProcess
from wire.errors import GroupLostError
from wire.messages.ranks import LeaveServer, RankMet

log = logging.getLogger(__name__)


def run(config: EngineConfig, main: RankMain) -> None:
    """Until the server's rank 0 says that it stops, which SIGTERM and SIGINT ask it for.

    Until it has stopped they compute with it. A second signal ends them at once, and so does the first as
    long as they have not met the others. Raises :class:`KeyboardInterrupt` then, :class:`GroupLostError` when
    one of them has ended for another reason, :class:`ConfigError` for a model that can't be shared so.
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
        place = RankPlace(config, rank, logging.getLogger().level)
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
