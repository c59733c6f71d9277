"""Channels to gRPC servers, in clear or with mutual TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from wire.rpc import CLIENT_OPTIONS, open_channel

if TYPE_CHECKING:  # these import the library for certificates
    from wire.tls.identity import Identity
    from wire.tls.key_pair import KeyPair

HANDSHAKE_MS = 5_000
"""Time for a connection with its TLS handshake, which a busy machine may let wait."""


class Channels(Protocol):
    """Opens channels."""

    def __call__(self, address: str) -> grpc.aio.Channel:
        """Return a channel to ``host:port``. It connects on first use, and again after a failure."""


class TlsChannels:
    """Opens channels to servers, which have to show a server's certificate."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def __call__(self, address: str) -> grpc.aio.Channel:
        return TlsChannel(address, self._identity)


def channels_of(identity: Identity | None) -> Channels:
    return open_channel if identity is None else TlsChannels(identity)


class TlsChannel(grpc.aio.Channel):  # type: ignore[misc]
    """A channel whose new calls use the newest certificate.

    gRPC's own channel keeps its certificate for life. So a new certificate makes a new channel, and the old
    one closes when its last call has ended; at once, if the authorities have changed too, since the server at
    its other end may be one of those that are no longer trusted.
    """

    def __init__(self, address: str, identity: Identity) -> None:
        self.address = address
        self._identity = identity
        self._name = identity.names.name("server")
        self._authorities = identity.current.authorities
        self._lives: list[_Life] = []
        self._closing: set[asyncio.Task[None]] = set()
        identity.on_change(self._use)

    def advice(self, details: str) -> str:
        own = self._identity.current
        if any(sign in details for sign in ("CERTIFICATE_VERIFY_FAILED", "Verification Check")):
            return (
                f"; the server's certificate is refused: it has to be for {self._name!r}, of an authority in "
                "`tls_ca`, and not expired"
            )
        if own.expires_s <= time.time():
            return "; this process's certificate has expired: give a new one as `tls_cert`"
        if "Socket closed" in details or "handshake" in details:
            return (
                "; it closed the connection at its beginning: either it stops, or speaks no TLS, or refuses "
                f"this process's certificate, which is for {', '.join(own.names)}"
            )
        return ""

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_newest("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_newest("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_newest("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._of_newest("stream_stream", args, kwargs)

    async def close(self, grace: float | None = None) -> None:
        self._identity.forget(self._use)
        lives, self._lives = self._lives, []
        for life in lives:
            await life.channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._lives[-1].channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._lives[-1].channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._lives[-1].channel.channel_ready()

    async def __aenter__(self) -> TlsChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _of_newest(self, kind: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        life = self._lives[-1]
        begin = getattr(life.channel, kind)(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = begin(*args, **kwargs)
            life.num_calls += 1
            begun.add_done_callback(lambda _: self._ended(life))
            return begun

        return call

    def _ended(self, life: _Life) -> None:
        life.num_calls -= 1
        self._close_old()

    def _use(self, pair: KeyPair) -> None:
        self._lives.append(_Life(self.address, self._name, pair))
        if pair.authorities != self._authorities:
            self._authorities = pair.authorities
            for life in self._lives[:-1]:
                life.num_calls = 0
        self._close_old()

    def _close_old(self) -> None:
        for life in self._lives[:-1]:
            if life.num_calls <= 0:
                self._lives.remove(life)
                task = asyncio.ensure_future(life.channel.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


class _Life:
    """gRPC's channel with one certificate."""

    def __init__(self, address: str, name: str, pair: KeyPair) -> None:
        credentials = grpc.ssl_channel_credentials(pair.authorities, pair.private_key, pair.certificates)
        options = [
            *(option for option in CLIENT_OPTIONS if option[0] != "grpc.min_reconnect_backoff_ms"),
            ("grpc.min_reconnect_backoff_ms", HANDSHAKE_MS),
            ("grpc.ssl_target_name_override", name),
        ]
        self.channel = grpc.aio.secure_channel(address, credentials, options=options)
        self.num_calls = 0
