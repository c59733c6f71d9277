"""Which of a decode server's data-parallel ranks run here: from flags, or from what a launcher says.

| who starts processes | says | ranks of this process |
|---|---|---|
| the command line | ``--data-parallel-rank`` | that one |
| LeaderWorkerSet | ``LWS_WORKER_INDEX``, ``LWS_GROUP_SIZE``, ``LWS_LEADER_ADDRESS`` | as many in each pod |
| torchrun | ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT`` | one |
| nobody | | all, on this host |

The first that says anything counts. Variables are looked at only where ``--data-parallel-size`` asks for
ranks: a plain server does not become a rank because of where it was started.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from wire.errors import ConfigError

LEADER_PORT = 8290
"""Of rank 0's store where LeaderWorkerSet tells the leader's name alone."""
_LWS = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
_TORCHRUN = ("RANK", "WORLD_SIZE")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class RankPlace:
    """Ranks ``first`` to ``first + count - 1`` of ``size``."""

    size: int = 1
    first: int = 0
    count: int = 1
    address: str = ""
    """Where rank 0 is met; empty: nobody has said, so it is here."""
    local_rank: int = 0
    port_offset: int = 0
    """Of this process' ports: several are started with one command line."""
    hosts_store: bool = True
    """Whether rank 0 listens at the address; False: the launcher does."""
    life: str = ""
    """What tells this start from others, where the launcher's store outlives them."""

    @classmethod
    def find(cls, values: argparse.Namespace, environment: Mapping[str, str]) -> RankPlace:
        """Raises :class:`ConfigError` for flags and variables that contradict one another."""
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
        elif environment.get(_LWS[0]):
            place = _of_leader_worker_set(size, address, environment)
        elif environment.get(_TORCHRUN[0]):
            place = _of_torchrun(size, address, environment)
        else:
            return cls(size, 0, size, address or "")
        if place.first + place.count > size:
            raise ConfigError(
                f"data-parallel rank {place.first + place.count - 1} is none of --data-parallel-size {size}: "
                f"ranks go from 0 to {size - 1}"
            )
        if values.enable_expert_parallel and not place.address:
            raise ConfigError(
                f"--data-parallel-rank {rank} shares experts with other ranks: give --data-parallel-address, "
                "the same HOST:PORT on all of them, where rank 0 listens"
            )
        return place


ONLY_PLACE = RankPlace()
"""Of a server that is alone."""


def _of_leader_worker_set(size: int, address: str | None, environment: Mapping[str, str]) -> RankPlace:
    index, num_pods = _integer(environment, _LWS[0]), _integer(environment, _LWS[1])
    if num_pods < 1 or size % num_pods:
        raise ConfigError(
            f"--data-parallel-size {size} can't be divided among the {num_pods} pods of the LeaderWorkerSet "
            f"({_LWS[1]}): choose a multiple"
        )
    count = size // num_pods
    leader = environment.get(_LWS[2])
    if address is None and not leader:
        raise ConfigError(f"{_LWS[0]} is set and {_LWS[2]} is not: give --data-parallel-address HOST:PORT")
    return RankPlace(size, index * count, count, address or f"{leader}:{LEADER_PORT}")


def _of_torchrun(size: int, address: str | None, environment: Mapping[str, str]) -> RankPlace:
    rank, world_size = _integer(environment, _TORCHRUN[0]), _integer(environment, _TORCHRUN[1])
    if world_size != size:
        raise ConfigError(
            f"--data-parallel-size is {size} and torchrun's WORLD_SIZE {world_size}: start one process a rank"
        )
    local_rank = _integer(environment, "LOCAL_RANK")
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is None and not (host and port):
        raise ConfigError("RANK is set, MASTER_ADDR or MASTER_PORT is not: give --data-parallel-address")
    is_agents = address is None and environment.get(_AGENT_STORE) == "True"
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return RankPlace(
        size,
        rank,
        1,
        address or f"{host}:{port}",
        local_rank=local_rank,
        port_offset=local_rank,
        hosts_store=not is_agents,
        life="/".join(environment.get(name, "") for name in names) if is_agents else "",
    )


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r}; expected a number, as the launcher sets it")
    return int(text)
