"""Messages of the handoff: tickets, leases, and the handshake of two servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from wire.codec import FIRST_VERSION, check_peer, ignorable, message
from wire.errors import WireError
from wire.messages.layout import Layout

MAX_RANKS = 64
"""Maximum number of tensor-parallel ranks of one server."""

Role = Literal["prefill", "decode", "both"]


@message
class Digests:
    """Checksums of the blocks and state that a ticket names, computed when the ticket is made
    (:mod:`engine.sanitizer.checksum`)."""

    blocks: tuple[int, ...]
    """One per block, over the tokens that the ticket covers."""
    state: tuple[int, ...]
    """One per segment of the slot."""


@message
class UnitDigests:
    """Digests of the bytes that a reader gets (:mod:`kernels.digests.unit_digest`), as unsigned numbers."""

    blocks: tuple[int, ...]
    """One per block. The last one is only over the tokens that the ticket covers."""
    state: int
    """0 if there is no state."""


@message
class Ticket:
    """All that a server needs to read one prompt's blocks and its state h(N-1) under a lease.

    A model without attention layers has no blocks, and a model without recurrent layers has no state.
    """

    request_id: str
    lease_id: int
    """Index of the lease's cell in the lending server's epoch table."""
    epoch: int
    """Value of that cell while the lease lasts."""
    address: str
    """gRPC address of the lending server, ``host:port``."""
    incarnation: str
    num_tokens: int
    """Tokens that blocks and state cover: N-1."""
    block_ids: tuple[int, ...]
    """Empty if the model has no attention layers."""
    state_slot: int
    """0 if the model has no recurrent layers: then there are only blocks."""
    ttl_s: float
    """Time to live. The reader counts it from when it receives the ticket, so that the two servers' clocks
    are never compared."""
    digests: Digests | None = None
    """Set by a lending server that runs with the sanitizer."""
    unit_digests: UnitDigests | None = ignorable(None)
    """None if the lending server makes none, or is of release 0.2.0: then the reader compares nothing."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.state_slot < 0 or self.lease_id < 0 or not self.ttl_s > 0:
            raise WireError(
                f"ticket of {self.request_id!r}: num_tokens {self.num_tokens} and ttl_s {self.ttl_s} must be "
                f"positive, state_slot {self.state_slot} and lease_id {self.lease_id} not negative"
            )
        if any(block_id < 1 for block_id in self.block_ids):
            raise WireError(f"ticket of {self.request_id!r}: a block id below 1 (0 is the null block)")
        if self.digests is not None and len(self.digests.blocks) != len(self.block_ids):
            raise WireError(
                f"ticket of {self.request_id!r}: {len(self.digests.blocks)} digests "
                f"for {len(self.block_ids)} blocks"
            )
        if self.unit_digests is not None and len(self.unit_digests.blocks) != len(self.block_ids):
            raise WireError(
                f"ticket of {self.request_id!r}: {len(self.unit_digests.blocks)} unit digests "
                f"for {len(self.block_ids)} blocks"
            )


