"""The store of a group, torch's key-value server. Every process is given the store's address, and finds the
other processes' addresses in the store."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wire.errors import ConfigError
from wire.http.address import is_loopback
from wire.tls.identity_files import IdentityFiles

if TYPE_CHECKING:
    from wire.tls.identity import Identity

log = logging.getLogger(__name__)

OWN_NAME_TIMEOUT_S = 60.0
"""How long a host waits until its own name can be resolved. In a cluster the name is published only after the
host has started."""
NAME_POLL_S = 1.0


@dataclass(frozen=True)
class GroupStore:
    """Where the store is, and who opens it."""

    address: str = ""
    """``host:port``"""
    setting: str = "data_parallel.store"
    """The setting that has the address, for messages."""
    is_own: bool = True
    """Whether the group's first process opens the store; False: a launcher has opened it."""
    life: str = ""
    """Name of this start of the group. In a store that outlives the group, it separates the entries of this
    start from those of earlier starts."""
    identity: IdentityFiles | None = None
    """Files for mutual TLS between the group's processes. None: the store and the links are in clear."""

    def open(self, *, is_first: bool, timeout_s: float) -> Store:
        """Opens the store, or connects to it. Waits up to ``timeout_s``. Later, a read waits up to the same
        time for an entry that does not exist yet.

        Raises :class:`ConfigError` if the address can't be resolved, if this process can't listen there, or
        if nobody answers.
        """
        host, _, port = self.address.rpartition(":")
        opens, timeout = is_first and self.is_own, timedelta(seconds=timeout_s)
        self._await_name(min(timeout_s, OWN_NAME_TIMEOUT_S) if opens else timeout_s)
        try:
            store = self._store(host.strip("[]"), int(port), opens=opens, timeout=timeout)
        except (dist.DistError, RuntimeError) as error:
            what = "can't be listened on" if opens else "is not answered"
            raise ConfigError(
                f"`{self.setting}` {self.address} {what}: {first_line(error)}; rank 0 listens there: give an "
                "address of its host, and a free port that all ranks can reach"
            ) from error
        return PrefixStore(f"twinfang/{self.life}", store)

    def _store(self, host: str, port: int, *, opens: bool, timeout: timedelta) -> Store:
        identity = self.own_identity()
        if identity is None:
            return TCPStore(host, port, is_master=opens, timeout=timeout, wait_for_workers=False)
        if self.life:
            raise ConfigError(
                f"`{self.setting}` {self.address} is a launcher's store, which has no TLS: give another "
                "address, at which rank 0 then opens a store of its own"
            )
        from engine.group.tls_store import open_store  # only with TLS, since its library takes long to import

        store = open_store((host, port), identity, opens=opens, timeout=timeout)
        _KEPT.append(store)
        return store

    def own_identity(self) -> Identity | None:
        """Returns who this process is to the others; None without TLS. The files are read now: links are made
        once, when the group meets. Raises :class:`ConfigError`."""
        if self.identity is None:
            return None
        from wire.tls.identity import Identity

        return Identity(self.identity, "server")

    def _await_name(self, timeout_s: float) -> None:
        host, _, port = self.address.rpartition(":")
        deadline_s, has_told = time.monotonic() + timeout_s, False
        while True:
            try:
                socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
                return
            except OSError as error:
                what = f"`{self.setting}` {self.address} can't be resolved: {error.strerror}"
                if time.monotonic() > deadline_s:
                    raise ConfigError(f"{what}; give the address of the group's first host") from error
                if not has_told:
                    log.warning("%s; trying again for %g s", what, timeout_s)
                    has_told = True
            time.sleep(NAME_POLL_S)

    def listen(self, backlog: int) -> socket.socket:
        """Listens on a free port, at the address from which this host reaches the store's host.

        So the store's host can reach that address too.
        """
        host, _, port = self.address.rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            own = str(probe.getsockname()[0])
        if ipaddress.ip_address(own).is_loopback and not is_loopback(host):
            log.warning(
                "`%s` %s is a loopback address on this host, which other hosts can't reach; if the group has "
                "several hosts, give the host's address in the network",
                *(self.setting, self.address),
            )
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, 0), family=family, backlog=backlog)


_KEPT: list[Store] = []
"""Stores written in Python. torch keeps only their C++ part, for the whole life of the process groups."""

NO_STORE = GroupStore()
"""Stands for the store of a process that is alone and has none."""


def publish(store: Store, key: str, listening: socket.socket) -> None:
    """Publishes the address at which this process listens."""
    host, port = listening.getsockname()[:2]
    store.set(key, f"{host} {port}")


def published(store: Store, key: str) -> tuple[str, int]:
    """Returns the address at which another process listens; waits until that process has published it."""
    host, port = store.get(key).decode().split(" ")
    return host, int(port)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error of torch's store, which leaves out the stack trace."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
