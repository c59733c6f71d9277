"""The servers whose memory can be read. Connects to servers, and removes from NIXL those that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.device_faults import check_device
from kv_transfer.nixl.agent import PreparedList, Read, TransferAgent
from kv_transfer.nixl.descriptors import EPOCH_BYTES, Share, cells_of, null_indices, own_list, peer_list
from kv_transfer.nixl.flights import Flights, Patience, PeerMemory
from kv_transfer.nixl.unit_cut import cut_unit
from wire.errors import TransferError
from wire.messages.handoff import HandshakeReply, RankMemory, Region

WARM_UP_DEADLINE_S = 10.0

OnConnected = Callable[[TransferError | None], None]


@dataclass(frozen=True)
class Peer:
    """One incarnation of a server, with those of its ranks that this rank reads from."""

    address: str
    reply: HandshakeReply
    ranks: tuple[PeerMemory, ...]
    """The peer's ranks that hold data for us. If our rank validates leases, the peer's rank 0 comes first."""


def agent_name(incarnation: str, rank: int) -> str:
    """Returns the name of a server's rank in NIXL. For rank 0 this is only the incarnation."""
    return f"{incarnation}.{rank}" if rank else incarnation


class PeerMemories:
    """The peers, by incarnation. Used on the transfer thread, except :meth:`knows`.

    ``rank`` is our own rank. The rank that validates leases has ``epochs``, registered memory that it reads
    epochs into; it connects to each peer's rank 0 even if that rank holds none of our data.
    """

    def __init__(self, agent: TransferAgent, ours: RankMemory, *, rank: int, epochs: Region | None) -> None:
        self._agent = agent
        self.flights = Flights(agent, self._lost)
        """Reads of peers' memory, for any purpose."""
        self._ours = ours
        self._rank = rank
        self._epochs = epochs
        self._peers: dict[str, Peer] = {}
        self._gone: list[PeerMemory] = []

    def knows(self, incarnation: str) -> bool:
        """Whether this incarnation's memory can be read. May be called from any thread."""
        return incarnation in self._peers

    def get(self, incarnation: str) -> Peer | None:
        return self._peers.get(incarnation)

    def connect(self, address: str, reply: HandshakeReply, on_connected: OnConnected) -> None:
        """Adds a peer and reads once from each of its memories, so that no request waits for the first
        contact."""
        if self.knows(reply.incarnation):
            on_connected(None)
            return
        for stale in [peer for peer in self._peers.values() if peer.address == address]:
            self.forget(stale.reply.incarnation)
        self.remove_gone()
        try:
            peer = self._add_to_agent(address, reply)
        except TransferError as error:
            on_connected(error)
            return
        reads = [(one, start) for one in peer.ranks for start in self._first_reads(one, reply)]
        first_contact = _FirstContact(len(reads), lambda error: self._met(peer, error, on_connected))
        for one, start in reads:
            self.flights.post(
                one,
                start,
                patience=Patience(WARM_UP_DEADLINE_S),
                on_end=first_contact.ended,
                on_late=first_contact.late,
            )

    def _met(self, peer: Peer, error: TransferError | None, on_connected: OnConnected) -> None:
        if error is None:
            self._peers[peer.reply.incarnation] = peer
        else:
            self._gone += peer.ranks
        on_connected(error)

    def _first_reads(self, one: PeerMemory, reply: HandshakeReply) -> Iterator[Callable[[], Read]]:
        """Yields what starts the first reads from a rank: one for each path that later reads will take.

        UCX sets up a path for a kind of memory and a size, and opens a peer's GPU memory when it first reads
        it. So whole null entries are read, from pool to pool; nothing uses what a null entry holds.
        """
        if one.share.block or one.share.slot:
            ours, theirs = (null_indices(memory, one.share) for memory in (self._ours, one.memory))
            yield lambda: self._agent.read_listed(one.own_list, ours, one.peer_list, theirs)
        if one.epochs is not None and self._epochs is not None:
            here, there = self._epochs, reply.epoch_region
            few = np.array([(here.address, there.address, EPOCH_BYTES)], dtype=np.uint64)
            yield lambda: self._agent.read(one.name, few, local=here, remote=there)

    def _add_to_agent(self, address: str, reply: HandshakeReply) -> Peer:
        """Adds to NIXL the ranks that we read from. Raises :class:`TransferError` if one can't be added."""
        blocks = cut_unit(self._ours.kv_layout, [one.kv_layout for one in reply.ranks], rank=self._rank)
        slots = cut_unit(self._ours.state_layout, [one.state_layout for one in reply.ranks], rank=self._rank)
        added: list[PeerMemory] = []
        for rank, share in enumerate(map(Share, blocks, slots)):
            is_needed = share.block or share.slot or (rank == 0 and self._epochs is not None)
            if not is_needed:
                continue
            try:
                added.append(self._make(rank, share, address, reply))
            except TransferError:
                for one in added:
                    self._remove(one)
                raise
        return Peer(address, reply, tuple(added))

    def _make(self, rank: int, share: Share, address: str, reply: HandshakeReply) -> PeerMemory:
        memory, ours = reply.ranks[rank], self._ours
        name = self._add_rank(agent_name(reply.incarnation, rank), memory.agent_metadata)
        made: list[PreparedList] = []
        try:
            made.append(self._agent.prepare(None, own_list(ours, share), ours.kv_region))
            made.append(self._agent.prepare(name, peer_list(memory, share), memory.kv_region))
            if rank == 0 and self._epochs is not None:
                made.append(self._agent.prepare(name, cells_of(reply.epoch_region), reply.epoch_region))
        except TransferError:
            for one in made:
                self._agent.release(one)
            self._agent.remove_peer(name)
            raise
        return PeerMemory(name, address, reply.incarnation, memory, share, *made)

    def _remove(self, one: PeerMemory) -> None:
        for prepared in (one.own_list, one.peer_list, one.epochs):
            if prepared is not None:
                self._agent.release(prepared)
        self._agent.remove_peer(one.name)

    def _add_rank(self, expected: str, metadata: bytes) -> str:
        if any(peer.name == expected for peer in self._gone):
            raise TransferError("earlier reads of this peer have not ended yet; try again later")
        if expected == self._agent.name:  # a moved request came back: NIXL knows its own memory
            return expected
        name = self._agent.add_peer(metadata)
        if name != expected:
            if not self._is_in_use(name):
                self._agent.remove_peer(name)
            raise TransferError(f"its metadata names {name!r}, its handshake {expected!r}")
        return name

    def _is_in_use(self, name: str) -> bool:
        return any(one.name == name for peer in self._peers.values() for one in peer.ranks)

    def _lost(self, one: PeerMemory) -> None:
        """Forgets the server of a rank that can't be read from any more.

        Raises :class:`wire.errors.DeviceFaultError` if the read failed because our own GPU has failed.
        Otherwise an idle server, which launches no step, would fail one read after the other.
        """
        region = self._ours.kv_region
        if region.memory == "VRAM":
            check_device(torch.device("cuda", region.device_id))
        self.forget(one.incarnation)

    def forget(self, incarnation: str) -> None:
        """Forgets a peer that is gone or has restarted.

        NIXL removes the peer only when no read of it is under way. An earlier removal would not stop the
        read; it would only hide that bytes still land.
        """
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            self._gone += peer.ranks

    def remove_gone(self) -> None:
        for one in [one for one in self._gone if not self.flights.is_reading(one)]:
            self._gone.remove(one)
            self._remove(one)

    def remove_all(self) -> None:
        for one in (*(one for peer in self._peers.values() for one in peer.ranks), *self._gone):
            self._remove(one)


class _FirstContact:
    """The first reads from a peer's ranks. Reports one outcome for all of these reads, once."""

    def __init__(self, num_reads: int, on_outcome: Callable[[TransferError | None], None]) -> None:
        self._num_left = num_reads
        self._on_outcome = on_outcome
        self._error: TransferError | None = None
        self._is_told = False

    def ended(self, error: TransferError | None) -> None:
        self._num_left -= 1
        self._error = self._error or error
        if not self._is_told and self._num_left == 0:
            self._tell(self._error)

    def late(self) -> None:
        """Reports a failure. An answer that comes later changes nothing."""
        if not self._is_told:
            self._tell(TransferError(f"no answer within {WARM_UP_DEADLINE_S} s"))

    def _tell(self, error: TransferError | None) -> None:
        self._is_told = True
        self._on_outcome(error)
