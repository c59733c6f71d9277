"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


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
