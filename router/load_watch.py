"""Asks servers for their load and their cached prefixes, often while they have work of ours."""

from __future__ import annotations

import asyncio
from typing import Protocol

from router.assignments import Assignments
from wire.generation import ServerStats
from wire.prefixes import PrefixNews

BUSY_INTERVAL_S = 0.25


class Watched(Protocol):
    """A server's end at the router."""

    @property
    def assignments(self) -> Assignments: ...

    @property
    def num_requests(self) -> int:
        """Of this router, that the server has been sent."""

    async def stats(self) -> ServerStats | None: ...

    async def prefix_news(self, since: int | None) -> PrefixNews | None: ...


async def keep_load(server: Watched, *, idle_interval_s: float) -> None:
    """Until it is cancelled. Without an answer the figures stay what they were."""
    assignments = server.assignments
    while True:
        tokens_when_asked, requests_when_asked = assignments.num_tokens, server.num_requests
        stats = await server.stats()
        if stats is not None:
            assignments.reported(
                stats, tokens_when_asked=tokens_when_asked, requests_when_asked=requests_when_asked
            )
        await asyncio.sleep(_interval_s(assignments, idle_interval_s))


async def keep_prefixes(server: Watched, *, idle_interval_s: float) -> None:
    """The same for the server's prefixes: all at first, and after a gap; else what has changed."""
    index = server.assignments.prefixes
    while True:
        since = index.version
        news = await server.prefix_news(since)
        if news is not None and index.version == since:  # else it appeared anew meanwhile
            index.update(news)
        await asyncio.sleep(_interval_s(server.assignments, idle_interval_s))


def _interval_s(assignments: Assignments, idle_interval_s: float) -> float:
    is_idle = assignments.has_figures and not assignments.num_requests
    return idle_interval_s if is_idle else BUSY_INTERVAL_S
