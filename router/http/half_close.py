"""A client that has said that it sends no more: it may wait for its answer, or have gone.

TCP tells the two apart only when something is written to the client: one that has gone answers with a reset.
So now and then something is written that means nothing to who waits.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

LOOK_INTERVAL_S = 0.1
FIRST_LOOK_S = 0.001
"""From a probe to the next look; each further pause is twice as long, up to ``LOOK_INTERVAL_S``. Most clients
that end their side have gone, and their reset is there after one round trip."""
FIRST_PROBE_S = 1.0
"""An answer that begins within that time is the first thing that the client sees."""
PROBE_INTERVAL_S = 5.0
MAX_UNKNOWN_S = 30.0
"""How long work goes on for a client that nothing may be written to: HTTP/1.0 knows no interim answers."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim answer may be sent at any time before the answer; clients skip it (RFC 9110, section 15.2)."""
COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk with a comment of server-sent events, which clients skip. Our chunked answers are all such."""


class HalfClose:
    """Watches a client that half-closed its connection, and aborts the connection of one that has gone.

    ``probe`` says what may be written now: empty while an answer is on its way, which does the same, and None
    where nothing may be. ``has_begun``: the client has been sent a part of its answer, and is probed at once.
    """

    def __init__(
        self, transport: asyncio.Transport, probe: Callable[[], bytes | None], *, has_begun: bool
    ) -> None:
        self._transport = transport
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)  # errors and hang-ups alone
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
