"""Clocks the operators of an engine's step: seconds and calls of each, on the host.

The clocked operators are every function of ``kernels/`` that the engine calls, linear layers by their shape,
the calls of a recorded decode pass by kernel and number of items, and the methods below. An operator's time
excludes the operators that it calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.models.causal_lm import CausalLM
from engine.models.layers.linear import Linear
from engine.sampling.sampler import Sampler
from engine.step.program import StepProgram
from engine.step.recorded_steps import RecordedSteps
from engine.step.runner import StepRunner
from kernels.cpu.call_list import Batch
from kernels.cpu.graph import CpuGraph
from kernels.cpu.threads import Repeats
from kernels.speculation.accept_drafts import AcceptDrafts
from kernels.speculation.prepare_rows import PrepareRows

METHODS = {
    (CausalLM, "forward"): "model: embedding, splits, copies",
    (CausalLM, "logits"): "model: embedding, splits, copies",
    (StepProgram, "run"): "step program",
    (RecordedSteps, "replay"): "step program",
    (Sampler, "sample"): "sampling",
    (AcceptDrafts, "__call__"): "accept",
    (PrepareRows, "__call__"): "prepare",
    (StepRunner, "launch"): "host: rows and batch",
}
"""The clocked methods besides the functions of ``kernels/`` and the linear layers."""


@dataclass
class Item:
    """One operator in one step."""

    seconds: float = 0.0
    calls: int = 0


class StepClock:
    """Seconds of operators, without those of the operators that they call."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._inner = [0.0]
        self.items: dict[str, Item] = defaultdict(Item)

    def timed(self, fn: Callable[..., Any], name: str | Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self._now()
            try:
                return fn(*args, **kwargs)
            finally:
                seconds = self._now() - start
                item = self.items[name if isinstance(name, str) else name(*args)]
                item.seconds += seconds - self._inner.pop()
                item.calls += 1
                self._inner[-1] += seconds

        return call


@contextlib.contextmanager
def clocks(clock: StepClock) -> Iterator[None]:
    """Puts each operator that the engine calls under the clock."""
    patched: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, label: str | Callable[..., str]) -> None:
        fn = getattr(owner, name)
        patched.append((owner, name, fn))
        setattr(owner, name, clock.timed(fn, label))

    for (owner, method), label in METHODS.items():
        patch(owner, method, label)
    patched += [(CpuGraph, "replay", CpuGraph.replay), (Batch, "note", Batch.note)]
    CpuGraph.replay = _replayed_call_by_call(clock)
    Batch.note = _made_at_once(Batch.note)
    patch(Linear, "__call__", lambda linear, _: f"linear {linear.out_features} x {linear.in_features}")
    patch(Linear, "relu_squared", lambda linear, _: f"linear {linear.out_features} x {linear.in_features}")
    for module in [module for name, module in sys.modules.items() if name.startswith("engine.")]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value.__module__.startswith("kernels."):
                patch(module, name, value.__name__)
    try:
        yield
    finally:
        for owner, name, fn in patched:
            setattr(owner, name, fn)


def _replayed_call_by_call(clock: StepClock) -> Callable[..., int]:
    def replay(graph: CpuGraph, repeats: Repeats | None = None) -> int:
        for name, run in graph.calls():
            clock.timed(run, name)()
        return 1

    return replay


def _made_at_once(note: Callable[..., None]) -> Callable[..., None]:
    """A batch's calls, each of which counts as a part of the operator that makes it."""

    def note_and_make(batch: Batch, *call: Any) -> None:
        note(batch, *call)
        batch.settle()

    return note_and_make
