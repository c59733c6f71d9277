"""The decode side of the handoff: reads a peer's blocks and state, and trusts nothing before it is checked.

This is the door to the transfer thread. What happens there is in :mod:`kv_transfer.transfer` (one request's
parts and their validation), :mod:`kv_transfer.flights` (reads under way), :mod:`kv_transfer.epoch_check` (the
seqlock) and :mod:`kv_transfer.peer_memories` (who can be read).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from engine.caches import Caches
from engine.rank_processes import RankProcesses
from kv_transfer.agent import TransferAgent, region_of
from kv_transfer.epoch_check import EpochCheck
from kv_transfer.flights import Flights
from kv_transfer.handshake import check_regions, check_same_model
from kv_transfer.part import OwnPools, Part
from kv_transfer.part_reader import OwnReader, PartReader
from kv_transfer.peer_memories import WARM_UP_DEADLINE_S, OnConnected, PeerMemories
from kv_transfer.poll_thread import PollThread
from kv_transfer.rank_readers import RankReaders, RankReport
from kv_transfer.transfer import Transfer, TransferResult
from wire.errors import HandshakeError, TransferError, TwinfangError
from wire.handoff import Done, HandshakeReply, HandshakeRequest, Ticket

DRAIN_S = 0.2
"""What reads under way get to end when the sink is closed."""


class TransferSink:
    """Owns the decode server's transfers and its NIXL agent.

    Methods are thread-safe; callbacks are called on the transfer thread.
    """

    def __init__(
        self,
        caches: Caches,
        *,
        incarnation: str,
        fingerprint: str,
        on_settled: Callable[[str], None],
        on_fatal: Callable[[BaseException], None],
        ranks: RankProcesses | None = None,
    ) -> None:
        self._on_settled = on_settled
        self._pools = OwnPools(
            caches.kv_layout, caches.state_layout, region_of(caches.kv), region_of(caches.state)
        )
        # So many transfers may be under way: each fills a slot, or blocks where the model has no states.
        num_units = caches.num_slots if caches.spec.has_state else caches.num_blocks
        epochs = torch.zeros(num_units, dtype=torch.int64)
        self._agent = TransferAgent(incarnation, [caches.kv, caches.state, epochs])
        self._flights = Flights(self._agent, lambda one: self._peers.lost(one))
        self._peers = PeerMemories(self._agent, self._flights, self._pools, rank=0, scratch=region_of(epochs))
        self._check = EpochCheck(self._agent, self._flights, epochs)
        self._introduction = HandshakeRequest(
            incarnation,
            fingerprint,
            1 if ranks is None else ranks.size,
            caches.kv_layout,
            caches.state_layout,
        )
        self._num_transfers = 0
        self._bytes_read = 0
        self._early_bytes = 0
        self._num_parts = 0
        self._thread = PollThread("transfer", self._poll, on_fatal)
        self._readers: list[PartReader] = [OwnReader(self._agent, self._pools, self._flights)]
        self._rank_readers: RankReaders | None = None
        if ranks is not None:
            self._rank_readers = RankReaders(ranks, self._thread.post, self._peers.forget)
            self._readers.append(self._rank_readers)

    def take_report(self, rank: int, report: RankReport) -> None:
        """What another rank says of its reads; from any thread."""
        assert self._rank_readers is not None
        self._rank_readers.take_report(rank, report)

    @property
    def num_in_flight(self) -> int:
        """Transfers that have neither succeeded, failed nor been given up."""
        return self._num_transfers

    @property
    def bytes_read(self) -> int:
        """Bytes of blocks and states read since the start."""
        return self._bytes_read

    @property
    def early_bytes(self) -> int:
        """Of :attr:`bytes_read`, those that had landed before their prompt was computed."""
        return self._early_bytes

    @property
    def num_parts(self) -> int:
        """Parts that have landed since the start, whatever became of their transfers."""
        return self._num_parts

    def handshake_request(self) -> HandshakeRequest:
        return self._introduction

    def knows(self, incarnation: str) -> bool:
        """Whether memory of this life of a prefill server can be read."""
        return self._peers.knows(incarnation)

    def add_peer(self, address: str, reply: HandshakeReply) -> None:
        """Connects to a prefill server and reads once from it, so that no request pays for that.

        Blocks until it is done. Raises :class:`HandshakeError` if the two may not share state or the peer
        can't be reached.
        """
        check_same_model(self._introduction, reply, f"the prefill server at {address}")
        check_regions(reply)
        outcome: Future[TransferError | None] = Future()
        self._thread.post(lambda: self._connect(address, reply, outcome.set_result))
        try:
            error = outcome.result(timeout=WARM_UP_DEADLINE_S * 2)
            if error is not None:
                raise error
        except (TransferError, TimeoutError) as error:
            raise HandshakeError(
                f"the prefill server at {address} can't be read from: {error}", cause="peer_gone"
            ) from error

    # --- transfers -------------------------------------------------------------------------------

    def begin(
        self,
        request_id: str,
        incarnation: str,
        *,
        deadline_s: float,
        on_done: Callable[[TransferResult], None],
    ) -> SinkTransfer:
        """A transfer from that life of a prefill server, of which nothing is read yet.

        It has to be brought to an end, by :meth:`SinkTransfer.finish` or :meth:`SinkTransfer.fail`.
        ``on_done`` is called exactly once, while something is being read no later than about ``deadline_s``
        seconds after the last news.
        """
        made: list[Transfer] = []
        started_s = time.monotonic()

        def begin() -> None:
            self._num_transfers += 1
            made.append(
                Transfer(
                    request_id,
                    self._peers.get(incarnation),
                    readers=self._readers,
                    check=self._check,
                    deadline_s=deadline_s,
                    started_s=started_s,
                    on_done=lambda result: self._done(result, on_done),
                    on_part=self._count_part,
                    on_settled=self._on_settled,
                )
            )

        self._thread.post(begin)
        return SinkTransfer(self._thread, made)

    def read(
        self,
        ticket: Ticket,
        *,
        block_ids: Sequence[int],
        first_block: int = 0,
        state_slot: int,
        deadline_s: float,
        on_done: Callable[[TransferResult], None],
    ) -> None:
        """Reads all that ``ticket`` names into our ``block_ids`` and ``state_slot``; returns at once.

        The prompt's first ``first_block`` blocks are here already; ``block_ids`` are for the others. The slot
        is null where the model has no state.
        """
        transfer = self.begin(ticket.request_id, ticket.incarnation, deadline_s=deadline_s, on_done=on_done)
        part = Part.last(block_ids, ticket.block_ids[first_block:], state_slot, ticket.state_slot)
        transfer.finish(part, Done(ticket.lease_id, ticket.epoch))

    def close(self) -> None:
        self._thread.post(lambda: self._flights.drain(DRAIN_S))
        self._thread.stop()
        self._peers.remove_all()
        self._flights.release()
        self._agent.close()

    # --- on the transfer thread ------------------------------------------------------------------

    def _connect(self, address: str, reply: HandshakeReply, on_connected: OnConnected) -> None:
        """The other ranks first: a peer that this one knows can be read from by all."""

        def connect_own(error: TransferError | None) -> None:
            if error is None:
                self._peers.connect(address, reply, on_connected)
            else:
                on_connected(error)

        if self._rank_readers is None:
            connect_own(None)
        else:
            self._rank_readers.connect(address, reply, connect_own)

    def _done(self, result: TransferResult, on_done: Callable[[TransferResult], None]) -> None:
        self._num_transfers -= 1
        self._bytes_read += result.num_bytes
        self._early_bytes += result.early_bytes
        on_done(result)

    def _count_part(self) -> None:
        self._num_parts += 1

    def _poll(self) -> float | None:
        self._agent.poll()
        delay_s = self._flights.poll()
        self._peers.remove_gone()
        return delay_s


class SinkTransfer:
    """A :class:`Transfer` as other threads drive it; calls return at once and are carried out in order."""

    def __init__(self, thread: PollThread, made: list[Transfer]) -> None:
        self._thread = thread
        self._made = made

    def read_part(self, part: Part) -> None:
        """Reads a part; more may be under way."""
        self._thread.post(lambda: self._made[0].read_part(part))

    def finish(self, part: Part, lease: Done) -> None:
        """Reads the last part, which has the state, and validates all of them against their lease."""
        asked_s = time.monotonic()
        self._thread.post(lambda: self._made[0].finish(part, lease, asked_s=asked_s))

    def fail(self, error: TwinfangError) -> None:
        """Nothing more will be read."""
        self._thread.post(lambda: self._made[0].fail(error))
