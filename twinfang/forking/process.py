"""The process of a fork server, as the process that starts it sees it. Imports little, so that it can be
started before anything else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinfang.forking.title import ROOM

if TYPE_CHECKING:
    from twinfang.launch import RunningProcess


@dataclass(frozen=True)
class ForkProcess:
    """A running fork server, and our end of the connection to it."""

    process: RunningProcess
    connection: socket.socket

    @classmethod
    def start(cls, module: str) -> ForkProcess | None:
        """Starts ``python -m MODULE FD``. Returns None if this system can't adopt a process that another one
        has forked."""
        if not hasattr(os, "pidfd_open"):  # only Linux has it
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), ROOM],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        ours.setblocking(False)
        return cls(process, ours)

    def end(self) -> None:
        """Ends the process."""
        self.process.terminate()
        self.process.wait()
