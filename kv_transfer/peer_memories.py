"""The servers whose memory can be read: connecting, and letting NIXL forget the ones that are gone."""

from __future__ import annotations

from concurrent.futures import Future

from kv_transfer.agent import TransferAgent
from kv_transfer.epoch_check import EpochCheck
from kv_transfer.flights import Flights, Patience, PeerMemory
from wire.errors import TransferError
from wire.handoff import HandshakeReply

WARM_UP_DEADLINE_S = 10.0


class PeerMemories:
    """By incarnation. On the transfer thread, but for :meth:`knows`."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._peers: dict[str, PeerMemory] = {}
        self._gone: list[PeerMemory] = []

    def knows(self, incarnation: str) -> bool:
        """From any thread."""
        return incarnation in self._peers

    def get(self, incarnation: str) -> PeerMemory | None:
        return self._peers.get(incarnation)

    def connect(
        self,
        address: str,
        reply: HandshakeReply,
        connected: Future[None],
        *,
        flights: Flights,
        check: EpochCheck,
    ) -> None:
        """Adds a peer and reads once from it, so that no request pays for the first contact."""
        if self.knows(reply.incarnation):
            connected.set_result(None)
            return
        for stale in [peer for peer in self._peers.values() if peer.address == address]:
            self.forget(stale)
        self.remove_gone(flights)
        try:
            peer = PeerMemory(self.add_to_agent(reply), address, reply)
        except TransferError as error:
            connected.set_exception(error)
            return

        def on_end(error: TransferError | None, late: bool) -> None:
            if late:  # reported already; what the peer did not answer in time is not built on
                return
            if error is None:
                self._peers[reply.incarnation] = peer
                connected.set_result(None)
            else:
                self._gone.append(peer)
                connected.set_exception(error)

        def on_late() -> None:
            self._gone.append(peer)
            connected.set_exception(TransferError(f"no answer within {WARM_UP_DEADLINE_S} s"))

        check.read(peer, 0, 0, patience=Patience(WARM_UP_DEADLINE_S), on_end=on_end, on_late=on_late)

    def add_to_agent(self, reply: HandshakeReply) -> str:
        """The name by which NIXL knows the peer. Raises :class:`TransferError` if it can't be added."""
        if any(peer.name == reply.incarnation for peer in self._gone):
            raise TransferError("reads that it failed to answer have not ended yet; try again later")
        name = self._agent.add_peer(reply.agent_metadata)
        if name != reply.incarnation:
            if not self.knows(name):
                self._agent.remove_peer(name)
            raise TransferError(f"its metadata is of {name!r}, its handshake of {reply.incarnation!r}")
        return name

    def forget(self, peer: PeerMemory) -> None:
        """The peer is gone or another; NIXL lets go of it once no read of it is under way.

        Not before: removing a peer does not stop a read, it only hides that the bytes still land.
        """
        if self._peers.get(peer.reply.incarnation) is peer:
            del self._peers[peer.reply.incarnation]
            self._gone.append(peer)

    def remove_gone(self, flights: Flights) -> None:
        for peer in [peer for peer in self._gone if not flights.is_reading(peer)]:
            self._gone.remove(peer)
            self._agent.remove_peer(peer.name)

    def remove_all(self) -> None:
        for peer in (*self._peers.values(), *self._gone):
            self._agent.remove_peer(peer.name)
