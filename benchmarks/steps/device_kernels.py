"""The kernels that run on the GPU during an operation, by name, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

NAME_LEN = 80
KEPT = 24
REST = "all others"


@dataclass(frozen=True)
class Kernel:
    name: str
    calls: int
    ms: float
    """Time of all calls."""


def device_kernels(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """Returns kernels, longest first, including copies and fills, those beyond :data:`KEPT` as one; none
    without a GPU. The profiler slows short kernels down."""
    if device.type != "cuda":
        return []
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    found = [
        Kernel(one.key[:NAME_LEN], one.count, one.self_device_time_total / 1e3)
        for one in profiler.key_averages()
        if one.self_device_time_total > 0
    ]
    return longest(found)


def longest(kernels: list[Kernel]) -> list[Kernel]:
    """Returns the kernels in order of their time, those beyond :data:`KEPT` added up."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.ms)
    rest = ordered[KEPT:]
    added = Kernel(REST, sum(one.calls for one in rest), sum(one.ms for one in rest))
    return [*ordered[:KEPT], added] if rest else ordered
