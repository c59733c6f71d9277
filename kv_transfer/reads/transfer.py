"""One request's transfer: any number of parts, then one validation for all of them, then ``Done``.

    transfer.read_part(part) …        only data; several parts at a time, as the peer computes them
    transfer.finish(part, lease)      the last part, with the state; then the check of the epoch

What has landed is compared with the lending server's digests while further parts are read, if the server
has sent digests (:mod:`kv_transfer.reads.verifier`). If a part fails or is late, the transfer fails. The time
until a transfer is late (its patience) runs only while it has a read under way: a peer that computes for a
minute is not late. The destination of a transfer that was given up stays in quarantine until every part that
was posted has ended, by success or failure.
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
from kv_transfer.reads.verifier import Verifier, tell_of_damage
from wire.errors import TransferError, TwinfangError
from wire.messages.handoff import Done


@dataclass(frozen=True)
class TransferResult:
    """How a transfer ended."""

    request_id: str
    num_bytes: int
    num_descriptors: int
    seconds: float
    """Counted from the call of :meth:`Transfer.finish`, or from the transfer's start if there was no such
    call."""
    error: TwinfangError | None
    settled: bool
    """False if bytes may still land at the destination; :meth:`TransferListener.settled` then follows."""
    early_bytes: int = 0
    """The part of ``num_bytes`` that had landed before the last part could be read."""


class TransferListener:
    """Callbacks to the owner of transfers, on the transfer thread. This base class ignores every call."""

    def transferred(self, result: TransferResult) -> None:
        """Called exactly once per transfer."""

    def settled(self, request_id: str) -> None:
        """Called when no byte can land any more, if :meth:`transferred` reported that bytes still could."""


@dataclass
class TransferCounts:
    """Counts since the start. Only the transfer thread writes them."""

    num_in_flight: int = 0
    """Transfers that have neither succeeded, failed nor been given up."""
    bytes_read: int = 0
    """Bytes of blocks and states."""
    early_bytes: int = 0
    """The part of :attr:`bytes_read` that had landed before the prompt was computed."""
    num_parts: int = 0
    """Reads of parts that have landed, including those of transfers that failed later. A part is several
    reads if one of the two servers has several ranks."""


@dataclass(frozen=True)
class TransferSetup:
    """The objects that all transfers of a server share."""

    peers: PeerMemories
    readers: Sequence[PartReader]
    check: EpochCheck
    verifier: Verifier
    counts: TransferCounts
    listener: TransferListener


class Transfer:
    """Reads of one request from one peer. Any thread may create it; afterwards only the transfer thread uses
    it."""

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
        self._num_unverified = 0
        self._damage: TransferError | None = None
        self._is_valid = self._is_reported = self._is_in_quarantine = False

    # --- what the owner asks for -----------------------------------------------------------------

    def begin(self) -> None:
        """Looks up the peer. Must be called first."""
        self._setup.counts.num_in_flight += 1
        self._peer = self._setup.peers.get(self._incarnation)

    def read_part(self, part: Part) -> None:
        """Posts a read of a part; nothing is validated."""
        if self._error is not None or self._is_reported:
            return
        if self._peer is None:
            self.fail(TransferError("the prefill server that wrote the ticket is gone"))
            return
        # Stands for the reads that are not posted yet: a small read often ends before the next one is posted.
        self.took_off()
        error = None
        try:
            for piece, receiver in self._setup.verifier.pieces(part, self._peer, self):
                for reader in self._setup.readers:
                    reader.post(self._peer, piece, receiver)
        except TransferError as refused:
            error = TransferError(refused.message, cause="ticket_refused")
        self.landed(error, NOTHING)

    def finish(self, part: Part, lease: Done, *, asked_s: float) -> None:
        """Reads the last part; when all parts have landed, validates them together."""
        self._early_bytes = self._num_bytes
        self._waited_since_s = asked_s
        self.read_part(part)
        self._lease = lease
        self._go_on()

    def fail(self, error: TwinfangError) -> None:
        """Ends the transfer with ``error`` once the reads under way have ended. Nothing more will be read."""
        self._error = self._error or error
        self._go_on()

    # --- what the reads bring --------------------------------------------------------------------

    def took_off(self) -> None:
        """Notes that a read was posted; :meth:`landed` will be called for it."""
        if self._num_under_way == 0:
            self.patience.renew()
        self._num_under_way += 1

    def landed(self, error: TransferError | None, size: ReadSize) -> None:
        """Notes that a read has ended."""
        self._num_under_way -= 1
        self.patience.renew()
        self._error = self._error or error
        if error is None and size.num_bytes:
            self._num_bytes += size.num_bytes
            self._num_descriptors += size.num_descriptors
            self._setup.counts.num_parts += 1
        self._go_on()

    def verifying(self) -> None:
        """Notes that data that has landed is being compared; :meth:`verified` will be called for it."""
        self._num_unverified += 1

    def verified(self, damage: TransferError | None) -> None:
        """Notes that data was compared. ``damage`` says what is wrong with it."""
        self._num_unverified -= 1
        self._damage = self._damage or damage
        self._go_on()

    def _go_on(self) -> None:
        """Takes the transfer's next step if no read is under way any more."""
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
            # Only now is it known that data which differs was not another request's.
            if self._damage is not None:
                assert self._peer is not None
                tell_of_damage(self._damage, self._peer.address)
                self._report(self._damage)
            elif self._num_unverified == 0:
                self._conclude(self._lease)
        elif self._lease is not None:
            self._validate(self._lease)

    def _validate(self, lease: Done) -> None:
        """Reads the lease's epoch, to learn whether it was still valid when the data landed."""
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
        self._report(None)  # first: the request need not wait for the message to the peer
        self._setup.check.conclude(self._peer, lease, self.request_id)

    def late(self) -> None:
        """Reports that the reads under way are late; their destination stays in quarantine."""
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
