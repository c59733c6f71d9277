"""Steps of one engine, timed: decode at a batch size and a context, prompts one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.steps.device_kernels import Kernel, device_kernels
from benchmarks.steps.machine_rates import cpu_clock, measured_bytes_per_s, measured_flops_per_s
from benchmarks.steps.replay_clock import ReplayClock
from benchmarks.steps.step_bytes import decode_bytes, prefill_flops
from engine.config import EngineConfig
from engine.cost.speculative_state import StateBytes
from engine.cost.step_cost import pairs_of
from engine.cost.step_size import StepSize
from engine.engine import Engine
from engine.request import Request
from wire.messages.sampling_params import SamplingParams

STEPS = 48
WARM_UP_STEPS = 8
STRETCHES = 3
PROMPT_RUNS, MIN_PROMPT_RUNS = 5, 2
PROMPTS_S = 8.0
"""Once prompts have taken this long, no more than :data:`MIN_PROMPT_RUNS` are run."""
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 5, 500
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top-p": {"temperature": 1, "top_p": 0.9},
}
"""The kinds of sampling that are measured. A client's default request has temperature 1 and top-p 1."""


@dataclass(frozen=True)
class Decode:
    """Steps at one batch size and context."""

    model: str
    sampling: str
    num_drafts: int
    batch: int
    context: int
    """Average number of tokens before each row, over the steps."""
    speculative_state: str
    """``slots`` or ``replay``."""
    bytes: dict[str, float]
    bytes_per_s: float
    """Rate of a copy just before."""
    limit_ms: float
    device_ms: float | None
    """Median of the graphs' own time; None if there was none."""
    step_ms: float
    """Time of a step in the fastest of several series of steps."""
    kernels: list[Kernel]
    """Kernels of one step, the longest first; none without a GPU."""


@dataclass(frozen=True)
class Prefill:
    """Prompts one by one, in chunks."""

    model: str
    tokens: int
    chunk: int
    flops: float
    flops_per_s: float
    """Rate of a large product just before."""
    limit_ms: float
    prompt_ms: float
    """Median."""
    kernels: list[Kernel]


class MeasuredSteps:
    """One measured engine; it has room for prompts of the longest context and all their answers."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self._model = model
        self._config = self.engine.model.config
        self._size = StepSize.of(self._config)
        self._clock = cpu_clock() if self.engine.device.type == "cpu" else time.perf_counter
        self._replays = ReplayClock(self.engine)

    def decode(self, batch: int, context: int, sampling: str = "greedy") -> Decode:
        device, num_positions = self.engine.device, self.engine.config.num_positions
        with self._decoding(batch, context, SAMPLING[sampling]):
            self._run(WARM_UP_STEPS)
            bytes_per_s = measured_bytes_per_s(device)
            self._replays.clear()
            before = self._num_tokens()
            step_s = min(self._run(STEPS // STRETCHES) for _ in range(STRETCHES))
            after = self._num_tokens()
            num_context = (before + after) // 2
            gained = (after - before) / (batch * STEPS)
            device_s = self._replays.median_s()
            kernels = device_kernels(lambda: self._run(1), device)
        moved = decode_bytes(self._size, batch, num_context, num_positions)
        replays = self.engine.capacity.replays
        if replays:
            sizes = StateBytes.of(self._config, device.type)
            assert sizes is not None
            moved = replace(moved, states=round(batch * sizes.moved_by_replay(num_positions, gained)))
        return Decode(
            self._model,
            sampling,
            num_positions - 1,
            batch,
            num_context // batch,
            "replay" if replays else "slots",
            {**asdict(moved), "total": moved.total},
            bytes_per_s,
            1e3 * moved.total / bytes_per_s,
            None if device_s is None else 1e3 * device_s,
            1e3 * step_s,
            kernels,
        )

    def prefill(self, num_tokens: int) -> Prefill:
        device = self.engine.device
        self._prompt_s(num_tokens)
        seconds = statistics.median(self._prompt_times(num_tokens))
        flops_per_s = measured_flops_per_s(device, self._config.dtype)
        flops = prefill_flops(self._size, num_tokens, pairs_of(0, num_tokens), 1)
        return Prefill(
            self._model,
            num_tokens,
            self.engine.config.max_batch_tokens,
            flops,
            flops_per_s,
            1e3 * flops / flops_per_s,
            1e3 * seconds,
            device_kernels(lambda: self._prompt_s(num_tokens), device),
        )

    @contextmanager
    def _decoding(self, batch: int, context: int, sampling: dict[str, float]) -> Iterator[None]:
        """All rows decode inside the block; after it the engine is empty."""
        for i in range(batch):
            params = SamplingParams(max_tokens=self.engine.capacity.max_model_len - context, **sampling)
            self._add(str(i), context, params)
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self.engine.step().outputs}
        yield
        for i in range(batch):
            self.engine.cancel(str(i))
        self.engine.step()

    def _add(self, request_id: str, length: int, params: SamplingParams) -> None:
        """Adds a request whose prompt has no patterns that n-grams could find again."""
        generator = torch.Generator().manual_seed(sum(request_id.encode()) + length)
        tokens = torch.randint(NUM_TOKEN_IDS, (length,), generator=generator) + FIRST_TOKEN_ID
        self.engine.add(Request(request_id, tokens.tolist(), params))

    def _run(self, num_steps: int) -> float:
        """Runs steps; returns the seconds of one."""
        self._wait()
        began = self._clock()
        for _ in range(num_steps):
            self.engine.step()
        self._wait()
        return (self._clock() - began) / num_steps

    def _prompt_times(self, num_tokens: int) -> list[float]:
        times: list[float] = []
        while len(times) < MIN_PROMPT_RUNS or (len(times) < PROMPT_RUNS and sum(times) < PROMPTS_S):
            times.append(self._prompt_s(num_tokens))
        return times

    def _prompt_s(self, num_tokens: int) -> float:
        self._wait()
        began = self._clock()
        self._add("prompt", num_tokens, SamplingParams(max_tokens=1, temperature=0))
        while not self.engine.step().outputs:
            pass
        return self._clock() - began

    def _num_tokens(self) -> int:
        return sum(len(request.tokens) for request in self.engine.scheduler.running.values())

    def _wait(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
