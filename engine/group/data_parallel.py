"""A data-parallel rank's place in its group, and how the processes of a lockstep group join.

A group has ``D`` data-parallel ranks of ``T`` tensor-parallel ranks each. Tensor-parallel rank ``t`` of
data-parallel rank ``d`` is process ``d * T + t`` of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.group.meeting import meet
from engine.group.mesh import GroupMesh
from engine.group.store import NO_STORE, GroupStore
from engine.parallel.expert_parallel import ExpertParallel
from engine.parallel.tensor_parallel import TensorParallel, one_host_transport
from wire.errors import ConfigError


@dataclass(frozen=True)
class DataParallel:
    """Place of one data-parallel rank. Each of these ranks is a server with a port of its own."""

    rank: int = 0
    size: int = 1
    store: GroupStore = NO_STORE
    local_rank: int = 0
    """Number of this rank among the data-parallel ranks of its host; it selects the rank's GPUs."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"`data_parallel.rank` must be from 0 to {self.size - 1} with `data_parallel.size` "
                f"{self.size}, got {self.rank}"
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
    """Waits until all processes of the group are there, and connects to them.

    ``terms`` have to be the same on all processes. Raises what :func:`engine.group.meeting.meet` raises.
    """
    rank, size = place.rank * tp_size + tp_rank, place.size * tp_size
    names = [_name(one, tp_size) for one in range(size)]
    mesh = meet(place.store, rank, device, names=names, each=tp_size, terms=terms)
    groups = [
        dist.new_group(list(range(first, first + tp_size))) if tp_size > 1 else None
        for first in range(0, size, tp_size)
    ]
    experts = ExpertParallel(rank, size, tp_rank=tp_rank, tp_size=tp_size)
    transport = one_host_transport(tp_rank, tp_size, device, groups[place.rank])
    return TensorParallel(tp_rank, tp_size, device, experts, transport), mesh


def _name(process: int, tp_size: int) -> str:
    rank, tp_rank = divmod(process, tp_size)
    name = f"data-parallel rank {rank}"
    return name if tp_size == 1 else f"{name}, tensor-parallel rank {tp_rank}"
