"""The gRPC calls of a server whose memory others read: handshake, news of leases, renewal and early end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kv_transfer.progress_feed import ProgressFeeds
from kv_transfer.source import TransferSource
from wire.generation import Empty
from wire.handoff import EndLease, HandshakeReply, HandshakeRequest, RenewedLeases, RenewLeases
from wire.rpc import END_LEASE, FOLLOW, HANDSHAKE, RENEW_LEASES, replies_handler, unary_handler


def transfer_handlers(source: TransferSource) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Handlers of :data:`wire.rpc.TRANSFER_SERVICE`, by method name."""

    async def handshake(message: HandshakeRequest, _context: Any) -> HandshakeReply:
        return await asyncio.to_thread(source.handshake, message)

    async def end_lease(message: EndLease, _context: Any) -> Empty:
        source.end(message)
        return Empty()

    async def renew_leases(message: RenewLeases, _context: Any) -> RenewedLeases:
        return source.renew(message)

    return {
        HANDSHAKE.name: unary_handler(HANDSHAKE, handshake),
        END_LEASE.name: unary_handler(END_LEASE, end_lease),
        RENEW_LEASES.name: unary_handler(RENEW_LEASES, renew_leases),
    }


def follow_handlers(feeds: ProgressFeeds) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Those of a server that leases prompts while it computes them."""
    return {FOLLOW.name: replies_handler(FOLLOW, feeds.follow)}
