"""Measures the seconds per call of several contenders. They take turns, so that disturbances affect all.

| device | a contender's turn |
|---|---|
| CPU | calls for a third of a millisecond; one thread's in CPU time, more on the wall |
| CPU, replayed | our op in a graph of calls on all sets, as decode steps replay it |
| GPU | a graph between two events: a launch costs what it costs in a served step |

Calls use sets of operands one after the other, so that no call finds its operands in a cache that a step of
the whole model would have flushed (:func:`num_sets`). The median turn counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from benchmarks.kernels.cases.case import Call
from benchmarks.steps.machine_rates import cpu_clock
from kernels.cpu.graph import CpuGraph

MAX_SETS = 64
MAX_ROTATED_BYTES = 512 << 20
MIN_TURN_S = 3e-4
MIN_GRAPH_CALLS = 16
MIN_TURNS = 5


def num_sets(bytes_moved: int, weight_bytes: int) -> int:
    """Returns how many sets of operands are together as large as a model's weights, or too large for any
    cache."""
    return max(1, min(MAX_SETS, -(-min(weight_bytes, MAX_ROTATED_BYTES) // max(1, bytes_moved))))


class Turn(Protocol):
    """One turn of one contender; returns the seconds of one call in it."""

    def __call__(self) -> float: ...


def take_turns(turns: Mapping[str, Turn], budget_s: float) -> dict[str, float]:
    """Returns medians by contender. Each gets ``budget_s`` on average, and at least five turns."""
    taken: dict[str, list[float]] = {name: [] for name in turns}
    end = time.perf_counter() + budget_s * len(turns)
    while time.perf_counter() < end or any(len(times) < MIN_TURNS for times in taken.values()):
        for name, turn in turns.items():
            taken[name].append(turn())
    return {name: statistics.median(times) for name, times in taken.items()}


def cpu_turn(calls: Sequence[Call]) -> Turn:
    """Returns a CPU turn. Warms up first, because a kernel's first call compiles it. Each turn begins where
    the last one ended."""
    clock = cpu_clock()
    for call in calls[:2]:
        call()
    start = clock()
    calls[-1]()
    num_calls = 1 + int(MIN_TURN_S / max(clock() - start, 1e-9))
    rounds = itertools.cycle(calls)

    def turn() -> float:
        start = clock()
        for call in itertools.islice(rounds, num_calls):
            call()
        return (clock() - start) / num_calls

    return turn


def replayed_turn(calls: Sequence[Call]) -> Turn:
    """Returns a turn that replays recorded calls for at least as long as the turns of other contenders."""
    clock = cpu_clock()
    for call in calls[:2]:
        call()
    graph = CpuGraph()
    with graph.record():
        outputs = [call() for call in calls]
    start = clock()
    graph.replay()
    replays = 1 + int(MIN_TURN_S / max(clock() - start, 1e-9))

    def turn() -> float:
        start = clock()
        for _ in range(replays):
            graph.replay()
        return (clock() - start) / (replays * len(outputs))

    return turn


def gpu_turn(calls: Sequence[Call]) -> tuple[Turn, bool]:
    """Returns the turn, and whether it is a graph. Calls that can't be captured are launched one by one."""
    for call in (calls[0], calls[0], *calls):
        call()
    torch.cuda.synchronize()
    rounds = list(calls) * -(-MIN_GRAPH_CALLS // len(calls))

    def launch() -> None:
        for call in rounds:
            call()

    graph = _captured(launch)
    run = launch if graph is None else graph.replay
    run()

    def turn() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / len(rounds)

    return turn, graph is not None


def _captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except RuntimeError:  # it waits for the device, or allocates outside torch
        torch.cuda.synchronize()
        return None
    return graph
