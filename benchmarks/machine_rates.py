"""What the machine at hand reaches: bytes a second of its memory, FLOP a second of matrix products.

| rate | on a GPU | on a CPU |
|---|---|---|
| bytes | a copy within the memory, read and written | a sum, read: what weights are, and what a copy hides |
| FLOP | a product of two matrices of ``SIDE`` rows and columns | the same, with torch's own library |

Medians of several runs, on as many threads as torch has. Buffers are far larger than any cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
SIDE = {"cuda": 8192, "cpu": 1536}
RUNS = 7
WARM_UP_RUNS = 2


@dataclass(frozen=True)
class MachineRates:
    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> MachineRates:
        return cls(measured_bytes_per_s(device), measured_flops_per_s(device, dtype))


def measured_bytes_per_s(device: torch.device) -> float:
    """See the module's table."""
    source = torch.zeros(BUFFER_BYTES[device.type] // 4, device=device)
    if device.type == "cpu":
        return source.nbytes / median_s(lambda: source.sum(), device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), device)


def measured_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """See the module's table."""
    side = SIDE[device.type]
    generator = torch.Generator(device).manual_seed(0)  # zeros draw less power, and clocks stay higher
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / median_s(lambda: torch.mm(a, b, out=out), device)


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one ``run``: between events of the GPU, else by the clock on the wall."""
    for _ in range(WARM_UP_RUNS):
        run()
    return statistics.median(_seconds(run, device) for _ in range(RUNS))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
