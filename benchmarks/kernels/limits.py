"""The limits of this machine, measured in the same run as the kernels.

| limit | on a CPU | on a GPU |
|---|---|---|
| copy | buffers as large as all sets of operands together | as many bytes in a call as the op's, in a graph |
| read | a sum over them, unless a copy is faster | a copy |
| arithmetic | float32 GEMM, the faster of torch's and the engine's | bfloat16 GEMM, 8,192 rows and columns |

A copy's bytes are those read plus those written; they come from a cache if the operands would. A read is the
limit of ops that write almost nothing. Sizes are rounded up to a power of two, so that only few are measured.
On a CPU the buffers are on huge pages, as pools are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.kernels.cases.work import Work
from benchmarks.kernels.clock import MAX_ROTATED_BYTES, MAX_SETS, cpu_turn, gpu_turn, take_turns
from benchmarks.steps.machine_rates import measured_bytes_per_s, measured_flops_per_s
from engine.models.layers.linear import Linear
from kernels.cpu.host_memory import host_empty
from kernels.cpu.jit import as_array, cpu_jit

BUDGET_S = 0.1
LEAST_BYTES = 1 << 15
READS_ALONE = 0.9
"""If at least this share of an op's bytes is read, a read is its limit."""
GEMM_SIZES = (512, 1024)
_FROM_MEMORY = 1 << 29
"""A call that moves so much has the rate of the memory. A graph's copy of that size took a slower way: on an
H200 2.8 TB/s, where kernels reached 4.2."""
FLOPS_OF_INSTRUCTION = 2
"""A GEMM's rate counts two for a multiply-add, which is one instruction."""


@dataclass(frozen=True)
class Limit:
    """The least seconds of a call, and the reason."""

    kind: str
    """``copy``, ``read`` or ``arithmetic``"""
    rate: float
    """Bytes/s or FLOP/s"""
    seconds: float


class Limits:
    """Measures each rate when it is first needed, and keeps it."""

    def __init__(self, rates: CpuRates | GpuRates) -> None:
        self._rates = rates

    def of(self, work: Work, sets: int) -> Limit:
        """Returns the limit of a call on one of ``sets`` sets of operands."""
        reads = work.read >= READS_ALONE * work.moved
        kind = "read" if reads and self._rates.measures_reads else "copy"
        memory = self._rates.bytes_per_s(kind, _rounded(work.moved), sets)
        candidates = [Limit(kind, memory, work.moved / memory)]
        flops = work.flops + (FLOPS_OF_INSTRUCTION * work.operations if self._rates.counts_operations else 0)
        if flops:
            gemm = self._rates.flops_per_s()
            candidates.append(Limit("arithmetic", gemm, flops / gemm))
        return max(candidates, key=lambda limit: limit.seconds)

    def measured(self) -> dict[str, float]:
        """Returns all rates so far: ``copy 512 KiB`` in bytes/s, ``GEMM`` in FLOP/s."""
        return dict(self._rates.known)


@dataclass
class CpuRates:
    """Rates of float32, on as many threads as torch has."""

    known: dict[str, float] = field(default_factory=dict)
    measures_reads: bool = True
    counts_operations: bool = True
    budget_s: float = BUDGET_S
    """For each way to copy, sum or multiply."""

    def bytes_per_s(self, kind: str, bytes_moved: int, sets: int) -> float:
        size = max(LEAST_BYTES, min(MAX_ROTATED_BYTES, _rounded(bytes_moved * sets)))
        copy = self._known(f"copy {_size_name(size)}", lambda: size / _copy_s(size, self.budget_s))
        if kind == "copy":
            return copy
        return max(copy, self._known(f"read {_size_name(size)}", lambda: size / _sum_s(size, self.budget_s)))

    def _known(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self.known:
            self.known[name] = measure()
        return self.known[name]

    def flops_per_s(self) -> float:
        return self._known("GEMM", lambda: max(_gemm_rate(side, self.budget_s) for side in GEMM_SIZES))


@dataclass
class GpuRates:
    """Rates of the current device."""

    known: dict[str, float] = field(default_factory=dict)
    measures_reads: bool = False
    counts_operations: bool = False

    def __post_init__(self) -> None:
        self.known["memory"] = measured_bytes_per_s(torch.device("cuda"))

    def bytes_per_s(self, kind: str, bytes_moved: int, sets: int) -> float:
        if bytes_moved >= _FROM_MEMORY:
            return self.known["memory"]
        name = f"{kind} {_size_name(bytes_moved)} x {sets}"
        if name not in self.known:
            half = max(16, bytes_moved // 2)
            pairs = [
                tuple(torch.ones(half, dtype=torch.uint8, device="cuda") for _ in range(2))
                for _ in range(min(sets, MAX_SETS))
            ]
            calls = [lambda a=a, b=b: b.copy_(a) for a, b in pairs]
            turn, _ = gpu_turn(calls)
            self.known[name] = 2 * half / take_turns({"copy": turn}, BUDGET_S)["copy"]
        return self.known[name]

    def flops_per_s(self) -> float:
        if "GEMM" not in self.known:
            self.known["GEMM"] = measured_flops_per_s(torch.device("cuda"), torch.bfloat16)
        return self.known["GEMM"]


def _rounded(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _size_name(size: int) -> str:
    for unit, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << unit:
            return f"{size >> unit} {name}"
    return f"{size} B"


# Loops of our own, one thread: calling torch takes longer than copying what fits into the first cache.
@cpu_jit
def _copy_to_and_fro(a, b, repeats):
    for _ in range(repeats):
        for i in range(a.shape[0]):
            b[i] = a[i]
        for i in range(a.shape[0]):
            a[i] = b[i]


@cpu_jit
def _sum(a, sums, repeats):
    for r in range(repeats):
        total = np.float32(0)
        for i in range(a.shape[0]):
            total += a[i]
        sums[r % sums.shape[0]] += total


def _copy_s(size: int, budget_s: float) -> float:
    """Returns the seconds of a copy that reads and writes ``size / 2`` bytes: the faster of torch's and the
    loop's."""
    a, b = (host_empty(size // 8).fill_(1) for _ in range(2))
    arrays = as_array(a), as_array(b)
    repeats = max(1, (1 << 20) // size)
    seconds = take_turns(
        {
            "torch": cpu_turn([lambda: b.copy_(a)]),
            "loop": cpu_turn([lambda: _copy_to_and_fro(*arrays, repeats)]),
        },
        budget_s,
    )
    return min(seconds["torch"], seconds["loop"] / (2 * repeats))


def _sum_s(size: int, budget_s: float) -> float:
    """Returns the seconds of a sum of ``size`` bytes, again the faster one."""
    a, sums = host_empty(size // 4).fill_(1), torch.zeros(8)
    arrays = as_array(a), as_array(sums)
    repeats = max(1, (1 << 20) // size)
    seconds = take_turns(
        {"torch": cpu_turn([a.sum]), "loop": cpu_turn([lambda: _sum(*arrays, repeats)])}, budget_s
    )
    return min(seconds["torch"], seconds["loop"] / repeats)


def _gemm_rate(side: int, budget_s: float) -> float:
    """Returns FLOP/s, with a weight whose layout is prepared beforehand, as the engine does too."""
    x, layer = torch.randn(side, side), Linear(torch.randn(side, side))
    plain = torch.randn(side, side)
    turns = {"torch": cpu_turn([lambda: x @ plain]), "engine": cpu_turn([lambda: layer(x)])}
    return 2 * side**3 / min(take_turns(turns, budget_s).values())
