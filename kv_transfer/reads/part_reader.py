"""The interface of the objects that read a part of a transfer, and the reader for this process's share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine.memory.caches import Caches
from kv_transfer.nixl.agent import TransferAgent, memory_of, region_of
from kv_transfer.nixl.flights import Patience
from kv_transfer.nixl.peer_memories import Peer, PeerMemories, agent_name
from kv_transfer.nixl.poll_thread import PollThread
from kv_transfer.reads.part import Part, part_indices
from wire.errors import TransferError

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

    Has all that one rank needs to read other servers' memory: NIXL's agent, the known peers, the reads under
    way. Used on the transfer thread. ``scratch`` is registered with NIXL like the pools; reads that belong to
    no part, such as the first read from a peer, are written there.
    """

    def __init__(self, caches: Caches, scratch: torch.Tensor, *, incarnation: str, rank: int = 0) -> None:
        self._scratch = scratch
        self.agent = TransferAgent(agent_name(incarnation, rank), [caches.kv, caches.state, scratch])
        self.memory = memory_of(caches, self.agent)
        self.peers = PeerMemories(self.agent, self.memory, rank=rank, scratch=region_of(scratch))
        self.flights = self.peers.flights

    def post(self, peer: Peer, part: Part, receiver: PartReceiver) -> None:
        reads = [(one, part_indices(part, self.memory, one.memory, one.share)) for one in peer.ranks]
        for one, indices in reads:
            if indices.num_bytes == 0:
                continue
            start = partial(
                self.agent.read_listed, one.own_list, indices.local, one.peer_list, indices.remote
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
        """Makes all reads progress; returns the seconds until the next call, None if no read is under way."""
        self.agent.poll()
        delay_s = self.flights.poll()
        self.peers.remove_gone()
        return delay_s

    def close(self, thread: PollThread) -> None:
        """Ends the transfer thread and releases all peers and the agent. Must be called from another
        thread."""
        thread.post(lambda: self.flights.drain(DRAIN_S))
        thread.stop()
        self.peers.remove_all()
        self.flights.release()
        self.agent.close()
