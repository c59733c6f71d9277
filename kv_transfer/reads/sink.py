"""The reading side of the handoff: reads a peer's blocks and state, and checks the data before they are used.

Other threads use this module to reach the transfer thread. The transfer thread runs
:mod:`kv_transfer.reads.transfer` (one request's parts and their validation), :mod:`kv_transfer.nixl.flights`
(reads under way), :mod:`kv_transfer.reads.epoch_check` (which reads the lease's epoch after the data) and
:mod:`kv_transfer.nixl.peer_memories` (the servers that can be read).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from engine.ranks.processes import RankProcesses
from kv_transfer.digester import Digester
from kv_transfer.handshake import check_digest, check_regions, check_same_model
from kv_transfer.nixl.agent import region_of
from kv_transfer.nixl.peer_memories import WARM_UP_DEADLINE_S, OnConnected
from kv_transfer.nixl.transfer_thread import ThreadUser, TransferThread
from kv_transfer.reads.epoch_check import EpochCheck
from kv_transfer.reads.part import Part
from kv_transfer.reads.part_reader import OwnReader, PartReader
from kv_transfer.reads.rank_readers import RankReaders, RankReport
from kv_transfer.reads.transfer import Transfer, TransferCounts, TransferListener, TransferSetup
from kv_transfer.reads.verifier import make_verifier
from wire.errors import HandshakeError, TransferError, TwinfangError
from wire.messages.handoff import Done, HandshakeReply, HandshakeRequest, Ticket


class TransferSink(ThreadUser):
    """Owns a reading server's transfers. Methods are thread-safe.

    ``thread`` has the memory that is read into. ``introduction`` is the message that this server sends in a
    handshake. ``ranks`` are this server's other ranks; each of them reads its own share. With ``digester``,
    what is read is compared with the digests of the lending server.
    """

    def __init__(
        self,
        thread: TransferThread,
        introduction: HandshakeRequest,
        listener: TransferListener,
        ranks: RankProcesses | None = None,
        digester: Digester | None = None,
    ) -> None:
        # Maximum number of transfers under way: each fills a slot, or a block if the model has no state.
        blocks, slots = introduction.kv_layout, introduction.state_layout
        num_units = slots.num_units if slots.unit_bytes else blocks.num_units
        epochs = torch.zeros(num_units, dtype=torch.int64)
        thread.agent.register(epochs)
        self.introduction = introduction
        self.counts = TransferCounts()
        self._thread = thread
        self._reader = OwnReader(thread, epochs=region_of(epochs))
        check = EpochCheck(thread.agent, self._reader.flights, epochs)
        readers: list[PartReader] = [self._reader]
        self._rank_readers: RankReaders | None = None
        if ranks is not None:
            self._rank_readers = RankReaders(ranks, self._thread.post, self._reader.peers.forget)
            readers.append(self._rank_readers)
        verifier = make_verifier(digester, thread.post)
        self.setup = TransferSetup(self._reader.peers, readers, check, verifier, self.counts, listener)

    def take_report(self, rank: int, report: RankReport) -> None:
        """Takes another rank's report about its reads. May be called from any thread."""
        assert self._rank_readers is not None
        self._rank_readers.take_report(rank, report)

    def knows(self, incarnation: str) -> bool:
        """Whether the memory of this incarnation of a lending server can be read."""
        return self._reader.peers.knows(incarnation)

    def add_peer(self, address: str, reply: HandshakeReply) -> None:
        """Connects to a lending server and reads once from it, so that no request waits for the first
        contact.

        Returns when both are done. Raises :class:`HandshakeError` if the reply is damaged (cause
        ``metadata``), the two servers may not share state or the peer can't be reached.
        """
        who = f"the server at {address}"
        check_digest(reply, who)
        check_same_model(self.introduction, reply, who)
        check_regions(reply)
        outcome: Future[TransferError | None] = Future()
        self._thread.post(lambda: self._connect(address, reply, outcome.set_result))
        try:
            error = outcome.result(timeout=WARM_UP_DEADLINE_S * 2)
            if error is not None:
                raise error
        except (TransferError, TimeoutError) as error:
            raise HandshakeError(f"{who} can't be read from: {error}", cause="peer_gone") from error

    # --- transfers -------------------------------------------------------------------------------

    def begin(self, request_id: str, incarnation: str, *, deadline_s: float) -> SinkTransfer:
        """Returns a new transfer from the lending server with this ``incarnation``. Nothing is read yet.

        The caller must end the transfer by :meth:`SinkTransfer.finish` or :meth:`SinkTransfer.fail`. The
        listener is called at the end. If reads are under way and none of them ends for about ``deadline_s``
        seconds, the transfer fails.
        """
        transfer = Transfer(self.setup, request_id, incarnation, deadline_s=deadline_s)
        self._thread.post(transfer.begin)
        return SinkTransfer(self._thread, transfer)

    def read(
        self,
        ticket: Ticket,
        *,
        block_ids: Sequence[int],
        first_block: int = 0,
        state_slot: int,
        deadline_s: float,
    ) -> None:
        """Reads all that ``ticket`` names into our ``block_ids`` and ``state_slot``; returns at once.

        The prompt's first ``first_block`` blocks are already here; ``block_ids`` are for the blocks after
        them. ``state_slot`` is the null slot if the model has no state.
        """
        transfer = self.begin(ticket.request_id, ticket.incarnation, deadline_s=deadline_s)
        part = Part.last(
            block_ids,
            ticket.block_ids[first_block:],
            state_slot,
            ticket.state_slot,
            digests=ticket.unit_digests,
            num_tokens=ticket.num_tokens,
        )
        transfer.finish(part, Done(ticket.lease_id, ticket.epoch))

    # --- on the transfer thread ------------------------------------------------------------------

    def poll(self) -> float | None:
        return self._reader.poll()

    def release(self) -> None:
        self._reader.release()

    def _connect(self, address: str, reply: HandshakeReply, on_connected: OnConnected) -> None:
        """Connects the other ranks first, so that all ranks can read from a peer once this rank knows it."""

        def connect_own(error: TransferError | None) -> None:
            if error is None:
                self._reader.peers.connect(address, reply, on_connected)
            else:
                on_connected(error)

        if self._rank_readers is None:
            connect_own(None)
        else:
            self._rank_readers.connect(address, reply, connect_own)


class SinkTransfer:
    """A :class:`Transfer` for use by other threads. Calls return at once and are executed in order."""

    def __init__(self, thread: TransferThread, transfer: Transfer) -> None:
        self.request_id = transfer.request_id
        self._thread = thread
        self._transfer = transfer

    def read_part(self, part: Part) -> None:
        """Reads a part; other parts may still be under way."""
        self._thread.post(lambda: self._transfer.read_part(part))

    def finish(self, part: Part, lease: Done) -> None:
        """Reads the last part, which has the state, and validates all parts against their lease."""
        asked_s = time.monotonic()
        self._thread.post(lambda: self._transfer.finish(part, lease, asked_s=asked_s))

    def fail(self, error: TwinfangError) -> None:
        """Ends the transfer with ``error``; nothing more will be read."""
        self._thread.post(lambda: self._transfer.fail(error))
