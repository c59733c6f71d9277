"""A gRPC channel from the router to one server, and the identity of the server that answers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from wire.channels import Channels
from wire.codec import PROTOCOL_VERSION
from wire.errors import ConfigError, DeadlineError, ProtocolVersionError, TwinfangError
from wire.health import watch_health
from wire.messages.generation import Describe, GetStats, ServerInfo, ServerStats
from wire.messages.handoff import Role
from wire.messages.prefixes import GetPrefixes, PrefixNews
from wire.messages.purge import PurgeNews, PurgePrefixes
from wire.messages.sessions import SessionNews, TendSession
from wire.rpc import DESCRIBE, GET_PREFIXES, GET_STATS, PURGE, TEND_SESSION, call, open_channel

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.75
"""Time between two checks that a server in use still answers."""
DESCRIBE_TIMEOUT_S = 2.0
"""A server that does not say who it is within this time is taken to be frozen or cut off. With
:data:`LOOK_INTERVAL_S`, the router notices this within 3 s. A server's event loop answers even while its
engine is busy. gRPC's own threads measure the time, so a router that is late itself still gets an answer that
arrived in time."""
RETRY_INTERVAL_S = 0.5
"""The longest pause between two attempts to reach a server that is away."""
STATS_TIMEOUT_S = 2.0
SESSION_TIMEOUT_S = 5.0
PURGE_TIMEOUT_S = 600.0
"""How long deleting cached prompts may take, besides waiting for requests. Files are overwritten at the speed
of a disk."""
NOT_SERVING = "it says that it does not serve: it is about to stop, or was drained"

MayConnect = Callable[[str], Awaitable[None]]
"""Raises :class:`ConfigError` for an address that the router must not connect to."""


async def require_nothing(_address: str) -> None:
    """Allow every address."""


class Connection:
    """The channel to ``address``. The server has to report a role that is in ``roles`` and, unless
    ``served_models`` is None, a model that is in ``served_models``."""

    def __init__(
        self,
        address: str,
        roles: tuple[Role, ...],
        served_models: frozenset[str] | None = None,
        *,
        may_connect: MayConnect = require_nothing,
        channels: Channels = open_channel,
    ) -> None:
        self.address = address
        self.roles = roles
        self._served_models = served_models
        self._may_connect = may_connect
        self.channel = channels(address)
        self.is_serving = True
        """False while the server's own health service reports that the server does not serve. A server that
        reports nothing is taken to serve."""
        self.held_back = ""
        """Why the router does not want to use the server now. Empty if it wants to."""
        self.last_info: ServerInfo | None = None
        """What the server said of itself when it last answered."""
        self.speaks_other_protocol = False
        """Whether the server answered in another protocol version when it was last asked who it is."""
        self.heard_s = -math.inf
        """When the server last sent something, on the monotonic clock."""
        self._problem: str = "not reached yet"

    @property
    def is_usable(self) -> bool:
        """Whether the server reports that it serves, and this router does not hold it back."""
        return self.is_serving and not self.held_back

    @property
    def problem(self) -> str:
        """Why the server is not in use. Shown by /readyz, and logged when it changes."""
        return self.held_back or (self._problem if self.is_serving else NOT_SERVING)

    async def keep_health(self, retry_interval_s: float) -> None:
        """Follow what the server says of its health, until the task is cancelled."""
        while True:
            async with aclosing(watch_health(self.channel)) as news:
                async for is_serving in news:
                    if self.is_serving and not is_serving:
                        log.warning("server %s is not in use: %s", self.address, NOT_SERVING)
                    self.is_serving = is_serving
            self.is_serving = True  # nothing is reported; `describe` and `look` find out whether it is away
            await asyncio.sleep(retry_interval_s)

    async def describe(self) -> ServerInfo | None:
        """Return what the server says of itself. None if no usable server answers; :attr:`problem` then says
        why."""
        try:
            return await self._ask_who()
        except TwinfangError as error:
            self.failed(error.message)
            return None

    async def look(self) -> ServerInfo | None:
        """Ask a server that is in use who it is, as :meth:`describe` does. A server that is too slow to
        answer still counts as present if it has sent anything else meanwhile."""
        asked_s = time.monotonic()
        try:
            return await self._ask_who()
        except DeadlineError as error:
            if self.heard_s >= asked_s:
                return self.last_info
            self.failed(f"it does not answer: {error.message}")
        except TwinfangError as error:
            self.failed(error.message)
        return None

    def heard(self) -> None:
        """Note that the server has said something, so it is not frozen."""
        self.heard_s = time.monotonic()

    async def _ask_who(self) -> ServerInfo:
        """Return what the server says of itself. Raises what :meth:`examine` raises."""
        try:
            info = await self.examine(DESCRIBE_TIMEOUT_S)
        except ProtocolVersionError:
            self.speaks_other_protocol = True
            raise
        self.speaks_other_protocol = False
        self.heard()
        self.succeeded()
        self.last_info = info
        return info

    async def examine(self, timeout_s: float) -> ServerInfo:
        """Return what the server says of itself. Raises :class:`ConfigError` if the router can't use that
        server, and what :func:`call` raises if no server answers."""
        if self._problem:  # otherwise it has passed this check and is connected
            await self._may_connect(self.address)
        info: ServerInfo = await call(self.channel, DESCRIBE, Describe(PROTOCOL_VERSION), timeout_s=timeout_s)
        if info.role not in self.roles:
            raise ConfigError(
                f"it is a server of role {info.role!r}, expected {' or '.join(self.roles)}: "
                "check --prefill and --decode"
            )
        if self._served_models is not None and info.served_model_name not in self._served_models:
            raise ConfigError(
                f"it serves {info.served_model_name!r}, and this router serves "
                f"{', '.join(map(repr, sorted(self._served_models)))}: check the server's "
                "--served-model-name and the router's --model"
            )
        return info

    async def stats(self) -> ServerStats | None:
        """Return the server's stats. None if it does not send them in time."""
        try:
            stats: ServerStats = await call(self.channel, GET_STATS, GetStats(), timeout_s=STATS_TIMEOUT_S)
        except TwinfangError as error:
            log.debug("server %s sent no stats: %s", self.address, error.message)
            return None
        self.heard()
        return stats

    async def prefix_news(self, since: int | None) -> PrefixNews | None:
        """Return which prefixes the server's cache can serve: all of them, or the changes since version
        ``since``. None if the server does not answer in time."""
        try:
            request = GetPrefixes(since)
            news: PrefixNews = await call(self.channel, GET_PREFIXES, request, timeout_s=STATS_TIMEOUT_S)
        except TwinfangError as error:
            log.debug("server %s did not report its prefixes: %s", self.address, error.message)
            return None
        self.heard()
        return news

    async def tend_session(self, wanted: TendSession) -> SessionNews | None:
        """Let the server do something with a session's starts. None if it does not answer in time, or is of a
        release without sessions."""
        try:
            news: SessionNews = await call(self.channel, TEND_SESSION, wanted, timeout_s=SESSION_TIMEOUT_S)
        except TwinfangError as error:
            log.debug("server %s did not tend a session: %s", self.address, error.message)
            return None
        self.heard()
        return news

    async def purge(self, wanted: PurgePrefixes) -> PurgeNews:
        """Let the server delete cached prompts. Raises :class:`TwinfangError` if it has not done so."""
        timeout_s = wanted.wait_s + PURGE_TIMEOUT_S
        news: PurgeNews = await call(self.channel, PURGE, wanted, timeout_s=timeout_s)
        self.heard()
        return news

    def succeeded(self) -> None:
        """Note that the connection shows nothing wrong with the server."""
        self._problem = ""

    def failed(self, reason: str) -> None:
        if reason != self._problem:
            log.warning("server %s is not in use: %s", self.address, reason)
            self._problem = reason

    async def close(self) -> None:
        await self.channel.close()
