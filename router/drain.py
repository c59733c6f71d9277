"""Whether a server takes new requests: what an operator wants, what the server says, who must be told."""

from __future__ import annotations

import logging

from router.connection import Connection
from wire.errors import TwinfangError
from wire.generation import ServerInfo, SetDraining
from wire.rpc import SET_DRAINING, call

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class Drain:
    """Draining is a state of the server, so that all routers see it; a new life of it is told again."""

    def __init__(self, connection: Connection) -> None:
        self.is_draining = False
        self._connection = connection
        self._incarnation = ""
        self._untold: bool | None = None
        """What an operator wants and the server does not know yet."""

    def wish(self, is_draining: bool) -> None:
        """Counts for this router from now on; :meth:`tell` has to follow once the server can be reached."""
        self.is_draining = self._untold = is_draining

    async def tell(self, *, lets_go: bool = False) -> bool:
        """Tells the server what it does not know yet. False: it could not be told, and is when it appears."""
        wanted = self._untold
        if wanted is None:
            return True
        try:
            message = SetDraining(wanted, lets_go)
            await call(self._connection.channel, SET_DRAINING, message, timeout_s=TIMEOUT_S)
        except TwinfangError as error:
            log.warning("server %s was not told to drain or to serve: %s", self._connection.address, error)
            return False
        if self._untold == wanted:
            self._untold = None
        return True

    def appeared(self, info: ServerInfo) -> None:
        """The server has said who it is, as it does again and again."""
        is_new = info.incarnation != self._incarnation
        self._incarnation = info.incarnation
        if is_new and self.is_draining and not info.is_draining:
            self._untold = True
        self.heard(info.is_draining)

    def heard(self, is_draining: bool) -> None:
        """What the server says; maybe another router's operator wanted it."""
        if self._untold is None:
            self.is_draining = is_draining
