"""A data-parallel rank's place among the others, and how the ranks of a lockstep group find one another.

Rank 0 has a store at an address that all ranks are told. There they learn the group's secret and where each
process listens; then all are connected (:mod:`engine.group_mesh`) and are one process group of torch's:
``D`` data-parallel ranks of ``T`` tensor-parallel ranks each, process ``d * T + t``.
"""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engine.expert_parallel import ExpertParallel
from engine.group_mesh import GroupMesh, connect_all
from engine.tensor_parallel import START_TIMEOUT_S, TensorParallel, make_process_group
from wire.errors import ConfigError, DeadlineError
from wire.lockstep import Hello


@dataclass(frozen=True)
class DataParallel:
    """One rank among those that serve side by side; each is a server with a port of its own."""

    rank: int = 0
    size: int = 1
    address: str = ""
    """``host:port`` of the ranks' store."""
    local_rank: int = 0
    """Which of this host's ranks: it has this one's GPUs."""
    hosts_store: bool = True
    """Whether rank 0 opens the store; False: it is there, a launcher's."""
    life: str = ""
    """What tells this start of the group from earlier ones in a store that outlives them."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"--data-parallel-rank {self.rank} is none of --data-parallel-size {self.size} ranks: "
                f"they go from 0 to {self.size - 1}"
            )


ONLY_RANK = DataParallel()


def join_group(
    place: DataParallel,
    tp_rank: int,
    tp_size: int,
    device: torch.device,
    *,
    terms: dict[str, str],
) -> tuple[TensorParallel, GroupMesh]:
    """Meets all processes of the group, and waits until they are there.

    Raises :class:`ConfigError` for ``terms`` that differ between two ranks, and for an address that is none;
    :class:`DeadlineError` for ranks that do not come.
    """
    rank, size = place.rank * tp_size + tp_rank, place.size * tp_size
    names = [_name(one, tp_size) for one in range(size)]
    deadline_s = time.monotonic() + START_TIMEOUT_S
    store = _open_store(place, is_master=rank == 0)
    try:
        connections = _connect(store, place, rank, terms, names, deadline_s)
        make_process_group(PrefixStore("torch", store), rank, size, device)
        groups = [
            dist.new_group(list(range(first, first + tp_size))) if tp_size > 1 else None
            for first in range(0, size, tp_size)
        ]
    except (dist.DistStoreError, OSError, EOFError) as error:
        raise DeadlineError(
            f"the ranks of the group at {place.address} did not meet: {_first_line(error)}"
        ) from error
    mesh = GroupMesh(rank, connections, names=names, each=tp_size)
    experts = ExpertParallel(rank, size, tp_rank=tp_rank, tp_size=tp_size)
    return TensorParallel(tp_rank, tp_size, device, groups[place.rank], experts), mesh


def _connect(
    store: Store,
    place: DataParallel,
    rank: int,
    terms: dict[str, str],
    names: list[str],
    deadline_s: float,
) -> dict[int, socket.socket]:
    if rank == 0:
        store.set("secret", secrets.token_hex(16))
    hello = Hello(store.get("secret").decode(), rank, terms)
    host = _own_host(place.address)
    with socket.create_server((host, 0), family=_family(host), backlog=len(names)) as listening:
        store.set(f"address/{rank}", f"{host} {listening.getsockname()[1]}")

        def address(other: int) -> tuple[str, int]:
            there, port = store.get(f"address/{other}").decode().split(" ")
            return there, int(port)

        return connect_all(rank, listening, address, hello, names=names, deadline_s=deadline_s)


def _open_store(place: DataParallel, *, is_master: bool) -> Store:
    host, _, port = place.address.rpartition(":")
    timeout = timedelta(seconds=START_TIMEOUT_S)
    opens = is_master and place.hosts_store
    try:
        store = TCPStore(
            host.strip("[]"), int(port), is_master=opens, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError) as error:
        what = "can't be listened on" if opens else "is not answered"
        raise ConfigError(
            f"--data-parallel-address {place.address} {what}: {_first_line(error)}; rank 0 listens there, on "
            "a port that is free and that all ranks reach"
        ) from error
    return PrefixStore(f"twinfang/{place.life}", store)


def _own_host(address: str) -> str:
    """The address by which this host reaches ``address``, and so is reached by those there."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])  # sends nothing
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _name(process: int, tp_size: int) -> str:
    rank, tp_rank = divmod(process, tp_size)
    name = f"data-parallel rank {rank}"
    return name if tp_size == 1 else f"{name}, tensor-parallel rank {tp_rank}"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
