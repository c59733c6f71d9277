"""The tasks that keep what the router knows of one server up to date."""

from __future__ import annotations

from collections.abc import Callable

from router.background import OnFatal, cancel_and_wait, start_background
from router.decode_stream import DecodeStream
from router.load_watch import keep_figures
from router.prefill_client import PrefillClient

Worker = PrefillClient | DecodeStream


class WorkerWatch:
    """Connects to the server and asks for its figures; for its prefixes while a policy reads them.

    ``on_hang`` is told of an engine that does not answer, again and again as long as it does not.
    """

    def __init__(
        self, worker: Worker, *, idle_interval_s: float, on_hang: Callable[[Worker], None], on_fatal: OnFatal
    ) -> None:
        self._worker = worker
        self._reads_prefixes = False
        worker.start(on_fatal)
        figures = keep_figures(
            worker,
            idle_interval_s=idle_interval_s,
            reads_prefixes=lambda: self._reads_prefixes,
            on_hang=lambda: on_hang(worker),
        )
        self._figures = start_background(figures, f"figures of {worker.address}", on_fatal)

    def read_prefixes(self, wanted: bool) -> None:
        self._reads_prefixes = wanted
        if not wanted:
            self._worker.assignments.prefixes.forget()  # what is not followed goes stale

    async def close(self) -> None:
        """Ends the connection too."""
        await cancel_and_wait(self._figures)
        await self._worker.close()
