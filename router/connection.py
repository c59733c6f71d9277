"""A gRPC channel of the router to one server, and who answers at its other end."""

from __future__ import annotations

import logging

import grpc.aio

from wire.errors import ConfigError, TwinfangError
from wire.generation import Describe, ServerInfo
from wire.handoff import Role
from wire.rpc import CHANNEL_OPTIONS, DESCRIBE, call

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0

RECONNECT_OPTIONS: list[tuple[str, int]] = [
    # gRPC's own backoff grows to two minutes: a server that comes back would be overlooked as long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Else channels to one address share their backoff, those of an earlier router in the process too.
    ("grpc.use_local_subchannel_pool", 1),
]


class Connection:
    """The channel to ``address``. The server has to say that its role is one of ``roles``."""

    def __init__(self, address: str, roles: tuple[Role, ...]) -> None:
        self.address = address
        self.roles = roles
        self.channel = grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *RECONNECT_OPTIONS])
        self.problem: str = "not reached yet"
        """Why the server is not in use; said by /readyz. Logged when it changes."""

    async def describe(self) -> ServerInfo | None:
        """Who is there; None, with the reason in :attr:`problem`, if nobody fit for use answers."""
        try:
            info: ServerInfo = await call(self.channel, DESCRIBE, Describe(), timeout_s=DESCRIBE_TIMEOUT_S)
            if info.role not in self.roles:
                raise ConfigError(
                    f"it is a server of role {info.role!r}, expected {' or '.join(self.roles)}: "
                    "check --prefill and --decode"
                )
        except TwinfangError as error:
            self.failed(error.message)
            return None
        self.problem = ""
        return info

    def failed(self, reason: str) -> None:
        if reason != self.problem:
            log.warning("server %s is not in use: %s", self.address, reason)
            self.problem = reason

    async def close(self) -> None:
        await self.channel.close()
