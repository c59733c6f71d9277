"""How the processes of a group find one another: they read addresses in a store, then connect directly."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from engine.group.connections import ONE_RELEASE, connect_all
from engine.group.mesh import GroupMesh
from engine.group.store import GroupStore, first_line, publish, published
from engine.parallel.tensor_parallel import START_TIMEOUT_S, make_process_group
from wire.errors import DeadlineError, WireError
from wire.messages.group import Hello


def meet(
    place: GroupStore,
    rank: int,
    device: torch.device,
    *,
    names: Sequence[str],
    each: int,
    terms: dict[str, str],
    timeout_s: float = START_TIMEOUT_S,
) -> GroupMesh:
    """Waits until all processes are there and connected, and form torch's default process group.

    ``names`` are the names of all processes, for messages. ``each``: see :class:`GroupMesh`. ``terms`` are
    values that must be the same on all processes. Raises :class:`ConfigError` if they differ between two
    processes or the store's address is invalid, and :class:`DeadlineError` if some processes are not there in
    time.
    """
    deadline_s = time.monotonic() + timeout_s
    store = place.open(is_first=rank == 0, timeout_s=timeout_s)
    try:
        if rank == 0:
            store.set("secret", secrets.token_hex(16))
        hello = Hello(store.get("secret").decode(), rank, ONE_RELEASE | terms, names[rank])
        with place.listen(len(names)) as listening:
            publish(store, f"address/{rank}", listening)
            connections = connect_all(
                rank,
                listening,
                lambda other: published(store, f"address/{other}"),
                hello,
                names=names,
                deadline_s=deadline_s,
                identity=place.own_identity(),
            )
        make_process_group(PrefixStore("torch", store), rank, len(names), device)
    except (dist.DistError, OSError, EOFError, WireError) as error:
        raise DeadlineError(
            f"the ranks of the group at {place.address} did not meet: {first_line(error)}"
        ) from error
    return GroupMesh(rank, connections, names=names, each=each)
