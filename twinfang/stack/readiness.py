"""Waits until a newly started process takes requests."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from wire.channels import HANDSHAKE_MS

if TYPE_CHECKING:
    from wire.tls.identity_files import IdentityFiles

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


async def until_serving(address: str, files: IdentityFiles | None = None) -> None:
    """Returns once the gRPC health service at ``host:port`` says SERVING. ``files``: for mutual TLS;
    None: the server talks in clear."""
    async with _channel(address, files) as channel:
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


def _channel(address: str, files: IdentityFiles | None) -> grpc.aio.Channel:
    if files is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    from wire.tls.key_pair import KeyPair  # only with TLS, since its library takes a while to import

    pair = KeyPair.read(files.key_pair())
    options = [
        *(option for option in _CHANNEL_OPTIONS if option[0] != "grpc.min_reconnect_backoff_ms"),
        ("grpc.min_reconnect_backoff_ms", HANDSHAKE_MS),
        ("grpc.ssl_target_name_override", files.names.name("server")),
    ]
    credentials = grpc.ssl_channel_credentials(pair.authorities, pair.private_key, pair.certificates)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def until_ready(url: str) -> None:
    """Returns once ``GET /readyz`` of the router at ``url`` is answered 200."""
    await until_answered(f"{url}/readyz")


async def until_answered(url: str) -> None:
    """Returns once ``GET url`` is answered 200."""
    while not await asyncio.to_thread(_is_answered, url):
        await asyncio.sleep(ROUTER_POLL_S)


def _is_answered(url: str) -> bool:
    connection = connection_to(url, timeout_s=CALL_TIMEOUT_S)
    try:
        connection.request("GET", urlsplit(url).path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    except http.client.HTTPException:
        return False
    finally:
        connection.close()


def connection_to(url: str, *, timeout_s: float) -> http.client.HTTPConnection:
    """Returns a connection to a process on this machine, for probes. Its certificate is not checked."""
    parts = urlsplit(url)
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    # Our own child on this machine: its certificate is for the name that clients use, not for this address.
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=unchecked)
