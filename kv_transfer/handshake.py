"""Checks, once in the handshake, whether two servers may share state. A refusal names both servers'
values."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from engine.memory.caches import Caches
from kv_transfer.nixl.descriptors import EPOCH_BYTES
from wire.codec import PROTOCOL_VERSION
from wire.errors import HandshakeError
from wire.messages.handoff import HandshakeReply, HandshakeRequest, RankMemory, Region
from wire.messages.layout import Layout


def introduce(caches: Caches, incarnation: str, fingerprint: str, *, num_ranks: int = 1) -> HandshakeRequest:
    """Returns the message by which a server, in its present incarnation, introduces itself to its peers."""
    return HandshakeRequest(
        incarnation, fingerprint, num_ranks, caches.kv_layout, caches.state_layout, PROTOCOL_VERSION
    )


def check_same_model(ours: HandshakeRequest, theirs: HandshakeRequest | HandshakeReply, who: str) -> None:
    """Raises :class:`HandshakeError` unless both serve the same weights in the same memory layout.

    Pools may differ in size, the two sides may run on different kinds of memory, and the model may be divided
    among different numbers of ranks.
    """
    if ours.fingerprint != theirs.fingerprint:
        raise HandshakeError(
            f"{who} serves another model: fingerprint {theirs.fingerprint}, ours is {ours.fingerprint}; "
            "start both with the same checkpoint, `dtype`, `weight_dtype`, "
            "`mamba_cache_stochastic_rounding` and `batch_invariant`"
        )
    first = theirs.ranks[0] if isinstance(theirs, HandshakeReply) else theirs
    for mine, other in ((ours.kv_layout, first.kv_layout), (ours.state_layout, first.state_layout)):
        fits = mine.same_unit(other) if ours.tp_size == _num_ranks(theirs) else mine.same_kind(other)
        if not fits:
            raise HandshakeError(
                f"{who} lays out a {other.unit} as {describe(other)}, this server as {describe(mine)}; "
                f"{_remedy(mine, other)}"
            )


def with_digest(reply: HandshakeReply) -> HandshakeReply:
    """Returns the reply with the digest that its reader compares (:func:`check_digest`)."""
    return replace(reply, digest=digest_of(reply))


def digest_of(reply: HandshakeReply) -> bytes:
    """Returns a digest of all that NIXL and UCX get from a handshake: metadata, addresses and layouts.

    It covers these fields alone, so that a later release may add others. It has no key: who may send a
    handshake is the channel's business, and a digest guards against damage.
    """
    ranks = [
        (one.agent_metadata, *map(_place, (one.kv_region, one.state_region)), *map(_plan, _layouts(one)))
        for one in reply.ranks
    ]
    digested = (reply.incarnation, reply.fingerprint, ranks, _place(reply.epoch_region))
    return hashlib.blake2b(repr(digested).encode(), digest_size=16).digest()


def _place(region: Region) -> tuple[int, int, int, str]:
    return region.address, region.num_bytes, region.device_id, region.memory


def _layouts(memory: RankMemory) -> tuple[Layout, Layout]:
    return memory.kv_layout, memory.state_layout


def _plan(layout: Layout) -> tuple[object, ...]:
    segments = [
        (one.name, one.dtype, one.offset, [(a.name, a.size, a.stride) for a in one.axes], tuple(one.holds))
        for one in layout.segments
    ]
    return layout.unit, layout.num_units, layout.unit_bytes, segments


def check_digest(reply: HandshakeReply, who: str) -> None:
    """Raises :class:`HandshakeError` unless the reply is the one that its sender digested.

    UCX crashes on some metadata in which one bit is wrong, so nothing damaged may reach it. A reply without
    a digest is of release 0.2.0 and is taken as it is.
    """
    found = digest_of(reply)
    if reply.digest and reply.digest != found:
        raise HandshakeError(
            f"the handshake of {who} was damaged on its way or is not its own: its digest is "
            f"{reply.digest.hex()[:32]}, that of what arrived {found.hex()}",
            cause="metadata",
        )


def check_regions(reply: HandshakeReply) -> None:
    """Raises :class:`HandshakeError` unless the peer's regions hold the pools that its layouts describe."""
    for rank in reply.ranks:
        for name, region, layout in (
            ("KV", rank.kv_region, rank.kv_layout),
            ("state", rank.state_region, rank.state_layout),
        ):
            if region.num_bytes != layout.num_bytes:
                raise HandshakeError(
                    f"the peer's {name} region has {region.num_bytes} bytes, "
                    f"its layout describes {layout.num_bytes}"
                )
        first = reply.ranks[0]
        for layout, other in ((rank.kv_layout, first.kv_layout), (rank.state_layout, first.state_layout)):
            if not layout.same_kind(other) or layout.num_units != other.num_units:
                raise HandshakeError(
                    f"the peer's ranks differ: {layout.num_units} {layout.unit}s of {describe(layout)} and "
                    f"{other.num_units} of {describe(other)}"
                )
    if reply.epoch_region.num_bytes < EPOCH_BYTES or reply.epoch_region.num_bytes % EPOCH_BYTES:
        raise HandshakeError(f"the peer's epoch table has {reply.epoch_region.num_bytes} bytes")
    regions = [region for rank in reply.ranks for region in (rank.kv_region, rank.state_region)]
    for region in (*regions, reply.epoch_region):
        if region.address + region.num_bytes > 1 << 64:
            raise HandshakeError(
                f"the peer's {region.num_bytes} bytes at {region.address} end past the last address"
            )


def _num_ranks(theirs: HandshakeRequest | HandshakeReply) -> int:
    return len(theirs.ranks) if isinstance(theirs, HandshakeReply) else theirs.tp_size


def _remedy(mine: Layout, other: Layout) -> str:
    """Says which settings make the layouts equal.

    With one checkpoint, the attention layers differ only if one side drafts with the MTP layers: the blocks
    then hold the KV of those layers too.
    """
    if _num_attention_layers(mine) == _num_attention_layers(other):
        same = (
            "`block_size`, `dtype` and `kv_cache_dtype`"
            if mine.unit == "block"
            else "`dtype` and `mamba_ssm_cache_dtype`"
        )
        return f"start both with the same {same}"
    return (
        "one drafts with the checkpoint's MTP layers and keeps their KV, the other does not: "
        "start the prefill server with the same `num_speculative` and `drafter` as the decode server"
    )


def _num_attention_layers(layout: Layout) -> list[int]:
    return [axis.size for segment in layout.segments for axis in segment.axes if axis.name == "attn_layers"]


def describe(layout: Layout) -> str:
    """Returns a layout in one line: bytes per unit, and the axes of each kind of segment."""
    seen: dict[str, str] = {}
    for segment in layout.segments:
        axes = ", ".join(f"{axis.name} {axis.size}" for axis in segment.axes)
        seen.setdefault(segment.name.split(".")[0], f"{segment.dtype} [{axes}]")
    parts = "; ".join(f"{name} {axes}" for name, axes in seen.items())
    return f"{layout.unit_bytes} bytes ({parts})" if parts else "nothing"
