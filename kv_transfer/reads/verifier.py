"""Compares what has landed with the digests of the server that lent it. Used on the transfer thread.

A long part is read in pieces: one piece is compared, on the digesting thread, while the next one is read. A
request then waits only for the comparison of its last piece.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from kv_transfer.digester import Digester
from kv_transfer.nixl.flights import Patience
from kv_transfer.nixl.peer_memories import Peer
from kv_transfer.reads.part import Part
from kv_transfer.reads.part_reader import PartReceiver, ReadSize
from wire.errors import TransferError
from wire.messages.layout import Layout
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

PIECE_BYTES = 4 << 20
"""A read of so many bytes takes 0.3 ms or more, its comparison 0.1 ms."""


class VerifiedReceiver(PartReceiver, Protocol):
    """A receiver that also waits for comparisons, such as :class:`kv_transfer.reads.transfer.Transfer`."""

    def verifying(self) -> None:
        """Called when a comparison begins; exactly one :meth:`verified` follows."""

    def verified(self, damage: TransferError | None) -> None: ...


class Verifier(Protocol):
    def pieces(
        self, part: Part, peer: Peer, receiver: VerifiedReceiver
    ) -> Iterator[tuple[Part, PartReceiver]]:
        """Yields what to read of a part, one after the other, and who waits for it."""


class NoVerifier:
    """Takes what arrives as it is."""

    def pieces(
        self, part: Part, _peer: Peer, receiver: VerifiedReceiver
    ) -> Iterator[tuple[Part, PartReceiver]]:
        yield part, receiver


class DigestVerifier:
    """Compares digests. ``post`` runs a function on the transfer thread."""

    def __init__(self, digester: Digester, post: Callable[[Callable[[], None]], None]) -> None:
        self._digester = digester
        self._post = post

    def pieces(
        self, part: Part, peer: Peer, receiver: VerifiedReceiver
    ) -> Iterator[tuple[Part, PartReceiver]]:
        # A server with several ranks sends no digests: each rank knows only its share of the bytes.
        if part.digests is None or len(peer.reply.ranks) > 1:
            yield part, receiver
            return
        layout = peer.reply.ranks[0].kv_layout
        is_short = _num_bytes(part, layout) <= PIECE_BYTES
        for piece in (part,) if is_short else part.pieces(max(1, PIECE_BYTES // max(1, layout.unit_bytes))):
            yield piece, _Comparison(self, piece, peer.address, receiver)

    def compare(self, piece: Part, address: str, receiver: VerifiedReceiver) -> None:
        """Compares a piece that has landed. Short ones are compared at once."""
        receiver.verifying()
        if self._digester.is_quick(len(piece.local_blocks), len(piece.local_slots)):
            receiver.verified(self._damage(piece, address))
            return

        def compare() -> None:
            damage = self._damage(piece, address)
            self._post(lambda: receiver.verified(damage))

        self._digester.post(compare)

    def _damage(self, piece: Part, address: str) -> TransferError | None:
        """Returns in what a piece differs. It is damaged only if its lease is still valid."""
        assert piece.digests is not None
        last_tokens = piece.num_tokens % self._digester.block_size if piece.local_blocks else 0
        found = self._digester.blocks(piece.local_blocks, last_tokens)
        names = [f"block {block_id}" for block_id in piece.remote_blocks]
        pairs = list(zip(names, piece.digests.blocks, found, strict=False))
        if piece.local_slots:
            state = self._digester.state(piece.local_slots[0])
            pairs.append((f"state {piece.remote_slots[0]}", piece.digests.state, state))
        wrong = [(name, sent, got) for name, sent, got in pairs if sent != got]
        if not wrong:
            return None
        name, sent, got = wrong[0]
        message = f"{_kind(address)}: {name} has the digest {got:016x}, its ticket says {sent:016x}"
        return TransferError(f"{message}, and {len(wrong) - 1} others differ", cause="digest")


class _Comparison:
    """Waits for a piece and has it compared."""

    def __init__(
        self, verifier: DigestVerifier, piece: Part, address: str, receiver: VerifiedReceiver
    ) -> None:
        self._verifier = verifier
        self._piece = piece
        self._address = address
        self._receiver = receiver

    @property
    def patience(self) -> Patience:
        return self._receiver.patience

    def took_off(self) -> None:
        self._receiver.took_off()

    def landed(self, error: TransferError | None, size: ReadSize) -> None:
        if error is None:
            self._verifier.compare(self._piece, self._address, self._receiver)
        self._receiver.landed(error, size)

    def late(self) -> None:
        self._receiver.late()


def tell_of_damage(damage: TransferError, address: str) -> None:
    """Logs damage that is one: the lease was valid while the data was read. What a lease that had ended
    names is another request's by then, and differs as it should."""
    lines.write(logging.ERROR, _kind(address), "%s", damage.message)


def _kind(address: str) -> str:
    return f"what was read from {address} is not what was sent"


def _num_bytes(part: Part, layout: Layout) -> int:
    return len(part.remote_blocks) * layout.unit_bytes


def make_verifier(digester: Digester | None, post: Callable[[Callable[[], None]], None]) -> Verifier:
    """Returns a verifier that uses ``digester``; without one, nothing is compared."""
    return NoVerifier() if digester is None else DigestVerifier(digester, post)
