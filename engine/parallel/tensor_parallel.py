"""Tensor parallelism: the ranks of one model, and how they put together what each has computed.

Every rank holds a share of each layer's weights, of the KV heads and of the Mamba heads, and runs every step.
What a row of a matrix made of shares yields is complete on its rank; what a column share yields is a summand,
and :meth:`TensorParallel.sum` adds it up (Megatron-LM, arXiv:1909.08053, section 3). All ranks leave a sum or
a gather with the same bits, so they sample the same token without a word about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.parallel.expert_parallel import NO_EXPERT_PARALLEL, ExpertParallel

CPU = torch.device("cpu")
START_TIMEOUT_S = 300.0
"""How long ranks wait for one another; the slowest may still be reading weights."""


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks. The ranks of one server run on one host."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    """Where tensors that travel have to be."""
    group: dist.ProcessGroup | None = None
    """These ranks, where they are not all that the process group knows."""
    experts: ExpertParallel = NO_EXPERT_PARALLEL
    """Who has which of the routed experts, where these are not divided as other weights are."""

    def share(self, count: int) -> range:
        """This rank's part of ``count`` things that are divided evenly."""
        each = count // self.size
        assert each * self.size == count, f"{count} does not divide by {self.size}"
        return range(self.rank * each, (self.rank + 1) * each)

    def share_or_copy(self, count: int) -> range:
        """The same, but where there are fewer things than ranks several ranks hold a copy of one."""
        if count >= self.size:
            return self.share(count)
        one = self.rank * count // self.size
        return range(one, one + 1)

    def copies(self, count: int) -> bool:
        """Whether a rank before this one holds the same of ``count`` things."""
        return count < self.size and self.rank % (self.size // count) != 0

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` added up, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        least = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def any(self, flags: list[bool]) -> list[bool]:
        """Which flags any rank has set; all pass equally many."""
        if self.size == 1 or not flags:
            return flags
        return (self.sum(torch.tensor(flags, dtype=torch.int32, device=self.device)) > 0).tolist()

    def gather_columns(self, x: Tensor) -> Tensor:
        """``[n, c]`` of each rank side by side, ``[n, size * c]``."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


ALONE = TensorParallel()
"""One rank that holds all."""


def join(
    rank: int, size: int, meeting_point: Path, device: torch.device, *, shares_experts: bool = False
) -> TensorParallel:
    """Meets the other ranks and waits until all are there. ``shares_experts``: each expert is one rank's.

    ``meeting_point`` is a file in a private folder that does not exist yet; all ranks name the same.
    """
    if size == 1:
        return ALONE
    store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
    make_process_group(store, rank, size, device)
    experts = NO_EXPERT_PARALLEL
    if shares_experts:
        experts = ExpertParallel(rank, size, tp_rank=rank, tp_size=size)
    return TensorParallel(rank, size, device, experts=experts)


def make_process_group(store: Store, rank: int, size: int, device: torch.device) -> None:
    """Torch's default process group: NCCL for GPUs, gloo elsewhere."""
    timeout = timedelta(seconds=START_TIMEOUT_S)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where kernels are launched, whatever tensors they are given
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def leave() -> None:
    """Says goodbye to the other ranks, where there are any."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
