"""The hosts that a server's tensor-parallel ranks are spread over.

Host 0 has rank 0, which alone serves gRPC. Through NIXL other servers reach every rank. Each host has the
same number of consecutive ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.group.meeting import meet
from engine.group.mesh import GroupMesh
from engine.group.store import NO_STORE, GroupStore
from engine.parallel.expert_parallel import NO_EXPERT_PARALLEL, ExpertParallel
from engine.parallel.messages import Messages
from engine.parallel.tensor_parallel import TensorParallel
from wire.errors import ConfigError


@dataclass(frozen=True)
class Nodes:
    """The number of hosts (``size``), and the number of this host (``rank``)."""

    rank: int = 0
    size: int = 1
    store: GroupStore = NO_STORE

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"`nodes.rank` must be from 0 to {self.size - 1} with `nodes.size` {self.size}, "
                f"got {self.rank}"
            )

    def ranks(self, tp_size: int) -> range:
        """Returns the tensor-parallel ranks of this host."""
        each = tp_size // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def host_of(self, tp_rank: int, tp_size: int) -> int:
        """Returns the host of a tensor-parallel rank."""
        return tp_rank * self.size // tp_size


ONE_NODE = Nodes()
MEETING_TIMEOUT_S = 1800.0
"""How long hosts wait for one another: some of them may have to pull an image first."""


def rank_names(nodes: Nodes, tp_size: int) -> list[str]:
    """Returns the names of all ranks, for messages."""
    return [f"tensor-parallel rank {rank} on host {nodes.host_of(rank, tp_size)}" for rank in range(tp_size)]


def join_ranks(
    nodes: Nodes,
    tp_rank: int,
    tp_size: int,
    device: torch.device,
    *,
    shares_experts: bool,
    terms: dict[str, str],
) -> tuple[TensorParallel, GroupMesh]:
    """Connects to the server's other ranks on all hosts. Rank 0 must have opened the store before this call.

    ``terms`` have to be the same on all ranks. Raises what :func:`engine.group.meeting.meet` raises.
    """
    names = rank_names(nodes, tp_size)
    store = replace(nodes.store, is_own=False)  # the store is open already
    mesh = meet(store, tp_rank, device, names=names, each=1, terms=terms, timeout_s=MEETING_TIMEOUT_S)
    experts = NO_EXPERT_PARALLEL
    if shares_experts:
        experts = ExpertParallel(tp_rank, tp_size, tp_rank=tp_rank, tp_size=tp_size)
    return TensorParallel(tp_rank, tp_size, device, experts, Messages(tp_size)), mesh
