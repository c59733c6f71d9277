"""Waits until a newly started process takes requests."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from urllib.parse import urlsplit

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVER_POLL_S = 0.03
ROUTER_POLL_S = 0.1
"""A router that is asked before it has connected to its servers logs that it is not ready."""
CALL_TIMEOUT_S = 5.0

_CHANNEL_OPTIONS = [
    # While a server loads its model nothing listens; don't let the pauses between tries grow to minutes.
    ("grpc.initial_reconnect_backoff_ms", 30),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 60),
    ("grpc.use_local_subchannel_pool", 1),
]


async def until_serving(address: str) -> None:
    """Returns once the gRPC health service at ``host:port`` says SERVING."""
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        while True:
            try:
                reply = await stub.Check(request, wait_for_ready=True, timeout=CALL_TIMEOUT_S)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not ready yet; the caller keeps the deadline
            await asyncio.sleep(SERVER_POLL_S)


async def until_ready(url: str) -> None:
    """Returns once ``GET /readyz`` of the router at ``url`` is answered 200."""
    await until_answered(f"{url}/readyz")


async def until_answered(url: str) -> None:
    """Returns once ``GET url`` is answered 200."""
    while not await asyncio.to_thread(_is_answered, url):
        await asyncio.sleep(ROUTER_POLL_S)


def _is_answered(url: str) -> bool:
    parts = urlsplit(url)
    connection = _connection(parts.scheme, parts.netloc)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    except http.client.HTTPException:
        return False
    finally:
        connection.close()


def _connection(scheme: str, address: str) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(address, timeout=CALL_TIMEOUT_S)
    # Our own child on this machine: its certificate is for the name that clients use, not for this address.
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(address, timeout=CALL_TIMEOUT_S, context=unchecked)
