"""The sockets that a router's processes listen on."""

import socket

import pytest

from router.http.sockets import LOOPBACK, kept_socket, shared_socket
from twinfang.stack.ports import free_ports


def test_a_kept_port_is_for_this_users_processes_alone():
    """Linux lets another user's process have a port that is bound with SO_REUSEADDR and not listened on. It
    lets nobody have one that is shared by SO_REUSEPORT, except processes of the same user that do so too."""
    (port,) = free_ports(1)
    with kept_socket(port), socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))
        for _ in range(2):  # a process restarts
            with shared_socket(LOOPBACK, port) as own:
                own.listen()
                socket.create_connection((LOOPBACK, port)).close()
