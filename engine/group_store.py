"""The store at an address that all processes of a group are told: there they learn the rest."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wire.errors import ConfigError


@dataclass(frozen=True)
class GroupStore:
    """Where it is, and who opens it."""

    address: str = ""
    """``host:port``"""
    flag: str = "--data-parallel-address"
    """By which the address is given, for messages."""
    is_own: bool = True
    """Whether the group's first process opens it; False: it is there, a launcher's."""
    life: str = ""
    """What tells this start of the group from earlier ones in a store that outlives them."""

    def open(self, *, is_first: bool, timeout_s: float) -> Store:
        """``timeout_s`` is how long it is waited for, and then for each of its entries.

        Raises :class:`ConfigError` for an address where nobody can listen, or nobody answers.
        """
        host, _, port = self.address.rpartition(":")
        opens, timeout = is_first and self.is_own, timedelta(seconds=timeout_s)
        try:
            store = TCPStore(
                host.strip("[]"), int(port), is_master=opens, timeout=timeout, wait_for_workers=False
            )
        except (dist.DistError, RuntimeError) as error:
            what = "can't be listened on" if opens else "is not answered"
            raise ConfigError(
                f"{self.flag} {self.address} {what}: {first_line(error)}; rank 0 listens there, on "
                "a port that is free and that all ranks reach"
            ) from error
        return PrefixStore(f"twinfang/{self.life}", store)

    def listen(self, backlog: int) -> socket.socket:
        """A socket on a port that is free, at the address by which this host reaches the store's.

        So it is one that is reached from there.
        """
        host, _, port = self.address.rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            own = str(probe.getsockname()[0])
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, 0), family=family, backlog=backlog)


NO_STORE = GroupStore()
"""Of a process that is alone."""


def publish(store: Store, key: str, listening: socket.socket) -> None:
    """Tells where this process listens."""
    host, port = listening.getsockname()[:2]
    store.set(key, f"{host} {port}")


def published(store: Store, key: str) -> tuple[str, int]:
    """Where another does; waits until it has told."""
    host, port = store.get(key).decode().split(" ")
    return host, int(port)


def first_line(error: BaseException) -> str:
    """What an error of torch's store says without its stack."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
