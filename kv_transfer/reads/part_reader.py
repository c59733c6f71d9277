"""The interface of the objects that read a part of a transfer, and the reader for this process's share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kv_transfer.nixl.flights import Patience
from kv_transfer.nixl.peer_memories import Peer, PeerMemories
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.part import Part, part_indices
from wire.errors import TransferError
from wire.messages.handoff import Region

DRAIN_S = 0.2
"""How long reads under way may take to end when their reader is closed."""


@dataclass(frozen=True)
class ReadSize:
    """The size of a read that has ended."""

    num_bytes: int
    num_descriptors: int


NOTHING = ReadSize(0, 0)


class PartReceiver(Protocol):
    """The object that waits for a part, such as :class:`kv_transfer.reads.transfer.Transfer`."""

    @property
    def patience(self) -> Patience: ...

    def took_off(self) -> None:
        """Called when a read of the part was posted; exactly one :meth:`landed` follows."""

    def landed(self, error: TransferError | None, size: ReadSize) -> None: ...

    def late(self) -> None:
        """Called when a read is late; :meth:`landed` still follows when the read ends."""


class PartReader(Protocol):
    """Reads parts, or a rank's share of them."""

    def post(self, peer: Peer, part: Part, receiver: PartReceiver) -> None:
        """Posts the part's reads. Raises :class:`TransferError` for a unit outside either side's pools."""


class OwnReader:
    """Reads this process's share of a part, from each of the peer's ranks that hold some of it.

    Has what one rank needs to read other servers' memory: the known peers, and the reads under way. Used on
    the transfer thread. ``epochs``: see :class:`PeerMemories`.
    """

    def __init__(self, thread: TransferThread, *, rank: int = 0, epochs: Region | None = None) -> None:
        self._agent = thread.agent
        self._ours = thread.memory
        self.peers = PeerMemories(self._agent, self._ours, rank=rank, epochs=epochs)
        self.flights = self.peers.flights

    def post(self, peer: Peer, part: Part, receiver: PartReceiver) -> None:
        reads = [(one, part_indices(part, self._ours, one.memory, one.share)) for one in peer.ranks]
        for one, indices in reads:
            if indices.num_bytes == 0:
                continue
            start = partial(
                self._agent.read_listed, one.own_list, indices.local, one.peer_list, indices.remote
            )
            size = ReadSize(indices.num_bytes, indices.num_descriptors)
            receiver.took_off()
            self.flights.post(
                one,
                start,
                patience=receiver.patience,
                on_end=partial(receiver.landed, size=size),
                on_late=receiver.late,
            )

    def poll(self) -> float | None:
        """Reports ended reads; returns the seconds until the next call, None if no read is under way."""
        delay_s = self.flights.poll()
        self.peers.remove_gone()
        return delay_s

    def release(self) -> None:
        """Gives peers and handles back to NIXL, after the transfer thread has ended."""
        self.flights.drain(DRAIN_S)
        self.peers.remove_all()
        self.flights.release()
