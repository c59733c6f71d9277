"""Messages from the engine's thread to an event loop, sent without releasing the interpreter's lock.

``call_soon_threadsafe`` wakes the loop with a write to a socket. That write releases the interpreter's lock.
The loop's thread then takes the lock to handle the message, and the engine waits until that is done. This
wait took a sixth of a decode step. Here the write keeps the lock. The loop gets the lock when the engine
computes on the device, so that both threads work at the same time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable

_python = ctypes.PyDLL(None)  # calls through PyDLL keep the interpreter's lock


class Mailbox:
    """Callbacks that an event loop runs in order. Make and close the mailbox on the loop's thread; any thread
    may post."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._is_told = False
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        loop.add_reader(self._reading, self._deliver)

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """Runs ``callback`` on the loop; does nothing after :meth:`close`."""
        self._letters.append((callback, args))
        if not self._is_told and self._writing >= 0:
            self._is_told = True
            _python.write(self._writing, b"\0", ctypes.c_size_t(1))

    def close(self) -> None:
        """Closes the mailbox. No thread may post at the same time."""
        if self._writing >= 0:
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            os.close(self._writing)
            self._reading = self._writing = -1

    def _deliver(self) -> None:
        os.read(self._reading, 4096)
        self._is_told = False  # from here on the next post writes to the pipe again
        while self._letters:
            callback, args = self._letters.popleft()
            try:  # here and now: with ``call_soon`` each step would cost one more turn of the loop
                callback(*args)
            except Exception as error:  # must not stop the other callbacks
                what = "a callback from another thread failed"
                self._loop.call_exception_handler({"message": what, "exception": error})
