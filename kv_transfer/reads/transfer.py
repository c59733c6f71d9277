"""One request's transfer: parts in any number, then one validation for all of them, then ``Done``.

    transfer.read_part(part) …        data alone, several at a time, as the peer computes them
    transfer.finish(part, lease)      the last part, with the state; when all have landed, the epoch's check

A part that fails or is late fails the transfer. The patience of a transfer runs only while it has something
under way: a peer that computes for a minute is not late. What was given up stays in quarantine until every
part that was posted has ended one way or the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.nixl.flights import Patience
from kv_transfer.nixl.peer_memories import Peer, PeerMemories
from kv_transfer.reads.epoch_check import EpochCheck
from kv_transfer.reads.part import Part
from kv_transfer.reads.part_reader import NOTHING, PartReader, ReadSize
from wire.errors import TransferError, TwinfangError
from wire.messages.handoff import Done


@dataclass(frozen=True)
class TransferResult:
    """How a transfer ended."""

    request_id: str
    num_bytes: int
    num_descriptors: int
    seconds: float
    """From when all was there to be read (of :meth:`Transfer.finish`; if it never was, from the start)."""
    error: TwinfangError | None
    settled: bool
    """False: bytes may still land at the destination; the listener is told when none can any more."""
    early_bytes: int = 0
    """Of ``num_bytes``, those that had landed before the last part could be read."""


class TransferListener:
    """Whoever asks for transfers; this one takes note of nothing. Told on the transfer thread."""

    def transferred(self, result: TransferResult) -> None:
        """Exactly once a transfer."""

    def settled(self, request_id: str) -> None:
        """Later, if bytes could still land then: now none can."""

    def failed(self, fault: BaseException) -> None:
        """A fault of ours: nothing is read any more, and the process is expected to end."""


@dataclass
class TransferCounts:
    """Since the start. Written on the transfer thread alone."""

    num_in_flight: int = 0
    """Transfers that have neither succeeded, failed nor been given up."""
    bytes_read: int = 0
    """Of blocks and states."""
    early_bytes: int = 0
    """Of :attr:`bytes_read`, those that had landed before their prompt was computed."""
    num_parts: int = 0
    """Parts that have landed, whatever became of their transfers."""


@dataclass(frozen=True)
class TransferSetup:
    """What all transfers of a server share."""

    peers: PeerMemories
    readers: Sequence[PartReader]
    check: EpochCheck
    counts: TransferCounts
    listener: TransferListener


class Transfer:
    """Reads of one request from one peer. Made by who asks for it, from then on the transfer thread's."""

    def __init__(self, setup: TransferSetup, request_id: str, incarnation: str, *, deadline_s: float) -> None:
        self.request_id = request_id
        self._setup = setup
        self._incarnation = incarnation
        self._peer: Peer | None = None
        self.patience = Patience(deadline_s)
        self._waited_since_s = time.monotonic()
        self._num_under_way = 0
        self._num_bytes = self._num_descriptors = self._early_bytes = 0
        self._error: TwinfangError | None = None
        self._lease: Done | None = None
        self._is_valid = self._is_reported = self._is_in_quarantine = False

    # --- what the owner asks for -----------------------------------------------------------------

    def begin(self) -> None:
        """Before all else."""
        self._setup.counts.num_in_flight += 1
        self._peer = self._setup.peers.get(self._incarnation)

    def read_part(self, part: Part) -> None:
        """Posts a read of a part; nothing is validated."""
        if self._error is not None or self._is_reported:
            return
        if self._peer is None:
            self.fail(TransferError("the prefill server that wrote the ticket is gone"))
            return
        self.took_off()  # until all are posted: a small read is often over when it is
        error = None
        try:
            for reader in self._setup.readers:
                reader.post(self._peer, part, self)
        except TransferError as refused:
            error = TransferError(refused.message, cause="ticket_refused")
        self.landed(error, NOTHING)

    def finish(self, part: Part, lease: Done, *, asked_s: float) -> None:
        """Reads the last part; when all have landed, their one validation."""
        self._early_bytes = self._num_bytes
        self._waited_since_s = asked_s
        self.read_part(part)
        self._lease = lease
        self._go_on()

    def fail(self, error: TwinfangError) -> None:
        """Nothing more will be read: ends with ``error`` once what is under way has landed."""
        self._error = self._error or error
        self._go_on()

    # --- what the reads bring --------------------------------------------------------------------

    def took_off(self) -> None:
        """Something was posted; :meth:`landed` will be called for it."""
        if self._num_under_way == 0:
            self.patience.renew()
        self._num_under_way += 1

    def landed(self, error: TransferError | None, size: ReadSize) -> None:
        """Something that was posted has ended."""
        self._num_under_way -= 1
        self.patience.renew()
        self._error = self._error or error
        if error is None and size.num_bytes:
            self._num_bytes += size.num_bytes
            self._num_descriptors += size.num_descriptors
            self._setup.counts.num_parts += 1
        self._go_on()

    def _go_on(self) -> None:
        """If nothing is under way any more, the next thing, whichever that is."""
        if self._num_under_way > 0:
            return
        if self._is_in_quarantine:
            self._is_in_quarantine = False
            self._setup.listener.settled(self.request_id)
        elif self._is_reported:
            return
        elif self._error is not None:
            self._report(self._error)
        elif self._lease is not None and self._is_valid:
            self._conclude(self._lease)
        elif self._lease is not None:
            self._validate(self._lease)

    def _validate(self, lease: Done) -> None:
        """The data is here; read the lease's epoch to learn whether it was still under lease."""
        assert self._peer is not None
        self.took_off()
        try:
            self._setup.check.validate(
                self._peer, lease, patience=self.patience, on_end=self._validated, on_late=self.late
            )
        except TransferError as error:
            self.landed(error, NOTHING)

    def _validated(self, error: TransferError | None) -> None:
        self._is_valid = error is None
        self.landed(error, NOTHING)

    def _conclude(self, lease: Done) -> None:
        assert self._peer is not None
        self._report(None)  # first: the request need not wait for what only the peer waits for
        self._setup.check.conclude(self._peer, lease, self.request_id)

    def late(self) -> None:
        """What is under way is late; its destination stays in quarantine."""
        if not self._is_reported:
            seconds = time.monotonic() - self._waited_since_s
            error = TransferError(
                f"the prefill server did not deliver within {seconds:.1f} s", cause="deadline"
            )
            self._is_in_quarantine = True
            self._report(self._error or error)

    def _report(self, error: TwinfangError | None) -> None:
        self._is_reported = True
        is_here = error is None
        result = TransferResult(
            self.request_id,
            self._num_bytes if is_here else 0,
            self._num_descriptors if is_here else 0,
            time.monotonic() - self._waited_since_s,
            error,
            settled=not self._is_in_quarantine,
            early_bytes=self._early_bytes if is_here else 0,
        )
        counts = self._setup.counts
        counts.num_in_flight -= 1
        counts.bytes_read += result.num_bytes
        counts.early_bytes += result.early_bytes
        self._setup.listener.transferred(result)
