"""The gRPC calls of a server whose memory others read: handshake, renewal and early end of leases."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kv_transfer.source import TransferSource
from wire.generation import Empty
from wire.handoff import EndLease, HandshakeReply, HandshakeRequest, RenewedLeases, RenewLeases
from wire.rpc import END_LEASE, HANDSHAKE, RENEW_LEASES, unary_handler


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
