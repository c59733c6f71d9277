"""A host of a server that is not its first: it has ranks, which do as rank 0 says, and nothing else."""

from __future__ import annotations

import logging
import queue
import signal
from typing import Any

from engine.config import EngineConfig
from engine.rank_process import RankMain, RankPlace, RankProcess
from wire.errors import GroupLostError
from wire.ranks import LeaveServer

log = logging.getLogger(__name__)


def run(config: EngineConfig, main: RankMain) -> None:
    """Until the server's rank 0 says that it stops, which SIGTERM and SIGINT ask it for.

    Until it has stopped they compute with it. A second signal ends them at once. Raises
    :class:`GroupLostError` when one of them has ended for another reason.
    """
    nodes, ranks = config.nodes, config.nodes.ranks(config.tensor_parallel)
    ended = queue.SimpleQueue[RankProcess]()
    log.info(
        "host %d of %d: ranks %d to %d of the server at %s",
        *(nodes.rank, nodes.size, ranks.start, ranks.stop - 1, nodes.store.address),
    )
    level = logging.getLogger().level
    processes = [RankProcess(RankPlace(config, rank, level), main, on_end=ended.put) for rank in ranks]

    def ask_to_stop(signum: int, _frame: Any) -> None:
        log.info("%s: the server is asked to stop", signal.Signals(signum).name)
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)
        processes[0].link.send(LeaveServer())

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, ask_to_stop)
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
    log.info("the server has stopped")
