"""How long an engine's captured graphs run, measured by GPU events around each replay."""

from __future__ import annotations

import statistics

import torch

from engine.engine import Engine
from engine.sampling.sampling_table import SamplingNeeds
from engine.step.program import Step, StepTensors


class ReplayClock:
    """Sits between an engine's runner and its graphs. Without captured graphs it measures nothing.

    With one step launched ahead the GPU is busy when a replay is queued. So the time between the events is
    that of the graph, not of its launch.
    """

    def __init__(self, engine: Engine) -> None:
        graphs = engine._runner._graphs
        self._replay = graphs.replay
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        graphs.replay = self._timed  # type: ignore[method-assign]

    def clear(self) -> None:
        self._events.clear()

    def median_s(self) -> float | None:
        """Median of the replays since :meth:`clear`, all of which have ended; None if there was none."""
        if not self._events:
            return None
        return statistics.median(begin.elapsed_time(end) for begin, end in self._events) / 1e3

    def _timed(self, num_rows: int, needs: SamplingNeeds) -> tuple[Step, StepTensors] | None:
        if not torch.cuda.is_available():
            return self._replay(num_rows, needs)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replayed = self._replay(num_rows, needs)
        end.record()
        if replayed is not None:
            self._events.append((begin, end))
        return replayed
