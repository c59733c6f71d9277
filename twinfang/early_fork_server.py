"""Starts the fork server of ``up`` and ``serve`` before this process imports its own modules.

The fork server's imports take longest: the sooner they begin, the sooner a stack is ready. Before the flags
can be read, 0.1 s of imports pass. The command's name says enough, unless a flag decides whether servers are
forked, or what the fork server finds in its environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from twinfang.forking.process import ForkProcess
from twinfang.grpc_settings import set_grpc_settings
from twinfang.stack.cores import may_use_gpu

FORK_SERVER = "twinfang.fork_server"
"""The module of a stack's fork server."""
COMMANDS = ("up", "serve")
DECIDING = ("-h", "--help", "--device", "--tls")
"""How the flags begin for which the fork server is not started before they are read."""
DECIDING_VARIABLES = ("TWINFANG_DEVICE", "TWINFANG_TLS")

_started: list[ForkProcess] = []
"""The process that was started and not taken yet, if there is one."""


def start_early(arguments: Sequence[str]) -> None:
    """Starts the fork server if this command line certainly needs it. :func:`end_early` has to be called."""
    if needs_fork_server(arguments, os.environ) and not may_use_gpu("auto"):
        set_grpc_settings()
        if (started := ForkProcess.start(FORK_SERVER)) is not None:
            _started.append(started)


def needs_fork_server(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether a command line needs the fork server if there is no GPU, as far as can be seen without
    reading its flags."""
    return (
        bool(arguments)
        and arguments[0] in COMMANDS
        and not any(argument.startswith(DECIDING) for argument in arguments)
        and not any(environment.get(name) for name in DECIDING_VARIABLES)
    )


def take_early() -> ForkProcess | None:
    """Returns the process that was started early. The caller has to end it."""
    return _started.pop() if _started else None


def end_early() -> None:
    """Ends the process if nobody has taken it, for example because a flag is wrong."""
    if (started := take_early()) is not None:
        started.connection.close()
        started.end()
