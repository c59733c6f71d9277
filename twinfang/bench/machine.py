"""The machine on which a benchmark runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("twinfang", "torch", "numba", "nixl", "grpcio", "uvicorn")


def machine() -> dict[str, object]:
    """Returns processor, cores, present load, GPU and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "gpu": _gpu(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def waited_s(pids: Iterable[int]) -> float:
    """Returns the seconds in which the processes' threads were ready to run but had no core, added up over
    all threads."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text(encoding="ascii").split()[1]) for file in files) / 1e9


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _gpu() -> str | None:
    for information in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model"):
                return line.partition(":")[2].strip()
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
