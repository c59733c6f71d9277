"""The rates of this machine: bytes per second of its memory, and FLOP per second of its matrix products.

| rate | on a GPU | on a CPU |
|---|---|---|
| bytes | a copy within the memory, read and written | a sum, read: what weights are, and what a copy hides |
| FLOP | a product of two matrices of ``SIDE`` rows and columns | the same, with torch's own library |

Medians of several runs, on as many threads as torch has. Buffers are far larger than any cache, and are freed
afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

BUFFER_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
SIDE = {"cuda": 8192, "cpu": 1536}
RUNS = 7
WARM_UP_RUNS = 2


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


def cpu_clock() -> Callable[[], float]:
    """Returns a clock: CPU time for one thread, because other processes change it least; wall time for
    several threads."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one ``run``: between GPU events, or by :func:`cpu_clock`."""
    for _ in range(WARM_UP_RUNS):
        run()
    return statistics.median(_seconds(run, device) for _ in range(RUNS))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        clock = cpu_clock()
        began = clock()
        run()
        return clock() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
