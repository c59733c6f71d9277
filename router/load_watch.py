"""Asks servers for their load and their cached prefixes, often while they have work of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.assignments import Assignments
from wire.generation import ServerInfo, ServerStats
from wire.prefixes import PrefixNews

BUSY_INTERVAL_S = 0.25


class Watched(Protocol):
    """A server's end at the router."""

    @property
    def assignments(self) -> Assignments: ...

    @property
    def info(self) -> ServerInfo | None:
        """None as long as the server can't be used."""

    @property
    def num_requests(self) -> int:
        """Of this router, that the server has been sent."""

    async def stats(self) -> ServerStats | None: ...

    async def prefix_news(self, since: int | None) -> PrefixNews | None: ...


async def keep_figures(
    server: Watched,
    *,
    idle_interval_s: float,
    reads_prefixes: Callable[[], bool],
    on_hang: Callable[[], None],
) -> None:
    """Until it is cancelled. Without an answer the figures stay what they were; without one for long, the
    server's circuit breaker opens, and ``on_hang`` is called each time that it is asked in vain."""
    while True:
        if await _hangs(server):
            on_hang()
        if reads_prefixes():
            await _ask_for_prefixes(server)
        await asyncio.sleep(_interval_s(server.assignments, idle_interval_s))


async def _hangs(server: Watched) -> bool:
    """Asks for its load."""
    assignments = server.assignments
    tokens_when_asked, requests_when_asked = assignments.num_tokens, server.num_requests
    stats = await server.stats()
    if stats is not None:
        assignments.reported(
            stats, tokens_when_asked=tokens_when_asked, requests_when_asked=requests_when_asked
        )
        return False
    return server.info is not None and assignments.not_told()


async def _ask_for_prefixes(server: Watched) -> None:
    """All at first, and after a gap; else what has changed, if the server's load says that anything has."""
    index, stats = server.assignments.prefixes, server.assignments.stats
    since = index.version
    if since is not None and stats is not None and stats.prefix_version == since:
        return
    news = await server.prefix_news(since)
    if news is not None and index.version == since:  # else it appeared anew meanwhile
        index.update(news)


def _interval_s(assignments: Assignments, idle_interval_s: float) -> float:
    is_idle = assignments.has_figures and not assignments.num_requests
    return idle_interval_s if is_idle else BUSY_INTERVAL_S
