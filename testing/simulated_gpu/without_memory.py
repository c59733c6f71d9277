"""Engines of any size on a simulated GPU without memory: they show what a GPU would launch and hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from unittest.mock import patch

from engine.checkpoint.dummy_weights import DummyValues
from engine.config import EngineConfig
from engine.engine import Engine
from testing.simulated_gpu.gpu import SimulatedGpu


def make_engine(config: EngineConfig, sizes: Sequence[int]) -> tuple[SimulatedGpu, Engine]:
    """Returns the engine and its GPU. Graphs are captured for batches of ``sizes``. Weights have no values,
    and no request warms the engine up."""
    gpu = SimulatedGpu(memory="meta")
    with gpu, ExitStack() as stack:
        stack.enter_context(patch.object(Engine, "warm_up"))
        stack.enter_context(patch.object(DummyValues, "_fill"))
        stack.enter_context(patch("engine.step.graph.WARM_UP_RUNS", 1))  # makes tables that steps keep
        stack.enter_context(patch("engine.step.buffers.capture_sizes", return_value=list(sizes)))
        return gpu, Engine(config)
