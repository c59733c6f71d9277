"""Measures cases and makes a row of each: the op's work, the machine's limit, and all contenders' times."""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.kernels.cases.case import Bind, Call, Case
from benchmarks.kernels.cases.work import Work
from benchmarks.kernels.clock import Turn, cpu_turn, gpu_turn, num_sets, replayed_turn, take_turns
from benchmarks.kernels.limits import CpuRates, GpuRates, Limit, Limits

SEED = 7
OURS = "ours"
COMPILED = "torch.compile"
CPU_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One measured case."""

    op: str
    shape: str
    read: int
    """Bytes"""
    written: int
    """Bytes"""
    flops: int
    operations: int
    """As in :class:`Work`."""
    sets: int
    limit: Limit
    seconds: dict[str, float]
    """Seconds of one call, by contender, including ``ours``."""
    absent: dict[str, str] = field(default_factory=dict)
    """Contenders without a time, and why."""
    differences: dict[str, float] = field(default_factory=dict)
    """Difference between a peer's first output and ours: norm of the difference divided by the norm of
    ours."""
    launched: tuple[str, ...] = ()
    """Contenders that were launched call by call, because they could not be captured in a graph."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Bench:
    """Measures on one device. Raises the errors of our own kernels; a peer's failure becomes a cell of its
    row.

    On a CPU each case has :data:`CPU_ROUNDS` rounds, in which the contenders' turns and then the rates are
    measured; medians count. Other guests of a virtual machine change its speed within seconds.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self._device = device
        self._budget_s = budget_s
        self._on_gpu = device.type == "cuda"
        self._gpu_limits = Limits(GpuRates()) if self._on_gpu else None
        self._rates: dict[str, list[float]] = defaultdict(list)

    @torch.inference_mode()
    def measure(self, case: Case) -> Row:
        sets = num_sets(case.work.moved, case.weight_bytes)
        binds: dict[str, Bind] = case.contenders
        if case.compiled is not None:
            binds |= {COMPILED: _compiled(case.contenders[case.compiled])}
        absent: dict[str, str] = {}
        differences = self.differences(case, binds, absent)
        turns, launched = self._turns(case, binds, sets, absent)
        timed = self._on_a_gpu if self._on_gpu else self._in_rounds
        seconds, limit = timed(case, turns, sets)
        return Row(
            case.op,
            case.shape,
            case.work.read,
            case.work.written,
            case.work.flops,
            case.work.operations,
            sets,
            limit,
            seconds,
            absent,
            differences,
            launched,
        )

    def rates(self) -> dict[str, float]:
        """Returns the medians of all rates so far: ``copy 512 KiB`` in bytes/s, ``GEMM`` in FLOP/s."""
        return {name: statistics.median(rates) for name, rates in self._rates.items()}

    def _on_a_gpu(self, case: Case, turns: dict[str, Turn], sets: int) -> tuple[dict[str, float], Limit]:
        seconds = take_turns(turns, self._budget_s)
        turns.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return seconds, self._limit(case.work, sets)

    def _in_rounds(self, case: Case, turns: dict[str, Turn], sets: int) -> tuple[dict[str, float], Limit]:
        rounds = [
            (take_turns(turns, self._budget_s / CPU_ROUNDS), self._limit(case.work, sets))
            for _ in range(CPU_ROUNDS)
        ]
        seconds = {name: statistics.median(taken[name] for taken, _ in rounds) for name in turns}
        limits = sorted((limit for _, limit in rounds), key=lambda limit: limit.seconds)
        return seconds, limits[CPU_ROUNDS // 2]

    def _limit(self, work: Work, sets: int) -> Limit:
        limits = self._gpu_limits or Limits(CpuRates(budget_s=self._budget_s / CPU_ROUNDS))
        limit = limits.of(work, sets)
        for name, rate in limits.measured().items():
            self._rates[name].append(rate)
        return limit

    def differences(self, case: Case, binds: dict[str, Bind], absent: dict[str, str]) -> dict[str, float]:
        """Runs all contenders once on the same operands; records those that can't run."""
        outputs: dict[str, torch.Tensor] = {}
        for name, bind in binds.items():
            torch.manual_seed(SEED)
            operands = case.operands(self._device)
            try:
                output = bind(operands)()
            except ImportError as error:
                absent[name] = f"missing: {error}"
            except Exception as error:
                if name == OURS:
                    raise
                absent[name] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            else:
                outputs[name] = _tensor(output)
        if not case.comparable:
            return {}
        ours = outputs.pop(OURS).double()
        return {
            name: float((output.double() - ours).norm() / ours.norm()) for name, output in outputs.items()
        }

    def _turns(
        self, case: Case, binds: dict[str, Bind], sets: int, absent: dict[str, str]
    ) -> tuple[dict[str, Turn], tuple[str, ...]]:
        operands = [case.operands(self._device) for _ in range(sets)]
        turns: dict[str, Turn] = {}
        launched = []
        for name, bind in binds.items():
            if name in absent:
                continue
            calls: list[Call] = [bind(one) for one in operands]
            if self._on_gpu:
                turns[name], is_graph = gpu_turn(calls)
                launched += [] if is_graph else [name]
            elif name == OURS and case.replayed:
                turns[name] = replayed_turn(calls)
            else:
                turns[name] = cpu_turn(calls)
        return turns, tuple(launched)


def _compiled(bind: Bind) -> Bind:
    """Returns torch.compile of the peer's call; one compilation serves all sets of operands."""

    def bind_compiled(operands: Any) -> Call:
        return torch.compile(bind(operands), dynamic=False)

    return bind_compiled


def _tensor(output: object) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, torch.Tensor) else torch.zeros(1)
