"""Cached prefixes that one server reads out of another one's host memory.

A router names the server that has one (:class:`Neighbour`). The reading server asks that server for a lease
(:class:`BorrowStart`), reads its pages with NIXL, and then the lease's epoch. A server that leaves offers
what it has to servers that stay (:class:`OfferStart`), and they read it the same way.
"""

from __future__ import annotations

from wire.codec import ignorable, message
from wire.errors import WireError
from wire.messages.handoff import Region
from wire.messages.prefixes import KEY_BYTES

MAX_ADDRESS_CHARS = 300
MAX_OFFERED_BLOCKS = 32_768
"""Longest start that is offered: its keys take 0.6 MiB of a call's MiB."""
MAX_HEIRS = 64
"""Most servers that a leaving server is told of."""


def check_address(address: str) -> None:
    """Raises :class:`WireError` unless ``address`` may be a server's."""
    if not 0 < len(address) <= MAX_ADDRESS_CHARS:
        raise WireError(f"address: expected 1 to {MAX_ADDRESS_CHARS} characters, got {len(address)}")


@message
class Neighbour:
    """A server that has more of a prompt cached than the one that computes it."""

    address: str
    num_tokens: int
    """Tokens of its longest start of which host memory can hold a copy."""

    def __post_init__(self) -> None:
        check_address(self.address)
        if self.num_tokens < 1:
            raise WireError(f"neighbour {self.address}: num_tokens must be positive, got {self.num_tokens}")


@message
class BorrowStart:
    """Asks a server to lease a start in its host memory. A start that only its device has is copied there."""

    borrower: str
    """The incarnation of the server that reads. What it may borrow at a time is bounded."""
    fingerprint: str
    layout: str
    """With ``fingerprint`` and ``page_bytes``: the form of a start. Both servers must have the same."""
    page_bytes: int
    key: bytes
    """Key of the start's last block. It stands for all tokens before it, the cache salt and the model."""
    num_blocks: int
    """How many of its last blocks are wanted; the reader has those before them."""

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or self.num_blocks < 0:
            raise WireError(
                f"expected a key of {KEY_BYTES} bytes and a number of blocks, "
                f"got {len(self.key)} bytes and {self.num_blocks}"
            )


@message
class LentStart:
    """Pages that stay as they are while the lease lasts."""

    incarnation: str
    lease_id: int
    """Like :attr:`wire.messages.handoff.Ticket.lease_id`; ``epoch`` and ``ttl_s`` as well."""
    epoch: int
    ttl_s: float
    region: Region
    """The lending server's pages. Page ``i`` begins ``(i - 1) * page_bytes`` behind its address."""
    block_pages: tuple[int, ...]
    """The page of each block that was asked for; empty if the model has no KV."""
    state_pages: tuple[int, ...]
    """The pages of the state, in order; empty if the model has no state."""
    place: int
    """Why the state was kept (:class:`engine.memory.cached_start.Place`)."""
    digests: tuple[int, ...] = ignorable(())
    """One for each page, those of the state last (:mod:`kernels.digests.unit_digest`); empty: none were
    made."""

    def __post_init__(self) -> None:
        num_pages = len(self.block_pages) + len(self.state_pages)
        if (
            self.lease_id < 0
            or not self.ttl_s > 0
            or any(page < 1 for page in (*self.block_pages, *self.state_pages))
        ):
            raise WireError("a lent start: lease_id must not be negative, ttl_s and pages must be positive")
        if self.digests and len(self.digests) != num_pages:
            raise WireError(f"a lent start: {len(self.digests)} digests for {num_pages} pages")


@message
class BorrowReply:
    start: LentStart | None
    """None: nothing is lent."""
    why: str = ""
    """Why not: ``gone``, ``form`` (the two servers' starts differ), ``limit`` (too much is lent)."""


@message
class OfferStart:
    """Tells a server that a server which leaves has this start. The reply comes when it was read."""

    address: str
    """Of the leaving server."""
    incarnation: str
    keys: tuple[bytes, ...]
    """Keys of all blocks from the prompt's start, in order."""
    salt: str = ""
    """The cache salt that they are chained to (:mod:`wire.messages.cache_salt`)."""

    def __post_init__(self) -> None:
        check_address(self.address)
        if not 1 <= len(self.keys) <= MAX_OFFERED_BLOCKS:
            raise WireError(f"expected 1 to {MAX_OFFERED_BLOCKS} keys, got {len(self.keys)}")
        if any(len(key) != KEY_BYTES for key in self.keys):
            raise WireError(f"expected keys of {KEY_BYTES} bytes")


@message
class OfferReply:
    is_taken: bool
    num_bytes: int = 0
    """Bytes that were read for that."""
    may_offer_more: bool = True
    """False: this server takes no more from the leaving one."""
