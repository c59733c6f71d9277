"""The tasks that keep what the router knows of one server up to date."""

from __future__ import annotations

import asyncio

from router.background import OnFatal, cancel_and_wait, start_background
from router.decode_stream import DecodeStream
from router.load_watch import keep_load, keep_prefixes
from router.prefill_client import PrefillClient

Worker = PrefillClient | DecodeStream


class WorkerWatch:
    """Connects to the server and asks for its figures; for its prefixes while a policy reads them."""

    def __init__(self, worker: Worker, *, idle_interval_s: float, on_fatal: OnFatal) -> None:
        self._worker = worker
        self._idle_interval_s = idle_interval_s
        self._on_fatal = on_fatal
        self._prefixes: asyncio.Task[None] | None = None
        worker.start(on_fatal)
        load = keep_load(worker, idle_interval_s=idle_interval_s)
        self._load = start_background(load, f"load of {worker.address}", on_fatal)

    def read_prefixes(self, wanted: bool) -> None:
        if wanted and self._prefixes is None:
            prefixes = keep_prefixes(self._worker, idle_interval_s=self._idle_interval_s)
            self._prefixes = start_background(prefixes, f"prefixes of {self._worker.address}", self._on_fatal)
        elif not wanted and self._prefixes is not None:
            self._prefixes.cancel()
            self._prefixes = None
            self._worker.assignments.prefixes.forget()  # what is not followed goes stale

    async def close(self) -> None:
        """Ends the connection too."""
        await cancel_and_wait(self._load, *([self._prefixes] if self._prefixes else []))
        await self._worker.close()
