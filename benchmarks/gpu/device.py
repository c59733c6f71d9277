"""Prints the facts of this machine's GPU as JSON, or says in one line why it can't be used.

A process of its own: the process that runs the calls holds no memory of the GPU, and outlives a driver's
crash.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any


class NoDeviceError(Exception):
    """There is no GPU that torch can use."""


def device_facts() -> dict[str, Any]:
    """Returns name, memory and versions. Raises :class:`NoDeviceError`."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.device"], capture_output=True, text=True, check=False
    )
    lines = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    if done.returncode or not lines:
        raise NoDeviceError(lines[-1] if lines else f"the look for one ended with code {done.returncode}")
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def main() -> None:
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"{sys.executable} has no torch ({error}); name another one: PYTHON=…") from error
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} of {sys.executable} finds no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    facts = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver_cuda": torch._C._cuda_getDriverVersion(),  # type: ignore[attr-defined]
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "nixl": _version("nixl"),
    }
    print(json.dumps(facts))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
