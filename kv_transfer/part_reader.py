"""Who reads a part of a transfer: this process, and those of the server's other tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kv_transfer.agent import TransferAgent
from kv_transfer.flights import Flights, Patience
from kv_transfer.part import Part, Pools, part_indices
from kv_transfer.peer_memories import Peer
from wire.errors import TransferError


@dataclass(frozen=True)
class ReadSize:
    """What a read has brought."""

    num_bytes: int
    num_descriptors: int


NOTHING = ReadSize(0, 0)


class PartReceiver(Protocol):
    """Whoever waits for a part: a :class:`kv_transfer.transfer.Transfer`."""

    @property
    def patience(self) -> Patience: ...

    def took_off(self) -> None:
        """A read of the part was posted; exactly one :meth:`landed` follows."""
        ...

    def landed(self, error: TransferError | None, size: ReadSize) -> None: ...

    def late(self) -> None:
        """A read is late; it still ends some time."""
        ...


class PartReader(Protocol):
    """Reads parts, or a rank's share of them."""

    def post(self, peer: Peer, part: Part, receiver: PartReceiver) -> None:
        """Posts the part's reads. Raises :class:`TransferError` for a unit outside either side's pools."""
        ...


class OwnReader:
    """This process's share, from each of the peer's ranks that hold something of it."""

    def __init__(self, agent: TransferAgent, ours: Pools, flights: Flights) -> None:
        self._agent = agent
        self._ours = ours
        self._flights = flights

    def post(self, peer: Peer, part: Part, receiver: PartReceiver) -> None:
        reads = [(one, part_indices(part, self._ours, one.memory, one.share)) for one in peer.ranks]
        for one, indices in reads:
            if indices.num_bytes == 0:
                continue
            start = partial(
                self._agent.read_listed, one.own_list, indices.local, one.peer_list, indices.remote
            )
            landed = partial(_landed, receiver, ReadSize(indices.num_bytes, indices.num_descriptors))
            receiver.took_off()
            self._flights.post(
                one,
                start,
                patience=receiver.patience,
                on_end=landed,
                on_late=receiver.late,
            )


def _landed(receiver: PartReceiver, size: ReadSize, error: TransferError | None, late: bool) -> None:
    receiver.landed(error, size)
