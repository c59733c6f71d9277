"""The reads of one lent start: piece by piece through a buffer, then its lease's epoch. Used on the transfer
thread.

Host memory is never the target of a read. What has landed in the buffer is copied to pages that no request
can use yet, and they are used only when the epoch says that the start was lent all the time. A read that does
not end keeps the buffer, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.files.start_files import FileJob, HostBytes
from kernels.digests.unit_digest import PoolDigests
from kv_transfer.nixl.agent import Ranges
from kv_transfer.nixl.flights import Patience
from kv_transfer.nixl.peer_memories import Peer
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.epoch_check import EpochCheck
from wire.errors import TransferError
from wire.messages.handoff import Done, Region
from wire.messages.neighbours import LentStart

PATIENCE_S = 2.0
"""A piece that takes longer is late, and so is the start."""
TRANSFER_S = 8.0
"""The whole start takes less than this; its lease lasts longer."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Registered memory through which one start at a time is read."""

    region: Region
    pages: NDArray[np.uint8]
    """``[num_pages, page_bytes]``"""
    digests: PoolDigests | None
    """Digests of these pages, by index."""


class StartTransfer:
    """Fills the pages of ``job`` in ``memory`` with those of ``lent``.

    ``on_end`` is called once: nothing lands in the job's pages after that. ``on_free`` is called when nothing
    lands in the buffer any more.
    """

    def __init__(
        self,
        thread: TransferThread,
        check: EpochCheck,
        peer: Peer,
        lent: LentStart,
        job: FileJob,
        memory: HostBytes,
        buffer: Buffer,
        *,
        on_end: Callable[[TransferError | None], None],
        on_free: Callable[[], None],
    ) -> None:
        self._thread = thread
        self._flights = check.flights
        self._check = check
        self._peer = peer
        self._lent = lent
        self._memory = memory
        self._buffer = buffer
        self._on_end = on_end
        self._on_free = on_free
        self._sources = (*lent.block_pages, *lent.state_pages)
        self._targets = (*job.block_pages, *job.state_pages)
        self._num_done = self._num_asked = 0
        self._patience = Patience(PATIENCE_S)
        self._until_s = time.monotonic() + TRANSFER_S
        self._damage: TransferError | None = None
        self._has_ended = False

    def go_on(self) -> None:
        """Reads the next piece; after the last one, or one that is not what was lent, the epoch."""
        if time.monotonic() > self._until_s:
            self._end(_late())
            self._on_free()
            return
        self._patience.renew()
        if self._num_done == len(self._sources) or self._damage is not None:
            self._validate()
            return
        self._num_asked = min(len(self._buffer.pages), len(self._sources) - self._num_done)
        ranges = self._ranges(self._sources[self._num_done : self._num_done + self._num_asked])
        first, ours, theirs = self._peer.ranks[0], self._buffer.region, self._lent.region
        self._flights.post(
            first,
            lambda: self._thread.agent.read(first.name, ranges, local=ours, remote=theirs),
            patience=self._patience,
            on_end=self._landed,
            on_late=lambda: self._end(_late()),
        )

    def _ranges(self, sources: tuple[int, ...]) -> Ranges:
        """Returns a row for each run of adjacent pages: our address, the peer's, bytes."""
        size = self._buffer.pages.shape[1]
        rows: list[tuple[int, int, int]] = []
        for index, page in enumerate(sources):
            if index and page == sources[index - 1] + 1:
                ours, theirs, num_bytes = rows[-1]
                rows[-1] = ours, theirs, num_bytes + size
            else:
                place = self._lent.region.address + (page - 1) * size
                rows.append((self._buffer.region.address + index * size, place, size))
        return np.array(rows, dtype=np.uint64)

    def _landed(self, error: TransferError | None) -> None:
        if error is not None or self._has_ended:
            self._end(error)
            self._on_free()
            return
        self._damage = self._compare()
        if self._damage is None:
            for index in range(self._num_asked):
                self._memory[self._targets[self._num_done + index] - 1] = self._buffer.pages[index]
            self._num_done += self._num_asked
        self._thread.post(self.go_on)  # not at once: other reads have their turn

    def _compare(self) -> TransferError | None:
        """Compares what has landed with what was lent."""
        sent, digests = self._lent.digests, self._buffer.digests
        if not sent or digests is None:
            return None
        found = digests(range(self._num_asked))
        if tuple(found) == sent[self._num_done : self._num_done + self._num_asked]:
            return None
        return TransferError("what was read is not what was lent", cause="digest")

    def _validate(self) -> None:
        lease = Done(self._lent.lease_id, self._lent.epoch)

        def validated(error: TransferError | None) -> None:
            # Other bytes are damage only if the start was lent all the time: else they are another start's.
            error = error or self._damage
            has_ended = self._has_ended
            self._end(error)
            self._on_free()
            if error is None and not has_ended:
                self._check.conclude(self._peer, lease, "a cached prefix")

        try:
            self._check.validate(
                self._peer,
                lease,
                patience=self._patience,
                on_end=validated,
                on_late=lambda: self._end(_late()),
            )
        except TransferError as error:
            validated(error)

    def _end(self, error: TransferError | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end(error)


def _late() -> TransferError:
    return TransferError("the neighbour did not deliver in time", cause="deadline")
