"""Decode steps replayed as CUDA graphs. :mod:`engine.step.recorded_steps` does the same on a CPU.

There is one graph for each captured batch size and each kind of sampling in :data:`CAPTURED`: greedy
batches, for example, skip the race. A graph holds a whole step: all that
:class:`engine.step.program.StepProgram` runs, and the kernel that makes indices from the row tables. To
launch a graph, the host uploads the rows, blocks and slots that it has chosen, and makes one call.

All graphs share one memory pool, and a replay overwrites what other graphs have left there. Only the logits
are read after a step, for log-probabilities: every graph writes them to the same tensor outside the pool.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.sampling.sampling_table import SamplingNeeds
from engine.step.batch_builder import BatchBuilder
from engine.step.buffers import StepBuffers
from engine.step.program import Step, StepProgram, StepTensors

log = logging.getLogger(__name__)

CAPTURED = [
    SamplingNeeds(is_random, is_filtered, is_processed, constrained=is_processed, budgeted=is_processed)
    for is_processed in (False, True)
    for is_random, is_filtered in ((False, False), (True, False), (True, True))
    if not (is_processed and is_random > is_filtered)
]
"""The kinds of sampling for which graphs are captured, each before the kinds that do more.

A step replays the first kind that does all that its rows need. What a row does not need leaves its logits as
they are, bit for bit. Temperature 1 with top-p 1, which is OpenAI's default, reads the logits once.
Processors, grammars and budgets of thinking are rarer, and share a kind: alone, each would cost as many
graphs again.
"""

WARM_UP_RUNS = 2
"""Number of runs before a capture. In these runs kernels are compiled and libraries allocate workspaces."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    step: Step
    tensors: StepTensors


class StepGraphs:
    """Graphs of decode-only steps, by batch size and by what sampling needs."""

    def __init__(
        self,
        program: StepProgram,
        builder: BatchBuilder,
        buffers: StepBuffers,
        *,
        max_seq_len: int,
        device: torch.device,
        captures: bool,
    ) -> None:
        self._program = program
        self._builder = builder
        self._buffers = buffers
        self._max_seq_len = max_seq_len
        self._captures = captures and device.type == "cuda"
        self._captured: dict[tuple[int, SamplingNeeds], _Captured] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        """The graph captured last. All graphs share its memory pool."""

    def capture_all(self) -> None:
        """Capture every batch size and kind, largest first: the others reuse its memory.

        Raises torch's out-of-memory error if a graph does not fit: no size is left out silently.
        """
        if not self._captures:
            return
        began = time.monotonic()
        self._logits = self._program.empty_logits(self._buffers.sizes[-1])
        for num_rows in reversed(self._buffers.sizes):
            for needs in reversed(CAPTURED):
                self._buffers.load([], num_rows)
                self._captured[num_rows, needs] = self._capture(num_rows, needs)
        log.info("captured %d graphs in %.1f s", len(self._captured), time.monotonic() - began)

    @property
    def pool(self) -> Any:
        """The memory pool of all graphs; None if none were captured."""
        return None if self._graph is None else self._graph.pool()

    def replay(self, num_rows: int, needs: SamplingNeeds) -> tuple[Step, StepTensors] | None:
        """Launch the step whose rows are loaded in the buffers; None if no graphs were captured."""
        if not self._captured:
            return None
        captured = self._captured[num_rows, next(kind for kind in CAPTURED if kind | needs == kind)]
        captured.graph.replay()
        return captured.step, captured.tensors

    def _capture(self, num_rows: int, needs: SamplingNeeds) -> _Captured:
        def run() -> tuple[Step, StepTensors]:
            step = self._builder.decode_step(num_rows, needs, max_seq_len=self._max_seq_len, samples=True)
            step = replace(step, logits=self._logits[:num_rows])
            return step, self._program.run(step)

        for _ in range(WARM_UP_RUNS):
            run()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, such as NCCL's watchdog, go on calling CUDA during the capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step, tensors = run()
        self._graph = graph
        # The hidden states stay in the pool, where other graphs may use their memory.
        return _Captured(graph, step, replace(tensors, hidden=None))
