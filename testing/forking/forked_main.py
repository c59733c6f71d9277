"""What a forked process of a test does: ``GROUP MODULE ARGUMENTS --log FD`` runs the module in that process
group. What it says goes to the log. A stack's own fork server is forked too, and need not import anything."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from typing import NoReturn

from testing.forking.forked_process import ForkedProcess
from twinfang.forking.loop import num_threads
from twinfang.forking.process import ForkProcess
from twinfang.forking.title import show_command_line

_start_anew = ForkProcess.start


def main() -> None:
    _, group, module, *arguments, flag, log = sys.argv
    assert flag == "--log", sys.argv
    os.setpgid(0, int(group))
    for stream in (1, 2):
        os.dup2(int(log), stream)
    os.close(int(log))
    ForkProcess.start = _start_forked  # type: ignore[method-assign]
    sys.argv = ["", *arguments]
    show_command_line([sys.executable, "-m", module, *arguments])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _start_forked(module: str) -> ForkProcess | None:
    """Does what :meth:`ForkProcess.start` does, by a fork of this process if it has no other thread."""
    if num_threads() > 1:
        return _start_anew(module)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _serve_forks(module, theirs.detach())
    ours.setblocking(False)
    return ForkProcess(ForkedProcess(pid), ours)


def _serve_forks(module: str, fd: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        show_command_line([sys.executable, "-m", module, str(fd)])
        importlib.import_module(module).main(fd)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
