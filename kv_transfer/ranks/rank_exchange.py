"""The handoff on a tensor-parallel rank other than 0: peers read its memory, and it reads its share of the
peers' memory.

Rank 0 decides what is read and when, and whether the data may be used; see
:mod:`kv_transfer.reads.rank_readers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.engine import Engine
from engine.group.rank_link import RankLink
from engine.ranks.process import RankMain, end_rank, work
from engine.ranks.worker import RankWorker
from kv_transfer.nixl.flights import Patience
from kv_transfer.nixl.peer_memories import agent_name
from kv_transfer.nixl.poll_thread import idle_delay, poll_delay
from kv_transfer.nixl.transfer_thread import ThreadUser, TransferThread
from kv_transfer.reads.part import Part
from kv_transfer.reads.part_reader import NOTHING, OwnReader, ReadSize
from wire.errors import TransferError
from wire.messages.handoff import Role
from wire.messages.ranks import (
    ConnectRank,
    Introduce,
    RankConnected,
    RankPartEnded,
    RankPartLate,
    RankServes,
    ReadRankPart,
    ServePeers,
)


def rank_main(role: Role) -> RankMain:
    """Returns the main function for the process of a rank other than 0, on a server of this role."""
    return work if role == "both" else serve_rank


def serve_rank(engine: Engine, link: RankLink) -> None:
    """Runs a rank of a prefill or a decode server."""
    incarnation = link.receive(Introduce).incarnation
    thread = TransferThread(engine.caches, agent_name(incarnation, engine.tp.rank), end_rank)
    exchange = RankExchange(thread, link, rank=engine.tp.rank)
    thread.start(exchange)
    try:
        link.takers = exchange.takers()
        RankWorker(engine, link).run()
    finally:
        thread.close()


class RankExchange(ThreadUser):
    """Both sides of the handoff on one rank."""

    def __init__(self, thread: TransferThread, link: RankLink, *, rank: int) -> None:
        self._thread = thread
        self._link = link
        self._reader = OwnReader(thread, rank=rank)
        self._is_serving = False
        self._last_news_s = 0.0
        link.send(RankServes(thread.memory))

    def takers(self) -> dict[type, Callable[[object], None]]:
        """Returns the handlers of rank 0's messages about the handoff, by class, for :class:`RankWorker`."""

        def on_thread(take: Callable[..., None]) -> Callable[[object], None]:
            return lambda message: self._thread.post(lambda: take(message))

        return {
            ServePeers: on_thread(self._serve),
            ConnectRank: on_thread(self._connect),
            ReadRankPart: on_thread(self._read_part),
        }

    # --- on the transfer thread ------------------------------------------------------------------

    def release(self) -> None:
        self._reader.release()

    def _serve(self, message: ServePeers) -> None:
        self._is_serving = message.is_on
        self._last_news_s = time.monotonic()

    def _connect(self, message: ConnectRank) -> None:
        def on_connected(error: TransferError | None) -> None:
            self._link.send(RankConnected(message.number, None if error is None else error.message))

        self._reader.peers.connect(message.address, message.reply, on_connected)

    def _read_part(self, message: ReadRankPart) -> None:
        reads = _RankPart(message, self._link)
        peer = self._reader.peers.get(message.incarnation)
        part = Part(message.local_blocks, message.remote_blocks, message.local_slots, message.remote_slots)
        reads.took_off()  # one more than the reads: the report waits until all reads are posted, too
        if peer is None:
            reads.landed(TransferError("the server that wrote the ticket is gone"), NOTHING)
            return
        error = None
        try:
            self._reader.post(peer, part, reads)
        except TransferError as refused:
            error = TransferError(refused.message, cause="ticket_refused")
        reads.landed(error, NOTHING)

    def poll(self) -> float:
        delay_s = self._reader.poll()
        if delay_s is not None:
            return delay_s
        quiet_s = time.monotonic() - self._last_news_s
        return poll_delay(quiet_s) if self._is_serving else idle_delay(quiet_s)


class _RankPart:
    """The reads of one part. One report is sent when the last of them has ended."""

    def __init__(self, message: ReadRankPart, link: RankLink) -> None:
        self.patience = Patience(message.deadline_s)
        self._number = message.number
        self._link = link
        self._num_left = self._num_bytes = self._num_descriptors = 0
        self._error: TransferError | None = None
        self._is_late = False

    def took_off(self) -> None:
        self._num_left += 1

    def landed(self, error: TransferError | None, size: ReadSize) -> None:
        self._num_left -= 1
        self._error = self._error or error
        if error is None:
            self._num_bytes += size.num_bytes
            self._num_descriptors += size.num_descriptors
        if self._num_left == 0:
            message, cause = (None, "") if self._error is None else (self._error.message, self._error.cause)
            self._link.send(
                RankPartEnded(self._number, self._num_bytes, self._num_descriptors, message, cause)
            )

    def late(self) -> None:
        if not self._is_late:
            self._is_late = True
            self._link.send(RankPartLate(self._number))
