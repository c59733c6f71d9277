"""Reads cached prefixes out of other servers' host memory: asks for a loan, reads it, checks it.

Used on the event loop. Reads end by their own deadlines, and each ends exactly once. Whatever a neighbour
does, the worst that happens here is that a prompt is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch

from engine.files.start_files import FileJob, HostBytes, StartForm
from engine.memory.cached_start import Place
from kv_transfer.nixl.agent import region_of
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.peers import Peers
from kv_transfer.reads.sink import TransferSink
from kv_transfer.starts.neighbour_store import NeighbourStore
from kv_transfer.starts.page_digests import page_digests
from kv_transfer.starts.start_transfer import Buffer, StartTransfer
from telemetry.engine_metrics import NeighbourFailure
from wire.errors import HandshakeError, TransferError, TwinfangError
from wire.messages.neighbours import BorrowReply, BorrowStart, LentStart

log = logging.getLogger(__name__)

NUM_BUFFERS = 4
"""Starts that are read at a time. A read that never ends keeps its buffer, so further ones are for others."""
BUFFER_BYTES = 4 << 20
ASK_S = 2.0
"""A neighbour that does not lend within this time is late."""


def make_buffers(thread: TransferThread, form: StartForm, *, compares: bool) -> list[Buffer]:
    """Registers memory for reads. ``compares``: whether pages are compared with the lender's digests."""
    size = max(1, BUFFER_BYTES // form.page_bytes) * form.page_bytes
    made = []
    for _ in range(NUM_BUFFERS):
        tensor = torch.empty(size, dtype=torch.uint8)
        thread.agent.register(tensor)
        digests = page_digests(tensor, form.page_bytes) if compares else None
        made.append(Buffer(region_of(tensor), tensor.numpy().reshape(-1, form.page_bytes), digests))
    return made


class StartReader:
    """Reads for one server. ``store`` learns what has ended."""

    def __init__(
        self,
        store: NeighbourStore,
        thread: TransferThread,
        sink: TransferSink,
        peers: Peers,
        form: StartForm,
        buffers: Sequence[Buffer],
    ) -> None:
        self._store = store
        self._thread = thread
        self._sink = sink
        self._peers = peers
        self._form = form
        self._buffers = list(buffers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def has_room(self) -> bool:
        """Whether one more start may be read. May be asked on any thread."""
        return bool(self._buffers)

    def begin(self, job: FileJob, memory: HostBytes, settled: Callable[[], None]) -> None:
        """Begins to read a job's pages."""
        if not self._buffers:
            self._store.failed(job, "limit", "too many starts are being read")
            return
        buffer = self._buffers.pop()
        task = asyncio.create_task(self._read(job, memory, settled, buffer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self, job: FileJob, memory: HostBytes, settled: Callable[[], None], buffer: Buffer
    ) -> None:
        began_s = time.monotonic()
        lent = await self._ready(job, settled)
        if lent is None:
            self._buffers.append(buffer)
            return
        ask_s = time.monotonic() - began_s
        error = await self._transfer(job, memory, lent, buffer)
        if error is None:
            read_s = time.monotonic() - began_s - ask_s
            self._store.was_read(job, _place_of(lent), ask_s=ask_s, read_s=read_s)
        else:
            self._store.failed(job, _kind_of(error), error.message)

    async def _ready(self, job: FileJob, settled: Callable[[], None]) -> LentStart | None:
        """Returns the loan of a job's start once it can be read into the job's pages.

        None: that has failed, and the store knows it.
        """
        try:
            reply = await self._borrow(job)
            if reply.start is None:
                kind = reply.why if reply.why in get_args(NeighbourFailure) else "gone"
                self._store.failed(job, kind, "it is not lent")  # type: ignore[arg-type]
                return None
            await asyncio.to_thread(settled)  # the device may still read what these pages held before
        except TwinfangError as error:
            self._store.failed(job, _kind_of(error), error.message)
            return None
        except Exception as error:
            log.exception("a read of a cached prefix failed")
            self._store.failed(job, "lost", repr(error))
            return None
        return reply.start

    async def _borrow(self, job: FileJob) -> BorrowReply:
        """Asks for a job's start. If it is lent, its server can be read now."""
        form = self._form
        ask = BorrowStart(
            *(self._sink.introduction.incarnation, form.fingerprint, form.layout, form.page_bytes),
            *(job.start, len(job.block_pages)),
        )
        reply = await self._peers.borrow(job.address, ask, timeout_s=ASK_S)
        if reply.start is not None:
            self._check(reply.start, job)
            await self._peers.reach(job.address, reply.start.incarnation)
        return reply

    def _check(self, lent: LentStart, job: FileJob) -> None:
        """Raises :class:`TransferError` if a loan is not what was asked for, or names pages that the
        neighbour does not have."""
        if (len(lent.block_pages), len(lent.state_pages)) != (len(job.block_pages), len(job.state_pages)):
            raise TransferError("the loan has another number of pages", cause="ticket_refused")
        most = lent.region.num_bytes // self._form.page_bytes
        if lent.region.memory != "DRAM" or max((*lent.block_pages, *lent.state_pages), default=0) > most:
            raise TransferError("the loan names pages that do not exist", cause="ticket_refused")
        if lent.region.address + lent.region.num_bytes > 1 << 64:
            raise TransferError("the loan's memory ends past the last address", cause="ticket_refused")

    async def _transfer(
        self, job: FileJob, memory: HostBytes, lent: LentStart, buffer: Buffer
    ) -> TransferError | None:
        """Reads the pages. Not cancelled when this task is: then the process is about to end."""
        outcome: asyncio.Future[TransferError | None] = self._loop.create_future()

        def set_outcome(error: TransferError | None) -> None:
            if not outcome.done():
                outcome.set_result(error)

        def on_end(error: TransferError | None) -> None:
            self._loop.call_soon_threadsafe(set_outcome, error)

        def begin() -> None:
            peer = self._sink.setup.peers.get(lent.incarnation)
            if peer is None:
                on_end(TransferError("the neighbour is gone"))
                self._buffers.append(buffer)
                return
            StartTransfer(
                *(self._thread, self._sink.setup.check, peer, lent, job, memory, buffer),
                on_end=on_end,
                on_free=partial(self._buffers.append, buffer),
            ).go_on()

        self._thread.post(begin)
        return await outcome


def _place_of(lent: LentStart) -> Place:
    """Returns why a state was kept; a later release may know further reasons."""
    return next((place for place in Place if place == lent.place), Place.INNER)


def _kind_of(error: TwinfangError) -> NeighbourFailure:
    if isinstance(error, TransferError) and not isinstance(error, HandshakeError):
        if error.cause == "digest":
            return "damaged"
        if error.cause == "deadline":
            return "late"
        return "form" if error.cause == "ticket_refused" else "lost"
    if isinstance(error, HandshakeError) and error.cause == "handshake_refused":
        return "form"
    return "late" if error.code == "deadline_exceeded" else "lost"
