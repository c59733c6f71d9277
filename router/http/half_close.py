"""Clients that have closed their sending side: such a client may wait for its answer, or may have gone.

TCP shows the difference only if something is written to the client: a client that has gone answers with a
reset. So the router sends probes: from time to time it writes something that a waiting client ignores.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

LOOK_INTERVAL_S = 0.1
FIRST_LOOK_S = 0.001
"""The time from a probe until the router looks whether a reset has arrived. Each further pause between two
looks is twice as long, up to ``LOOK_INTERVAL_S``. The first look is early because most clients that close
their side have gone, and then their reset arrives after one round trip."""
FIRST_PROBE_S = 1.0
"""The time until the first probe, if the answer has not begun. A client that gets its answer within this time
sees no probe."""
PROBE_INTERVAL_S = 5.0
MAX_UNKNOWN_S = 30.0
"""How long work continues for a client that can't be probed, as with HTTP/1.0, which has no interim
answers."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim answer may be sent at any time before the answer; clients skip it (RFC 9110, section 15.2)."""
COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk with a comment of server-sent events, which clients skip. All chunked answers of the router are
event streams."""


class HalfClose:
    """Watches a client that half-closed its connection, and aborts the connection if the client has gone.

    ``probe`` returns the bytes that may be written as a probe now. Empty bytes: no probe is needed, because
    the answer is being written, which causes a reset just as well. None: nothing may be written now.
    ``has_begun`` says that a part of the answer was sent; then the client is probed at once.
    """

    def __init__(
        self, transport: asyncio.Transport, probe: Callable[[], bytes | None], *, has_begun: bool
    ) -> None:
        self._transport = transport
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)  # report only errors and hang-ups
        self._next_probe = self._loop.time() + (0.0 if has_begun else FIRST_PROBE_S)
        self._gives_up = self._loop.time() + MAX_UNKNOWN_S
        self._pause_s = LOOK_INTERVAL_S
        self._timer: asyncio.Handle = self._loop.call_soon(self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._transport.is_closing():
            return
        if self._poll.poll(0) or now >= self._gives_up:
            self._transport.abort()
            return
        if now >= self._next_probe and (data := self._probe()) is not None:
            if data:
                self._transport.write(data)
            self._next_probe = now + PROBE_INTERVAL_S
            self._gives_up = now + MAX_UNKNOWN_S
            self._pause_s = FIRST_LOOK_S
        self._timer = self._loop.call_later(self._pause_s, self._look)
        self._pause_s = min(2 * self._pause_s, LOOK_INTERVAL_S)
