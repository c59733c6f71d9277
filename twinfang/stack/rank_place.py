"""Finds out, from flags or a launcher's variables, which data-parallel ranks of a decode server run here.

| who starts processes | flags or variables | ranks of this process |
|---|---|---|
| the command line | ``--data-parallel-rank`` | this rank |
| LeaderWorkerSet | ``LWS_WORKER_INDEX``, ``LWS_GROUP_SIZE``, ``LWS_LEADER_ADDRESS`` | its pod's equal part |
| torchrun | ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT`` | one |
| nobody | | all, on this host |

The first row that has a value counts. Variables are read only if ``--data-parallel-size`` asks for several
ranks: a plain server does not become a rank because a launcher started it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from twinfang.stack.launchers import LeaderWorkerSet, Torchrun
from wire.errors import ConfigError

_ADDRESS_FLAG = "--data-parallel-address"


@dataclass(frozen=True)
class RankPlace:
    """Ranks ``first`` to ``first + count - 1`` of ``size``."""

    size: int = 1
    first: int = 0
    count: int = 1
    address: str = ""
    """The address at which the ranks meet; empty if rank 0 is on this host, or if the ranks share nothing."""
    local_rank: int = 0
    port_offset: int = 0
    """Added to the ports of this process, because several processes are started with the same command
    line."""
    hosts_store: bool = True
    """Whether rank 0 listens at the address; False: the launcher listens there."""
    life: str = ""
    """Distinguishes this start from other starts if the launcher's store outlives each start."""

    @classmethod
    def find(cls, values: argparse.Namespace, environment: Mapping[str, str]) -> RankPlace:
        """Returns the ranks that this process runs.

        Raises :class:`ConfigError` for flags and variables that are missing or contradict one another.
        """
        size, rank = values.data_parallel_size, values.data_parallel_rank
        if size == 1:
            for flag, value in (("rank", rank), ("address", values.data_parallel_address)):
                if value is not None:
                    raise ConfigError(
                        f"--data-parallel-{flag} {value} is for several ranks: give --data-parallel-size too"
                    )
            return cls()
        address = values.data_parallel_address
        if rank is not None:
            place = cls(size, rank, 1, address or "", values.local_rank)
        elif (pod := LeaderWorkerSet.find(environment)) is not None:
            place = _of_leader_worker_set(size, address, pod)
        elif (process := Torchrun.find(environment)) is not None:
            place = _of_torchrun(size, address, process)
        else:
            return cls(size, 0, size, address or "")
        if place.first + place.count > size:
            raise ConfigError(
                f"data-parallel rank {place.first + place.count - 1} is not within --data-parallel-size "
                f"{size}: ranks go from 0 to {size - 1}"
            )
        if values.enable_expert_parallel and not place.address:
            raise ConfigError(
                f"--data-parallel-rank {rank} shares experts with other ranks: give --data-parallel-address, "
                "the HOST:PORT on which rank 0 listens, the same on all ranks"
            )
        return place


ONLY_PLACE = RankPlace()
"""The place of a single server without other ranks."""


def _of_leader_worker_set(size: int, address: str | None, pod: LeaderWorkerSet) -> RankPlace:
    if pod.num_pods < 1 or size % pod.num_pods:
        raise ConfigError(
            f"--data-parallel-size {size} can't be divided among the {pod.num_pods} pods of the "
            "LeaderWorkerSet (LWS_GROUP_SIZE): choose a multiple"
        )
    count = size // pod.num_pods
    return RankPlace(size, pod.index * count, count, address or pod.address(_ADDRESS_FLAG))


def _of_torchrun(size: int, address: str | None, process: Torchrun) -> RankPlace:
    if process.world_size != size:
        raise ConfigError(
            f"--data-parallel-size is {size} and torchrun's WORLD_SIZE {process.world_size}: start one "
            "process a rank"
        )
    is_agents = address is None and process.has_store
    return RankPlace(
        size,
        process.rank,
        1,
        address or process.address(_ADDRESS_FLAG),
        local_rank=process.local_rank,
        port_offset=process.local_rank,
        hosts_store=not is_agents,
        life=process.life if is_agents else "",
    )
