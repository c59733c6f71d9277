"""The task that keeps the router's knowledge of one server up to date: its load, its cached prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.background import OnFatal, cancel_and_wait, start_background
from router.fleet.links.decode_stream import DecodeStream
from router.fleet.links.prefill_client import PrefillClient

Worker = PrefillClient | DecodeStream

BUSY_INTERVAL_S = 0.25
"""Time between two questions to a server that has requests of this router."""


class WorkerWatch:
    """Connects to the server and asks for its stats, and for its prefixes while a policy reads them.

    ``on_hang`` is called again and again as long as the server's engine does not answer.
    """

    def __init__(
        self, worker: Worker, *, idle_interval_s: float, on_hang: Callable[[Worker], None], on_fatal: OnFatal
    ) -> None:
        self._worker = worker
        self._idle_interval_s = idle_interval_s
        self._on_hang = on_hang
        self._reads_prefixes = False
        worker.start(on_fatal)
        self._task = start_background(self._keep_asking(), f"stats of {worker.address}", on_fatal)

    def read_prefixes(self, wanted: bool) -> None:
        self._reads_prefixes = wanted
        if not wanted:
            self._worker.assignments.prefixes.forget()  # a copy that is not updated goes stale

    async def close(self) -> None:
        """End the watch and the connection."""
        await cancel_and_wait(self._task)
        await self._worker.close()

    async def _keep_asking(self) -> None:
        """Ask again and again. Without an answer the stats stay as they were. If no answer comes for long,
        the server's circuit breaker opens."""
        assignments = self._worker.assignments
        while True:
            if await self._hangs():
                self._on_hang(self._worker)
            if self._reads_prefixes:
                await self._ask_for_prefixes()
            is_idle = assignments.has_stats and not assignments.num_requests
            await asyncio.sleep(self._idle_interval_s if is_idle else BUSY_INTERVAL_S)

    async def _hangs(self) -> bool:
        """Ask for the server's stats. Return whether its engine hangs."""
        worker, assignments = self._worker, self._worker.assignments
        tokens_when_asked, requests_when_asked = assignments.num_tokens, worker.num_requests
        stats = await worker.stats()
        if stats is None:
            return worker.info is not None and assignments.not_told()
        assignments.reported(
            stats, tokens_when_asked=tokens_when_asked, requests_when_asked=requests_when_asked
        )
        return False

    async def _ask_for_prefixes(self) -> None:
        """Get all prefixes at first and after changes were missed. Otherwise get only the changes; ask for
        nothing if the stats show that there are none."""
        index, stats = self._worker.assignments.prefixes, self._worker.assignments.stats
        since = index.version
        if since is not None and stats is not None and stats.prefix_version == since:
            return
        news = await self._worker.prefix_news(since)
        if news is not None and index.version == since:  # otherwise the server appeared anew meanwhile
            index.update(news)
