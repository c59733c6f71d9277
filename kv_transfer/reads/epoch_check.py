"""The reading side of the seqlock in :mod:`kv_transfer.leases.lease_table`: reads the epoch after the data.

If the lease's epoch has changed, the data may be another request's. NIXL guarantees no order within one read,
so the epoch is read by a separate read, which is posted when all data has arrived.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import torch

from engine.memory.index_pool import IndexPool
from kv_transfer.nixl.agent import TransferAgent, region_of
from kv_transfer.nixl.descriptors import EPOCH_BYTES, cells_of
from kv_transfer.nixl.flights import Flights, Patience
from kv_transfer.nixl.peer_memories import Peer
from wire.codec import encode
from wire.errors import TransferError
from wire.messages.handoff import Done, Region
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)


class EpochCheck:
    """Reads epochs into the int64 tensor ``epochs``, registered with the agent. Used on the transfer thread.

    Every read whose result is needed has its own cell of the tensor; cell 0 takes all other results.
    """

    def __init__(self, agent: TransferAgent, flights: Flights, epochs: torch.Tensor) -> None:
        self._agent = agent
        self.flights = flights
        self._cells = epochs.numpy()
        region = region_of(epochs)
        self._own = agent.prepare(None, cells_of(region), region)
        self._free = IndexPool(len(self._cells), "cell")

    def validate(
        self,
        peer: Peer,
        lease: Done,
        *,
        patience: Patience,
        on_end: Callable[[TransferError | None], None],
        on_late: Callable[[], None],
    ) -> None:
        """Reads the lease's epoch. ``on_end`` gets an error if the read failed or the lease had ended.

        Raises :class:`TransferError` if the peer has no such lease, or if every cell belongs to a read that
        has not ended.
        """
        if self._free.num_free == 0:
            raise TransferError(
                f"{self._free.capacity} reads of lease epochs have not ended: their servers do not answer",
                cause="deadline",
            )
        (cell,) = self._free.allocate(1)

        def ended(error: TransferError | None) -> None:
            found = int(self._cells[cell])
            self._free.free([cell])
            on_end(error or _moved(found, lease))

        try:
            self._read(peer, lease.lease_id, cell, patience=patience, on_end=ended, on_late=on_late)
        except TransferError:
            self._free.free([cell])
            raise

    def _read(
        self,
        peer: Peer,
        lease_id: int,
        cell: int,
        *,
        patience: Patience,
        on_end: Callable[[TransferError | None], None],
        on_late: Callable[[], None],
    ) -> None:
        """Reads an epoch into ``cell``. Raises :class:`TransferError` if the peer has no such lease."""
        epochs = peer.ranks[0].epochs
        assert epochs is not None
        theirs = np.array([checked_lease(lease_id, peer.reply.epoch_region)])
        self.flights.post(
            peer.ranks[0],
            lambda: self._agent.read_listed(self._own, np.array([cell]), epochs, theirs),
            patience=patience,
            on_end=on_end,
            on_late=on_late,
        )

    def conclude(self, peer: Peer, lease: Done, request_id: str) -> None:
        """Tells the peer that its lease may end, and makes sure that the message arrives."""
        try:
            self._agent.notify(peer.ranks[0].name, encode(lease))
        except TransferError as error:  # the data is valid; the lease ends by its time to live
            kind = f"prefill server {peer.address} was not told that its lease was read"
            lines.write(logging.WARNING, kind, "request %s: %s: %s", request_id, kind, error)
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        """Posts a small read after a notification: when the read has ended, the notification has arrived.

        Until then, the read keeps this thread polling. A notification can make the next read wait for the
        peer (measured: 0.1 to 1 ms). This small read then waits, and not the next transfer's read.
        """
        nobody = Patience(math.inf)
        self._read(peer, 0, 0, patience=nobody, on_end=lambda error: None, on_late=lambda: None)


def _moved(found: int, lease: Done) -> TransferError | None:
    """Returns an error if the lease had ended before its epoch was read."""
    if found == lease.epoch:
        return None
    return TransferError(
        f"the lease ended while its data was read (epoch {found}, the ticket's is {lease.epoch}); "
        "the data is discarded",
        cause="lease_ended",
    )


def checked_lease(lease_id: int, epochs: Region) -> int:
    """Returns the index of the lease's cell in the peer's epoch table.

    Raises :class:`TransferError` if the table has no such cell.
    """
    if not 0 <= lease_id < epochs.num_bytes // EPOCH_BYTES:
        raise TransferError(
            f"the ticket's lease {lease_id} is outside the peer's epoch table", cause="ticket_refused"
        )
    return lease_id
