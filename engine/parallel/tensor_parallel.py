"""Tensor parallelism: the ranks of one model, and how they combine their results.

Every rank holds a share of each layer's weights, of the KV heads and of the Mamba heads, and runs every step.
If ranks share a matrix by rows (outputs), each output is complete on its rank. If they share it by columns
(inputs), each rank's output is a summand, and :meth:`TensorParallel.sum` adds the summands up (Megatron-LM,
arXiv:1909.08053, section 3). After a sum or a gather all ranks have the same bits, so they sample the same
token without exchanging it.
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
from engine.parallel.messages import Messages
from engine.parallel.shared_memory import SharedMemory
from engine.parallel.transport import NO_TRANSPORT, Transport
from kernels.gpu.current_device import use_device

CPU = torch.device("cpu")
START_TIMEOUT_S = 300.0
"""How long ranks wait for one another, at the start and in every collective. At the start the slowest rank
may still be reading weights."""


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks of one server. They run on one or several hosts."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    """Device of all tensors that ranks exchange."""
    experts: ExpertParallel = NO_EXPERT_PARALLEL
    """The distribution of whole routed experts over ranks, if experts are not divided like other weights."""
    transport: Transport = NO_TRANSPORT
    """How the ranks exchange their results."""

    def share(self, count: int) -> range:
        """Return this rank's part of ``count`` things that are divided evenly."""
        each = count // self.size
        assert each * self.size == count, f"{count} does not divide by {self.size}"
        return range(self.rank * each, (self.rank + 1) * each)

    def share_or_copy(self, count: int) -> range:
        """Return this rank's part as :meth:`share` does.

        If there are fewer things than ranks, several ranks hold copies of the same thing.
        """
        if count >= self.size:
            return self.share(count)
        one = self.rank * count // self.size
        return range(one, one + 1)

    def copies(self, count: int) -> bool:
        """Return whether this rank's thing, one of ``count``, is a copy of what a lower rank holds."""
        return count < self.size and self.rank % (self.size // count) != 0

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' ``x`` in place. Every rank gets the same bits."""
        self.transport.sum(x)
        return x

    def least(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        own = torch.tensor([[value]], dtype=torch.int64, device=self.device)
        return int(self.transport.gather_columns(own, self.size).min())

    def any(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether any rank has set it. All ranks pass the same number of flags."""
        if self.size == 1 or not flags:
            return flags
        return (self.sum(torch.tensor(flags, dtype=torch.int32, device=self.device)) > 0).tolist()

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Concatenate each rank's ``[n, c]`` to ``[n, size * c]``, and return the first ``width`` columns."""
        return self.transport.gather_columns(x, width)


ALONE = TensorParallel()
"""A single rank that holds the whole model."""


def join(
    rank: int, size: int, meeting_point: Path, device: torch.device, *, shares_experts: bool = False
) -> TensorParallel:
    """Join the other ranks and wait until all have joined.

    With ``shares_experts`` each routed expert is on one rank.

    ``meeting_point`` is a file that does not exist yet, in a private folder. All ranks pass the same path.
    """
    if size == 1:
        return ALONE
    store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
    make_process_group(store, rank, size, device)
    experts = NO_EXPERT_PARALLEL
    if shares_experts:
        experts = ExpertParallel(rank, size, tp_rank=rank, tp_size=size)
    return TensorParallel(rank, size, device, experts, one_host_transport(rank, size, device))


def one_host_transport(
    rank: int, size: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Transport:
    """Return the transport of ranks on one host: shared memory on CPUs, messages on GPUs.

    ``group`` is the ranks' process group; None is torch's default group.
    """
    if size == 1:
        return NO_TRANSPORT
    shared = SharedMemory.meet(rank, size, group, START_TIMEOUT_S) if device.type == "cpu" else None
    return shared or Messages(size, group)


def make_process_group(store: Store, rank: int, size: int, device: torch.device) -> None:
    """Make torch's default process group: NCCL for GPUs, gloo elsewhere."""
    timeout = timedelta(seconds=START_TIMEOUT_S)
    if device.type == "cuda":
        use_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
