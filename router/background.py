"""Tasks that run as long as the router does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)

OnFatal = Callable[[BaseException], None]


def start_background(
    coroutine: Coroutine[None, None, None], name: str, on_fatal: OnFatal
) -> asyncio.Task[None]:
    """Start a task that may only end by being cancelled. If the task returns or fails, the reason is logged
    and ``on_fatal`` is called."""

    def ended(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception() or RuntimeError("it returned")
        log.critical("%s ended: %s: %s", name, type(error).__name__, error, exc_info=error)
        on_fatal(error)

    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    task.add_done_callback(ended)
    return task


async def cancel_and_wait(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
