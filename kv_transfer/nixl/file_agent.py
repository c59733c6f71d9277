"""NIXL's POSIX backend: bytes between a buffer in host memory and files. One thread uses it.

All bytes go through the buffer, so the pages of host memory are never the target of a transfer: what is read
is checked before it is copied there, and a transfer that never ends keeps nothing but the buffer.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from numpy.typing import NDArray

from kv_transfer.nixl.agent import NIXL_ERRORS
from wire.errors import TransferError

PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
"""Pause between two looks at a transfer; it doubles each time."""
WRITE_PAUSE_S = 5e-4
"""The first one of a write, for which nobody waits. Each look takes the interpreter's lock."""


class FileAgent:
    """Moves bytes between one buffer and registered files."""

    def __init__(self, name: str, buffer_bytes: int) -> None:
        self.buffer: NDArray[np.uint8] = np.zeros(buffer_bytes, dtype=np.uint8)
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("POSIX", {})
        self._name = name
        self._address = self.buffer.ctypes.data
        self._memory = self._agent.register_memory([(self._address, buffer_bytes, 0, "")], "DRAM")
        self._files: dict[int, Any] = {}
        self._stuck: Any = None
        """A transfer that did not end in time. The buffer belongs to it until it ends."""

    def register(self, fd: int, num_bytes: int) -> None:
        """Makes the first bytes of an open file usable. Raises :class:`TransferError`."""
        try:
            self._files[fd] = self._agent.register_memory([(0, num_bytes, fd, "")], "FILE")
        except NIXL_ERRORS as error:
            raise TransferError(f"NIXL can't use a file: {error}") from error

    def forget(self, fd: int) -> None:
        """Ends the use of a file, before it is closed."""
        registered = self._files.pop(fd, None)
        if registered is not None:
            self._agent.deregister_memory(registered)

    def knows(self, fd: int) -> bool:
        return fd in self._files

    def read(self, fd: int, offset: int, num_bytes: int, deadline_s: float) -> None:
        """Fills the buffer's first bytes. Raises :class:`TransferError`."""
        self._move("READ", fd, offset, num_bytes, deadline_s)

    def write(self, fd: int, offset: int, num_bytes: int, deadline_s: float) -> None:
        """Writes the buffer's first bytes. Raises :class:`TransferError`."""
        self._move("WRITE", fd, offset, num_bytes, deadline_s)

    def _move(
        self, operation: Literal["READ", "WRITE"], fd: int, offset: int, num_bytes: int, deadline_s: float
    ) -> None:
        if self.is_stuck:
            raise TransferError("an earlier transfer of the file cache has not ended yet")
        try:
            memory = self._agent.get_xfer_descs([(self._address, num_bytes, 0)], "DRAM")
            file = self._agent.get_xfer_descs([(offset, num_bytes, fd)], "FILE")
            handle = self._agent.initialize_xfer(operation, memory, file, self._name)
            pause_s = PAUSE_S if operation == "READ" else WRITE_PAUSE_S
            state = self._wait(handle, self._agent.transfer(handle), pause_s, time.monotonic() + deadline_s)
            if state == "PROC":
                self._stuck = handle
                raise TransferError(f"a {operation} of {num_bytes} bytes took more than {deadline_s:g} s")
            self._agent.release_xfer_handle(handle)
        except NIXL_ERRORS as error:
            raise TransferError(f"a {operation} of {num_bytes} bytes failed: {error}") from error
        if state != "DONE":
            raise TransferError(f"a {operation} of {num_bytes} bytes failed")

    def _wait(self, handle: Any, state: str, pause_s: float, until_s: float) -> str:
        while state == "PROC" and time.monotonic() < until_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        return state

    @property
    def is_stuck(self) -> bool:
        """Whether a transfer that did not end in time still owns the buffer."""
        if self._stuck is not None:
            try:
                if self._agent.check_xfer_state(self._stuck) != "PROC":
                    self._agent.release_xfer_handle(self._stuck)
                    self._stuck = None
            except NIXL_ERRORS:
                self._stuck = None
        return self._stuck is not None

    def close(self) -> None:
        for fd in list(self._files):
            self.forget(fd)
        self._agent.deregister_memory(self._memory)
        del self._agent
