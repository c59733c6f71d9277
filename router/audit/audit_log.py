"""Writes the audit log of one router process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from router.audit.chain_file import ChainFile
from router.audit.line import now_text
from router.audit.repeats import Repeats

log = logging.getLogger(__name__)

MAX_PENDING = 1000
"""How many lines wait while the file can't be written. Further ones are counted."""
MAX_REFUSAL_KINDS = 5
MAX_VIEW_KINDS = 50
RETRY_S = 1.0


class Audit(Protocol):
    """What the router tells of."""

    def note(self, event: str, **values: Any) -> None:
        """Note an act."""

    def refused(self, kind: str, *, is_known: bool, **values: Any) -> None:
        """Note that somebody was not let in. Refusals of one kind are counted. ``is_known``: it was somebody
        whose role does not suffice, whom a crowd of strangers must not hide."""

    def viewed(self, *, who: str, what: str, **values: Any) -> None:
        """Note a call that changes nothing. Equal calls are counted."""

    async def written(self) -> None:
        """Wait until what was noted is in the file, or the file can't be written."""


class NoAudit:
    """The audit log of a router without one."""

    def note(self, event: str, **values: Any) -> None:
        """Do nothing."""

    def refused(self, kind: str, *, is_known: bool, **values: Any) -> None:
        """Do nothing."""

    def viewed(self, *, who: str, what: str, **values: Any) -> None:
        """Do nothing."""

    async def written(self) -> None:
        """Do nothing."""


class AuditLog:
    """Notes acts at once and writes them in a thread. If the file can't be written, acts go on, and their
    lines are written as soon as that is possible again."""

    def __init__(self, file: ChainFile, process: int, now: Callable[[], float] = time.monotonic) -> None:
        self._file, self._process, self._now = file, process, now
        self._pending: deque[dict[str, Any]] = deque()
        self._num_lost = 0
        self._refusals = Repeats(MAX_REFUSAL_KINDS, {"event": "refused", "what": "others"}, now)
        self._denials = Repeats(MAX_VIEW_KINDS, {"event": "refused", "what": "others"}, now)
        self._views = Repeats(MAX_VIEW_KINDS, {"event": "call", "what": "others"}, now)
        self._counted = (self._refusals, self._denials, self._views)
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._problem = ""

    def note(self, event: str, **values: Any) -> None:
        self._add({"event": event, **values})

    def refused(self, kind: str, *, is_known: bool, **values: Any) -> None:
        record = {"event": "refused", **values}
        if (self._denials if is_known else self._refusals).note(kind, record):
            self._add(record)
        self._wake.set()

    def viewed(self, *, who: str, what: str, **values: Any) -> None:
        record = {"event": "call", "who": who, "what": what, **values}
        if self._views.note((who, what, values.get("from")), record):
            self._add(record)
        self._wake.set()

    async def written(self) -> None:
        await asyncio.shield(asyncio.create_task(self._write()))  # a write that has begun ends, and counts

    async def _write(self) -> None:
        async with self._writing:
            if not self._pending and not self._num_lost:
                return
            records, num_lost = list(self._pending), self._num_lost
            lost = [self._stamped({"event": "lost", "lines": num_lost})] if num_lost else []
            try:
                link = await asyncio.to_thread(self._file.append, [*records, *lost])
            except OSError as error:
                self._tell(str(error))
                return
            for _ in records:
                self._pending.popleft()
            self._num_lost -= num_lost
            self._tell("")
            log.info("the audit log is written up to line %s", link)

    async def run(self) -> None:
        """Write what is noted, until this task is cancelled; then write the counts too."""
        self.note("started")
        try:
            while True:
                self._wake.clear()
                await self.written()
                due_s = min(repeats.ends_s for repeats in self._counted)
                timeout_s = RETRY_S if self._problem else max(0.0, due_s - self._now())
                try:
                    async with asyncio.timeout(min(timeout_s, 3600.0)):
                        await self._wake.wait()
                except TimeoutError:
                    self._count(self._now())
        finally:
            self._count(float("inf"))
            self.note("stopped")
            await self.written()

    def _count(self, now_s: float) -> None:
        for repeats in self._counted:
            if repeats.ends_s <= now_s:
                for record in repeats.counts():
                    self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._num_lost += 1
            return
        self._pending.append(self._stamped(record))
        self._wake.set()

    def _stamped(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"at": now_text(), "process": self._process, **record}

    def _tell(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("the audit log can't be written, %d lines wait: %s", len(self._pending), problem)
        elif self._problem and not problem:
            log.info("the audit log can be written again")
        self._problem = problem
