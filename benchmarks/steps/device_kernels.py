"""The kernels that run on the GPU during an operation, by name, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

NAME_LEN = 80


@dataclass(frozen=True)
class Kernel:
    name: str
    calls: int
    ms: float
    """Time of all calls."""


def device_kernels(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """Returns kernels, longest first, including copies and fills; none without a GPU. The profiler slows
    short kernels down."""
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
    return sorted(found, key=lambda kernel: -kernel.ms)
