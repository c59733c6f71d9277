"""Servers whose handshakes were damaged. They are not asked again for a while. Does no I/O."""

from __future__ import annotations

import logging
from collections.abc import Callable

from wire.errors import HandshakeError
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

QUARANTINE_S = 30.0
"""How long a server stays in quarantine. A wrong bit on the way is over by then. A server with bad memory is
in quarantine again after its next handshake."""
MAX_SERVERS = 1024
"""How many servers are remembered; then the one that came first is forgotten."""


class PeerQuarantine:
    """The servers in quarantine, by address. A ticket of a later incarnation does not count as theirs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._servers: dict[str, tuple[str, float]] = {}

    def put(self, address: str, incarnation: str, error: HandshakeError) -> None:
        """Puts this incarnation of a server into quarantine, and says so in the log."""
        self._servers.pop(address, None)
        while len(self._servers) >= MAX_SERVERS:
            del self._servers[next(iter(self._servers))]
        self._servers[address] = (incarnation, self._clock() + QUARANTINE_S)
        kind = f"server {address} is in quarantine for {QUARANTINE_S:.0f} s, nothing is read from it"
        lines.write(logging.WARNING, kind, "%s: %s", kind, error.message)

    def left_s(self, address: str, incarnation: str | None = None) -> float:
        """Returns the seconds until a server may be asked again; 0 if it is not in quarantine.

        Without ``incarnation``, any incarnation counts.
        """
        quarantined, until_s = self._servers.get(address, ("", 0.0))
        left_s = until_s - self._clock()
        if left_s <= 0:
            self._servers.pop(address, None)
            return 0.0
        return left_s if incarnation in (None, quarantined) else 0.0

    def check(self, address: str, incarnation: str) -> None:
        """Raises :class:`HandshakeError` if this incarnation of the server is in quarantine."""
        left_s = self.left_s(address, incarnation)
        if left_s > 0:
            raise HandshakeError(
                f"the server at {address} is in quarantine for {left_s:.0f} s more, "
                "because its handshake was damaged",
                cause="metadata",
            )
