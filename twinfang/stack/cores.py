"""How many CPU cores this process may use, and whether there may be a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""What drivers of GPUs (NVIDIA, AMD, WSL) show to programs."""


def usable_cores(cgroup_limit: Path = CGROUP_LIMIT) -> int:
    """Returns the number of cores in the affinity mask, or the container's CPU limit if that is lower.

    ``os.cpu_count()`` returns the machine's cores: with a limit of 2 on a node of 64, 64 threads would share
    two cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup_limit.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def may_use_gpu(device: str, drivers: Iterable[Path] = GPU_DRIVERS) -> bool:
    """Returns whether servers with ``--device DEVICE`` may use a GPU. It asks no driver, so that this process
    and its children can still be forked."""
    return device != "cpu" and (device != "auto" or any(driver.exists() for driver in drivers))
