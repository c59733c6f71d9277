"""The fork server's side: prepares, then forks a process for each request.

A forked process runs a Python module as ``python -m MODULE ARGUMENTS`` does, with the given environment and
in a process group of its own. Its parent is not the fork server but the process that asked: the fork server
forks a process that forks it and ends at once. So signals, exit codes and waiting are the same as for a
process that was started as usual.

A process may be forked only while it has a single thread. A lock that another thread holds would never be
released in the child. So nothing that starts threads may run here: no gRPC call, no NIXL, no parallel loop.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from twinfang.forking.title import show_command_line

MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS = 8
_ADOPTION_INTERVAL_S = 0.0002


def serve_forks(connection: socket.socket, prepare: Callable[[Any], None]) -> NoReturn:
    """Calls ``prepare`` and forks as requested, until the other side of ``connection`` is closed."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_FDS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "prepare" in request:
            prepare(request["prepare"])
        else:
            _answer(connection, request, fds)


def num_threads() -> int:
    """Returns the number of this process's threads, including those that Python does not know."""
    return len(list(Path("/proc/self/task").iterdir()))


def _answer(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    """Forks a process and sends its pid, or why it was not forked. SIGTERM waits until the answer is sent, so
    that the other side knows of every process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if (threads := num_threads()) > 1:
        reply: dict[str, Any] = {"error": f"it has {threads} threads"}
    else:
        reply = {"pid": _fork(connection, request, fds)}
    for fd in fds:
        os.close(fd)
    connection.sendall(json.dumps(reply).encode())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _fork(connection: socket.socket, request: dict[str, Any], fds: Sequence[int]) -> int:
    """Forks twice, and returns the pid of the process that goes on. It has a new parent by then."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        first_parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.close(writer)
            connection.close()
            _wait_for_adoption(first_parent)
            _become(request, fds)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(between, 0)
    with os.fdopen(reader) as answer:
        return int(answer.read())


def _wait_for_adoption(first_parent: int) -> None:
    """Waits until this process has its new parent. A program may ask to be told when its parent ends
    (PR_SET_PDEATHSIG), and the first parent is about to end."""
    while os.getppid() == first_parent:
        time.sleep(_ADOPTION_INTERVAL_S)


def _become(request: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """Runs the requested module in this process, and ends with it."""
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.environ.clear()
        os.environ.update(request["environment"])
        arguments = list(request["arguments"])
        for flag, fd in zip(request["fd_flags"], fds, strict=True):
            arguments += [flag, str(fd)]
        sys.argv = ["", *arguments]
        show_command_line([sys.executable, "-m", request["module"], *arguments])
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
