"""A stack that a command starts for its own work and stops at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from twinfang.stack.child import Child
from twinfang.stack.ports import ports_held
from twinfang.stack.stack import Stack, stack_environment
from twinfang.stack.supervisor import Supervisor

Result = TypeVar("Result")


@dataclass
class OwnStack:
    """Runs the processes of ``stack`` while its block lasts. They end with this process, however it ends."""

    stack: Stack
    device: str
    """The flag ``--device``."""
    start_timeout_s: float
    num_rows: int
    """Requests that its decode servers run at once."""
    model_names: tuple[str, ...]
    """The model's name for clients, and its aliases."""
    description: str
    check: Callable[[], None]
    """Raises :class:`TwinfangError` for files that the router could not use, before servers load."""
    _supervision: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return self.stack.url

    @contextlib.asynccontextmanager
    async def running(self, stopped: asyncio.Event) -> AsyncIterator[bool]:
        """Yields True once all processes are ready, or False if ``stopped`` is set before. Raises
        :class:`ChildFailedError` if a process can't start."""
        self.check()
        ready = asyncio.Event()

        def look(child: Child) -> None:
            if supervisor.is_ready:
                ready.set()

        supervisor = Supervisor(
            [self.stack.servers, (self.stack.router,)],
            environment=stack_environment(os.environ, self.device),
            start_timeout_s=self.start_timeout_s,
            on_change=look,
        )
        with ports_held(self.stack.addresses):
            self._supervision = asyncio.create_task(supervisor.run())
            try:
                yield await self.unless_it_fails(_first(ready, stopped))
            finally:
                supervisor.request_stop()
                await asyncio.gather(self._supervision, return_exceptions=True)

    async def unless_it_fails(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns what ``work`` returns, inside the block of :meth:`running`. Cancels it and raises
        :class:`ChildFailedError` if the stack can't go on."""
        assert self._supervision is not None
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._supervision}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._supervision.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()


async def _first(ready: asyncio.Event, stopped: asyncio.Event) -> bool:
    """Waits for one of both. Returns whether it is ``ready``."""
    waits = [asyncio.ensure_future(event.wait()) for event in (ready, stopped)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return ready.is_set() and not stopped.is_set()
    finally:
        for wait in waits:
            wait.cancel()
