"""Starts stacks, servers and routers for tests. Where it can, it forks them from a process that has imported
everything: imports take most of a start's processor time, and tests start hundreds of processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import BinaryIO

from testing.conditions import TIMEOUT_S
from testing.forking import forked_main, preloaded_server
from testing.forking.forked_process import ForkedProcess
from twinfang.forking.client import MAX_REPLY_BYTES, adopting
from twinfang.forking.process import ForkProcess
from twinfang.launch import RunningProcess
from twinfang.stack.cores import may_use_gpu

_turns = threading.Lock()


def start_process(
    module: str,
    arguments: Sequence[str],
    *,
    log: BinaryIO,
    environment: Mapping[str, str],
    fds: Mapping[str, int] = MappingProxyType({}),
    prefix: Sequence[str] = (),
    own_group: bool = False,
) -> RunningProcess:
    """Starts ``python -m MODULE ARGUMENTS`` and does not wait for it. What it says is written to ``log``.

    Each flag in ``fds`` is added, with the number that its file descriptor has in the new process. ``prefix``
    is a command that runs it elsewhere. Ctrl-C reaches it, as it reaches this process, unless it gets a
    process group of its own. A variable that Python reads when it starts, like PYTHONPATH, can't be given:
    the process may be forked.
    """
    variables = {**os.environ, **environment}
    if not prefix and _may_be_forked(arguments, environment):
        with _turns:  # who adopts an orphan is a setting of the whole process
            if (server := _preloaded()) is not None:
                group = 0 if own_group else os.getpgid(0)
                words = [str(group), module, *arguments]
                return server.fork(words, {**fds, "--log": log.fileno()}, variables)
    flags = chain(*((flag, str(fd)) for flag, fd in fds.items()))
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", module, *arguments, *flags],
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=variables,
        pass_fds=tuple(fds.values()),
        process_group=0 if own_group else None,
    )


def _may_be_forked(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """With TLS, gRPC reads settings of the process when it is imported. The GPU's libraries do so too."""
    return not (
        may_use_gpu("auto")
        or any(argument.startswith("--tls") for argument in arguments)
        or "TWINFANG_TLS" in environment
    )


class _PreloadedServer:
    def __init__(self, started: ForkProcess) -> None:
        self._connection = started.connection
        self._connection.settimeout(TIMEOUT_S)

    def fork(
        self, arguments: Sequence[str], fds: Mapping[str, int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        request = {
            "module": forked_main.__name__,
            "arguments": list(arguments),
            "environment": dict(environment),
            "fd_flags": list(fds),
        }
        with adopting():
            socket.send_fds(self._connection, [json.dumps(request).encode()], list(fds.values()))
            reply = json.loads(self._connection.recv(MAX_REPLY_BYTES) or b'{"error": "it has ended"}')
        assert "pid" in reply, f"the fork server of tests: {reply['error']}"
        return ForkedProcess(reply["pid"])


@cache
def _preloaded() -> _PreloadedServer | None:
    """Starts the fork server. It ends with this process, whose end of the connection is then closed."""
    started = ForkProcess.start(preloaded_server.__name__)
    return None if started is None else _PreloadedServer(started)