@message
class PartialTicket:
    """The early ticket of a prompt that is still being computed. Its lease is granted and can be followed.

    The lease does not expire while the prompt is being computed. The ``Ticket`` that ends :class:`Follow`
    has the same lease.
    """

    request_id: str
    lease_id: int
    epoch: int
    address: str
    incarnation: str
    num_tokens: int
    """Tokens that blocks and state will cover: N-1."""
    ttl_s: float
    """Time to live, counted from when the whole prompt has been computed."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.lease_id < 0 or not self.ttl_s > 0:
            raise WireError(
                f"early ticket of {self.request_id!r}: num_tokens {self.num_tokens}, "
                f"lease_id {self.lease_id} and ttl_s {self.ttl_s} must all be positive"
            )

    def completed(self, block_ids: Sequence[int], state_slot: int, digests: Digests | None) -> Ticket:
        """Returns the whole ticket, once the prompt is computed."""
        return Ticket(
            request_id=self.request_id,
            lease_id=self.lease_id,
            epoch=self.epoch,
            address=self.address,
            incarnation=self.incarnation,
            num_tokens=self.num_tokens,
            block_ids=tuple(block_ids),
            state_slot=state_slot,
            ttl_s=self.ttl_s,
            digests=digests,
        )


AnyTicket = Ticket | PartialTicket


@message
class Follow:
    """Asks for the progress of an early ticket's prompt. The replies are ``Progress`` messages, and at last
    the whole ``Ticket``."""

    incarnation: str
    lease_id: int
    epoch: int


@message
class Progress:
    """Blocks of a followed prompt that are full and will not change any more."""

    block_ids: tuple[int, ...]
    """In the prompt's order; they follow the block ids of earlier messages."""
    digests: tuple[int, ...] = ignorable(())
    """Of these blocks, as in :class:`UnitDigests`; empty if the lending server makes none."""

    def __post_init__(self) -> None:
        if self.digests and len(self.digests) != len(self.block_ids):
            raise WireError(f"{len(self.digests)} digests for {len(self.block_ids)} blocks")


@message
class HandshakeRequest:
    """A server that wants to read introduces itself to a lending server."""

    incarnation: str
    fingerprint: str
    """Fingerprint of config, dtype and weights: two servers may share state only if it is equal."""
    tp_size: int
    kv_layout: Layout
    """The layout on rank 0; ``state_layout`` is that of rank 0 as well."""
    state_layout: Layout
    protocol: int = FIRST_VERSION
    """The newest protocol version that the sender reads."""

    def __post_init__(self) -> None:
        check_peer(self.protocol)


@message
class Region:
    """One registered range of memory as NIXL addresses it."""

    address: int
    num_bytes: int
    device_id: int
    memory: Literal["DRAM", "VRAM"]

    def __post_init__(self) -> None:
        if not (0 <= self.address < 1 << 64 and 0 <= self.num_bytes < 1 << 63 and 0 <= self.device_id < 1024):
            raise WireError(
                f"invalid memory region: {self.num_bytes} bytes at {self.address} of device {self.device_id}"
            )


@message
class RankMemory:
    """All that a peer needs to read from the pools of one tensor-parallel rank."""

    kv_layout: Layout
    state_layout: Layout
    agent_metadata: bytes
    kv_region: Region
    state_region: Region


@message
class HandshakeReply:
    """All that a reader needs to read from the lending server's pools."""

    incarnation: str
    fingerprint: str
    ranks: tuple[RankMemory, ...]
    """In rank order."""
    epoch_region: Region
    """The epoch table on rank 0; only rank 0 keeps leases."""
    protocol: int = FIRST_VERSION
    """The newest protocol version that the sender reads."""
    digest: bytes = ignorable(b"")
    """Of all that NIXL and UCX get from this message (:func:`kv_transfer.handshake.digest_of`). Release 0.2.0
    sends none."""

    def __post_init__(self) -> None:
        check_peer(self.protocol)
        if not 1 <= len(self.ranks) <= MAX_RANKS:
            raise WireError(f"{len(self.ranks)} tensor-parallel ranks: expected 1 to {MAX_RANKS}")


@message
class EndLease:
    """Gives a lease back early: its request will not be decoded."""

    request_id: str
    lease_id: int
    epoch: int


@message
class RenewLeases:
    """Restarts the time to live of these leases: their reader is alive and waits for room."""

    leases: tuple[tuple[int, int], ...]
    """``(lease id, epoch)`` of each lease."""


@message
class RenewedLeases:
    ended: tuple[int, ...]
    """Ids of the leases that had already ended: nothing can be read under them any more."""


@message
class Abandon:
    """Ends one prefill in any phase: queued, computing, or leased with the ticket on its way.

    A router sends this when a request is cancelled between the call and its answer. The router can't know
    then whether a lease exists.
    """

    request_id: str


@message
class Done:
    """The NIXL notification after a read: the lease may end. Sent as this message's encoded bytes."""

    lease_id: int
    epoch: int
