"""A pipe by which a child learns that it is its turn to start.

A child imports its modules at once and then waits for its turn. So a router, which starts after the
servers, is prepared while they load.
"""

from __future__ import annotations

import os
from types import TracebackType


def wait_for_turn(fd: int) -> None:
    """Returns once the supervisor has closed the pipe's other end, or has ended."""
    while os.read(fd, 1):
        pass
    os.close(fd)


class Turn:
    """The supervisor's side. Leaving it also opens the turn."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        self._is_open = False

    def open(self) -> None:
        """Lets all processes that wait with :attr:`fd` start."""
        if not self._is_open:
            self._is_open = True
            os.close(self._end)

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()
        os.close(self.fd)
