"""Lends cached prefixes in this server's host memory to other servers, each under a lease of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from engine.engine import Engine
from engine.files.lending import Loan
from engine.files.start_files import StartForm
from engine.host import EngineHost
from kernels.digests.unit_digest import PoolDigests
from kv_transfer.leases.source import START_TTL_S, EndedLease, TransferSource
from kv_transfer.starts.page_digests import page_digests
from telemetry.engine_metrics import NeighbourFailure
from wire.messages.handoff import Region
from wire.messages.neighbours import BorrowReply, BorrowStart, LentStart


class StartLender:
    """The loans of one server. ``region`` is where its host memory lies.

    ``digested_bytes``: loans of at most so many bytes get digests.
    """

    def __init__(
        self,
        host: EngineHost,
        engine: Engine,
        source: TransferSource,
        form: StartForm,
        region: Region,
        *,
        incarnation: str,
        digested_bytes: float,
    ) -> None:
        self._host = host
        self._calls = engine.calls
        self._pages = engine.host_pages
        self._source = source
        self._form = form
        self._region = region
        self._incarnation = incarnation
        self._digested_bytes = digested_bytes
        self._digests: PoolDigests | None = None
        if digested_bytes:
            self._digests = page_digests(self._pages.tensor, form.page_bytes)
        self._loans: dict[tuple[int, int], Loan] = {}
        """By lease id and epoch. Used on the engine's thread."""

    async def borrow(self, ask: BorrowStart) -> BorrowReply:
        """Answers another server that wants to read a start."""
        ours = self._form
        if (ask.fingerprint, ask.layout, ask.page_bytes) != (ours.fingerprint, ours.layout, ours.page_bytes):
            return BorrowReply(None, "form")
        lent, settled = await self._host.ask(lambda: (self._lend(ask), self._pages.settled()))
        if not isinstance(lent, LentStart):
            return BorrowReply(None, lent)
        return BorrowReply(await asyncio.to_thread(self._sealed, lent, settled))

    def _sealed(self, lent: LentStart, settled: Callable[[], None]) -> LentStart:
        """Waits until the device's copies have filled the pages, and returns the loan with its digests."""
        settled()
        pages = (*lent.block_pages, *lent.state_pages)
        if self._digests is None or len(pages) * self._form.page_bytes > self._digested_bytes:
            return lent
        return replace(lent, digests=tuple(self._digests([page - 1 for page in pages])))

    # --- on the engine's thread ------------------------------------------------------------------

    def _lend(self, ask: BorrowStart) -> LentStart | NeighbourFailure:
        loan = self._calls.lend(ask.borrower, ask.key, ask.num_blocks)
        if not isinstance(loan, Loan):
            return loan
        lease = self._source.lend(f"start for {ask.borrower}")
        self._loans[lease.lease_id, lease.epoch] = loan
        return LentStart(
            *(self._incarnation, lease.lease_id, lease.epoch, START_TTL_S, self._region),
            block_pages=loan.block_pages,
            state_pages=loan.start.state_pages,
            place=int(loan.start.place),
        )

    # --- on the transfer thread ------------------------------------------------------------------

    def ended(self, lease: EndedLease) -> None:
        """Lets the start go. The lease's epoch has changed already."""
        self._host.post(lambda: self._calls.end_loan(self._loans.pop((lease.lease_id, lease.epoch))))
