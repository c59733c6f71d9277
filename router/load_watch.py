"""Asks servers for their load, often while they have work of ours."""

from __future__ import annotations

import asyncio
from typing import Protocol

from router.assignments import Assignments
from wire.generation import ServerStats

BUSY_INTERVAL_S = 0.25


class Watched(Protocol):
    """A server's end at the router."""

    @property
    def assignments(self) -> Assignments: ...

    async def stats(self) -> ServerStats | None: ...


async def keep_load(server: Watched, *, idle_interval_s: float) -> None:
    """Until it is cancelled. Without an answer the figures stay what they were."""
    assignments = server.assignments
    while True:
        tokens_when_asked = assignments.num_tokens
        stats = await server.stats()
        if stats is not None:
            assignments.reported(stats, tokens_when_asked=tokens_when_asked)
        is_idle = assignments.has_figures and not assignments.num_requests
        await asyncio.sleep(idle_interval_s if is_idle else BUSY_INTERVAL_S)
