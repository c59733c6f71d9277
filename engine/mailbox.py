"""What the engine's thread says to an event loop, without handing it the interpreter.

``call_soon_threadsafe`` wakes the loop with a write to a socket. The write lets go of the interpreter's lock,
the loop's thread takes it to work on the message, and the engine waits for it to end: a sixth of a decode
step. Here the write keeps the lock. The loop gets it when the engine computes, and both go on at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable

_python = ctypes.PyDLL(None)  # calls keep the lock


class Mailbox:
    """Callbacks for an event loop, in order. Made and closed on the loop; posted to from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._is_told = False
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        loop.add_reader(self._reading, self._deliver)

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Runs ``callback`` on the loop; after :meth:`close` nothing happens."""
        self._letters.append((callback, args))
        if not self._is_told and self._writing >= 0:
            self._is_told = True
            _python.write(self._writing, b"\0", ctypes.c_size_t(1))

    def close(self) -> None:
        """No thread may be about to post."""
        if self._writing >= 0:
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            os.close(self._writing)
            self._reading = self._writing = -1

    def _deliver(self) -> None:
        os.read(self._reading, 4096)
        self._is_told = False  # whoever posts from here on writes again
        while self._letters:
            callback, args = self._letters.popleft()
            self._loop.call_soon(callback, *args)  # one that raises takes none along
