"""Finds out, from flags or from a launcher's variables, which host of a tensor-parallel server this host is.

| who starts processes | flags or variables |
|---|---|
| the command line | ``--node-rank``, ``--dist-init-addr`` |
| LeaderWorkerSet | ``LWS_WORKER_INDEX``, ``LWS_GROUP_SIZE``, ``LWS_LEADER_ADDRESS`` |
| torchrun, one process a host | ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT`` |

The first row that has a value counts, and only if ``--nnodes`` asks for several hosts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from twinfang.stack.launchers import LeaderWorkerSet, Torchrun
from wire.errors import ConfigError

if TYPE_CHECKING:
    from engine.group.nodes import Nodes
    from wire.tls.identity_files import IdentityFiles


def find_nodes(
    values: argparse.Namespace, environment: Mapping[str, str], identity: IdentityFiles | None = None
) -> Nodes:
    """Returns the number of this host, the number of hosts, and the store at which they meet, with
    ``identity``.

    Raises :class:`ConfigError` for flags and variables that are missing or contradict one another.
    """
    from engine.group.nodes import ONE_NODE, Nodes
    from engine.group.store import GroupStore

    size, rank, address = values.nnodes, values.node_rank, values.dist_init_addr
    flag, setting = "--dist-init-addr", "nodes.store"
    if size == 1:
        for name, value in (("--node-rank", rank), (flag, address)):
            if value is not None:
                raise ConfigError(f"{name} {value} is for a server on several hosts: give --nnodes too")
        return ONE_NODE
    if rank is not None:
        if address is None:
            raise ConfigError(
                f"--node-rank {rank} has to find the other hosts: give {flag}, the HOST:PORT on which host 0 "
                "listens, the same on all hosts"
            )
        return Nodes(rank, size, GroupStore(address, setting, identity=identity))
    if (pod := LeaderWorkerSet.find(environment)) is not None:
        _check_size("LWS_GROUP_SIZE", pod.num_pods, size)
        return Nodes(pod.index, size, GroupStore(address or pod.address(flag), setting, identity=identity))
    if (process := Torchrun.find(environment)) is not None:
        _check_size("WORLD_SIZE", process.world_size, size)
        if address is not None:
            return Nodes(process.rank, size, GroupStore(address, setting, identity=identity))
        agents = process.has_store
        store = GroupStore(process.address(flag), setting, not agents, process.life, identity)
        return Nodes(process.rank, size, store)
    raise ConfigError(
        f"--nnodes {size}: nothing says which of them this is; give --node-rank and {flag}, or start it by "
        "torchrun or LeaderWorkerSet"
    )


def _check_size(name: str, said: int, size: int) -> None:
    if said != size:
        raise ConfigError(f"--nnodes is {size} and the launcher's {name} {said}: start one process a host")
