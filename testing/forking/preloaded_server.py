"""The fork server of tests: ``python -m testing.forking.preloaded_server FD`` (:mod:`twinfang.forking`)."""

from __future__ import annotations

import importlib
import socket
import sys

from twinfang.commands.before_torch import prepare_libraries
from twinfang.fork_server import IMPORTED as FOR_SERVERS
from twinfang.forking.loop import serve_forks
from twinfang.grpc_settings import set_grpc_settings

IMPORTED = (
    *FOR_SERVERS,
    *("engine.models.inherited", "router.main", "router.resources", "twinfang.commands.up"),
)
"""What stacks, servers and routers import, by name: only once the libraries are prepared."""


def main(fd: int) -> None:
    """Serves the process at the other end of the socket ``fd``."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    set_grpc_settings()
    prepare_libraries()
    for name in IMPORTED:
        importlib.import_module(name)
    serve_forks(connection, prepare=lambda task: None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
