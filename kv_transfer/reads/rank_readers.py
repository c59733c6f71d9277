"""The other tensor-parallel ranks of this server as readers. Rank 0 tells them what to read, and they report
how the reads ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import get_args

from engine.ranks.processes import RankProcesses
from kv_transfer.nixl.peer_memories import OnConnected, Peer
from kv_transfer.reads.part import Part
from kv_transfer.reads.part_reader import NOTHING, PartReceiver, ReadSize
from wire.errors import TransferError, TransferFailure
from wire.messages.handoff import HandshakeReply
from wire.messages.ranks import ConnectRank, RankConnected, RankPartEnded, RankPartLate, ReadRankPart

RankReport = RankConnected | RankPartLate | RankPartEnded


class RankReaders:
    """The ranks from 1 up. Used on the transfer thread, except :meth:`take_report`.

    ``post`` runs work on the transfer thread. ``forget`` is called for a peer that some rank can't read from
    any more.
    """

    def __init__(
        self,
        ranks: RankProcesses,
        post: Callable[[Callable[[], None]], None],
        forget: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._post = post
        self._forget = forget
        self._numbers = count()
        self._parts: dict[int, _Part] = {}
        self._contacts: dict[int, _Contact] = {}

    def connect(self, address: str, reply: HandshakeReply, on_connected: OnConnected) -> None:
        """Makes the peer readable on every rank; reports one outcome for all ranks together."""
        number = next(self._numbers)
        self._contacts[number] = _Contact(self._ranks.size - 1, on_connected)
        self._ranks.tell(ConnectRank(number, address, reply))

    def post(self, peer: Peer, part: Part, receiver: PartReceiver) -> None:
        number, num_ranks = next(self._numbers), self._ranks.size - 1
        self._parts[number] = _Part(num_ranks, peer.reply.incarnation, receiver)
        for _ in range(num_ranks):
            receiver.took_off()
        self._ranks.tell(
            ReadRankPart(
                number,
                peer.reply.incarnation,
                tuple(part.local_blocks),
                tuple(part.remote_blocks),
                tuple(part.local_slots),
                tuple(part.remote_slots),
                receiver.patience.deadline_s,
            )
        )

    def take_report(self, rank: int, report: RankReport) -> None:
        """Takes a rank's report. May be called from any thread."""
        if isinstance(report, RankConnected):
            self._post(lambda: self._connected(report))
        elif isinstance(report, RankPartLate):
            self._post(lambda: self._parts[report.number].receiver.late())
        else:
            self._post(lambda: self._ended(report))

    def _connected(self, report: RankConnected) -> None:
        contact = self._contacts[report.number]
        contact.num_left -= 1
        if report.error is not None:
            contact.error = contact.error or TransferError(report.error)
        if contact.num_left == 0:
            del self._contacts[report.number]
            contact.on_connected(contact.error)

    def _ended(self, report: RankPartEnded) -> None:
        part = self._parts[report.number]
        part.num_left -= 1
        if part.num_left == 0:
            del self._parts[report.number]
        if report.error is None:
            part.receiver.landed(None, ReadSize(report.num_bytes, report.num_descriptors))
            return
        cause = next((one for one in get_args(TransferFailure) if one == report.cause), None)
        if cause == "peer_gone":  # so that this peer's next ticket causes a new handshake, on all ranks
            self._forget(part.incarnation)
        part.receiver.landed(TransferError(report.error, cause=cause), NOTHING)


@dataclass
class _Part:
    num_left: int
    incarnation: str
    receiver: PartReceiver


@dataclass
class _Contact:
    num_left: int
    on_connected: OnConnected
    error: TransferError | None = None
