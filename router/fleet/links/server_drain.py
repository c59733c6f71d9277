"""Whether a server takes new requests: what an operator wants, what the server reports, and what the server
must still be told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from router.fleet.links.server_connection import Connection
from wire.errors import TwinfangError, UnreachableError
from wire.messages.generation import ServerInfo, SetDraining
from wire.messages.neighbours import MAX_HEIRS
from wire.rpc import SET_DRAINING, call

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class ServerDrain:
    """Whether one server drains. The server itself keeps this state, so that all routers see it. Another
    incarnation of the server is told again."""

    def __init__(self, connection: Connection) -> None:
        self.why = ""
        """Why the server must not serve again. Empty if it may."""
        self._is_draining = False
        self.num_wishes = 0
        """How often :meth:`wish` or :meth:`retire` was called."""
        self._connection = connection
        self._incarnation = ""
        self._untold: SetDraining | None = None
        """The latest wish, if the server has not been told it yet. None if there is nothing to tell."""
        self._telling = asyncio.Lock()

    @property
    def is_draining(self) -> bool:
        return self._is_draining or self.is_retired

    @property
    def is_retired(self) -> bool:
        """Whether the server drains for good."""
        return bool(self.why)

    def retire(self, why: str, *, lets_go: bool, heirs: Sequence[str] = ()) -> None:
        """Drain the server for good; nothing can undo this. If another process answers at this address later,
        this router sends it no requests either. But the router does not tell that process to drain, because
        only the earlier process was meant."""
        self.why = why
        self.num_wishes += 1
        self._untold = _wish(True, lets_go, heirs) if self._incarnation else None

    def wish(self, is_draining: bool, *, lets_go: bool = False, heirs: Sequence[str] = ()) -> None:
        """Set what an operator wants. It counts for this router from now on; call :meth:`tell` once the
        server can be reached. ``heirs``: prefill servers to which a prefill server hands what it has
        cached."""
        self._is_draining = is_draining
        self.num_wishes += 1
        self._untold = _wish(is_draining, lets_go, heirs)

    async def tell(self) -> bool:
        """Tell the server what it does not know yet. If the wish changes meanwhile, the server is told again.

        Return False if the server is connected but does not answer, or refuses. A server that can't be
        reached is told when it appears: it may be about to stop; it takes no more calls then, but its stream
        stays open until its requests end.
        """
        async with self._telling:
            while (wanted := self._untold) is not None:
                try:
                    await call(self._connection.channel, SET_DRAINING, wanted, timeout_s=TIMEOUT_S)
                except TwinfangError as error:
                    address = self._connection.address
                    log.warning("server %s was not told whether to drain: %s", address, error)
                    return isinstance(error, UnreachableError)
                if self._untold is wanted:
                    self._untold = None
            return True

    def appeared(self, info: ServerInfo, *, num_wishes: int) -> None:
        """Note that the server has said who it is. It is asked again and again.

        ``num_wishes``: the value of :attr:`num_wishes` before the server was asked. If it is higher by now,
        the server's report whether it drains is outdated.
        """
        is_new = info.incarnation != self._incarnation
        self._incarnation = info.incarnation
        if is_new and self.is_retired:
            self._untold = None
        elif is_new and self.is_draining and not info.is_draining and self._untold is None:
            self._untold = SetDraining(True)
        if num_wishes == self.num_wishes:
            self.heard(info.is_draining)

    def heard(self, is_draining: bool) -> None:
        """Take over what the server reports, unless the server has not been told an operator's wish yet. The
        server may have been told to drain through another router."""
        if self._untold is None:
            self._is_draining = is_draining


def _wish(is_draining: bool, lets_go: bool, heirs: Sequence[str]) -> SetDraining:
    return SetDraining(is_draining, lets_go, tuple(heirs[:MAX_HEIRS]))
