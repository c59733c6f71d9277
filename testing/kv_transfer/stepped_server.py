"""A server's engine and its files, stepped by a test as the server's thread would."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

from engine.engine import Engine
from engine.files.start_files import StartFiles
from engine.ranks.lead import LeadEngine
from engine.request import Request
from testing.engines.leading import own

Fatal = queue.SimpleQueue[BaseException]
DEADLINE_S = 120.0


class SteppedServer:
    """``fatal`` gets the bugs of other threads and ranks."""

    def __init__(self, engine: Engine | LeadEngine, files: StartFiles, fatal: Fatal) -> None:
        self.engine: Any = engine
        self.own = own(engine)
        self.files = files
        self.fatal = fatal
        self._news = threading.Event()
        files.start(self._news.set)

    def step(self) -> list[Any]:
        """Computes a step. If there was nothing to do, waits for news of the files first."""
        self._news.clear()
        result = self.engine.step()
        if result.did_nothing:
            self._news.wait(0.05 if result.wait_s is None else min(0.05, result.wait_s))
        assert self.fatal.empty(), self.fatal.get()
        return list(result.outputs)

    def serve(self, requests: Iterable[Request], at_once: int) -> None:
        """Lets all requests run to their ends."""
        waiting, active = list(reversed(list(requests))), 0
        until = time.monotonic() + DEADLINE_S
        while waiting or active:
            while waiting and active < at_once:
                self.engine.add(waiting.pop())
                active += 1
                until = time.monotonic() + DEADLINE_S
            for output in self.step():
                assert output.error is None, output.error
                active -= output.finish_reason is not None
            assert time.monotonic() < until, "the requests have not ended"

    def settle(self) -> None:
        """Lets all that is in host memory be written."""
        until = time.monotonic() + DEADLINE_S
        while True:
            self.step()
            if not self.own.file_choices.has_work:
                return
            assert time.monotonic() < until, "the files have not settled"
