"""Whole decode steps on a CPU, recorded once for each number of rows and kind of sampling.

A step of a small model takes Python as long as it takes the kernels. This is the counterpart of step graphs
on a GPU (:mod:`engine.step.graph`): the kernel that makes indices from the row tables, the model's pass
(:mod:`engine.step.passes.recorded_forward`), sampling, acceptance and drafting are one list of calls.

A burst of such steps (:mod:`engine.step.burst`) runs without Python in between.

Where torch takes part in a step, only its pass is recorded: with processors of logits, grammars and budgets
of thinking, with an MTP layer, and where decode rows replay drafted tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from engine.sampling.sampling_table import SamplingNeeds
from engine.step.batch_builder import BatchBuilder
from engine.step.burst import MAX_STEPS, Burst
from engine.step.passes.recorded_forward import RecordedForward
from engine.step.program import Step, StepProgram, StepTensors
from kernels.cpu.graph import CpuGraph
from kernels.speculation.kept_results import KeptResults


@dataclass(frozen=True)
class _Recorded:
    graph: CpuGraph
    step: Step
    tensors: StepTensors
    results: KeptResults


class RecordedSteps:
    """Records steps when they run for the first time, and replays them from then on."""

    def __init__(
        self, program: StepProgram, builder: BatchBuilder, forward: RecordedForward, *, max_seq_len: int
    ) -> None:
        self._program = program
        self._builder = builder
        self._forward = forward
        self._max_seq_len = max_seq_len
        self._recorded: dict[tuple[int, SamplingNeeds], _Recorded] = {}

    def replay(
        self, num_rows: int, needs: SamplingNeeds, burst: Burst
    ) -> tuple[Step, StepTensors, Tensor] | None:
        """Run the step whose rows are loaded in the buffers, and further ones as ``burst`` allows.

        Returns the last step, and the results ``[steps, num_rows, T + 3]`` of all. The next replay may
        overwrite the tensors. Returns None if such steps can't be recorded.
        """
        if needs.processed or needs.constrained or needs.budgeted or not self._program.is_recorded:
            return None
        recorded, num_steps, began_s = self._recorded.get((num_rows, needs)), 0, time.monotonic()
        if recorded is None:
            recorded = self._recorded[num_rows, needs] = self._record(num_rows, needs)
            num_steps = 1
        else:
            recorded.results.begin()
        if num_steps == 0 or burst.goes_on(num_steps, began_s):
            recorded.graph.replay(burst.repeats(num_steps))
        self._forward.check()
        return recorded.step, recorded.tensors, recorded.results.kept()

    def _record(self, num_rows: int, needs: SamplingNeeds) -> _Recorded:
        """Run one step, and keep its calls."""
        before, behind = CpuGraph(), CpuGraph()
        with before.record():
            step = self._builder.decode_step(num_rows, needs, max_seq_len=self._max_seq_len, samples=True)
        decode, results = step.batch.decode, KeptResults(step.results, MAX_STEPS)
        assert decode is not None
        hidden, logits = self._forward(step.batch)
        with behind.record():
            tensors = self._program.finish(step, hidden, logits.view(num_rows, -1, logits.shape[-1]))
            results.keep()
        forward = self._forward.graph(decode.num_rows, decode.num_positions)
        return _Recorded(CpuGraph.joined(before, forward, behind), step, tensors, results)
