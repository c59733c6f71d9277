"""Lets peers read the memory of this server's other tensor-parallel ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.ranks.processes import RankProcesses
from kv_transfer.reads.rank_readers import RankReport
from wire.errors import UnavailableError
from wire.messages.handoff import RankMemory
from wire.messages.ranks import Introduce, RankConnected, RankPartEnded, RankPartLate, RankServes, ServePeers

REPORTS = (RankServes, RankConnected, RankPartLate, RankPartEnded)
"""The messages that :func:`kv_transfer.ranks.rank_exchange.serve_rank` may send."""
START_TIMEOUT_S = 60.0


class OtherRanks:
    """The ranks from 1 up, if the server has several. Passes their reports about reads to ``take_report``."""

    def __init__(
        self,
        ranks: RankProcesses | None,
        take_report: Callable[[int, RankReport], None],
        *,
        incarnation: str,
    ) -> None:
        self._ranks = ranks
        self._take_report = take_report
        self._memories: dict[int, RankMemory] = {}
        self._changed = threading.Condition()
        if ranks is not None:
            ranks.listen(self._take, *REPORTS)
            ranks.tell(Introduce(incarnation))

    def memories(self) -> list[RankMemory]:
        """Waits until all ranks are ready, and returns the memory that each one reported, in rank order."""
        num_others = 0 if self._ranks is None else self._ranks.size - 1
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._memories) == num_others, START_TIMEOUT_S):
                raise UnavailableError(
                    f"{num_others - len(self._memories)} tensor-parallel ranks were not ready to be read "
                    f"within {START_TIMEOUT_S} s"
                )
            return [self._memories[rank] for rank in sorted(self._memories)]

    def serve(self, is_on: bool) -> None:
        """Tells the ranks whether peers may be reading now."""
        if self._ranks is not None:
            self._ranks.tell(ServePeers(is_on))

    def _take(self, rank: int, report: Any) -> None:
        if not isinstance(report, RankServes):
            self._take_report(rank, report)
            return
        with self._changed:
            self._memories[rank] = report.memory
            self._changed.notify_all()
