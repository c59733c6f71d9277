"""What the machine allows: output tokens/s if nothing but bytes and FLOP took time.

A wave is counted: ``at`` prompts, then ``output_len`` decode steps of as many rows.

| part | at the machine's rate of |
|---|---|
| FLOP of prompts | a matrix product |
| weights and KV of a step | a read of as many bytes as a step reads and writes: from a cache if they fit |
| states of a step | a copy |
| FLOP of a step, if they take longer than its bytes | a matrix product |

Rates are measured on all cores of the run, in float32. Not counted: norms, sampling, HTTP, whatever else a
server does, and the client, which has the same cores. So no server reaches the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.limits import CpuRates
from benchmarks.side_by_side.loads import LOADS, Load
from benchmarks.steps.step_bytes import decode_bytes, prefill_flops
from engine.cost.step_cost import pairs_of
from engine.cost.step_size import StepSize
from engine.models import read_config

PASSES = 3
LIMITED = ("short", "long")
"""Loads whose work the shapes say alone: closed, and without shared prefixes or drafts."""


@dataclass(frozen=True)
class Limit:
    """The least time of one wave of a load."""

    model: str
    load: str
    at: int
    prompt_s: float
    """Of one prompt."""
    step_s: float
    """Of one decode step of all rows."""
    output_tokens_per_s: float


def limit(model: str, size: StepSize, load: Load, at: int, rates: CpuRates) -> Limit:
    """Counts one wave."""
    flops_per_s = rates.flops_per_s()
    prompt_s = prefill_flops(size, load.input_len, pairs_of(0, load.input_len), 1) / flops_per_s
    num_context = at * (load.input_len + load.output_len // 2)
    moved = decode_bytes(size, at, num_context)
    read_per_s, copied_per_s = (
        rates.bytes_per_s(kind, round(moved.total), sets=1) for kind in ("read", "copy")
    )
    bytes_s = (moved.weights + moved.kv + moved.logits) / read_per_s + moved.states / copied_per_s
    step_s = max(bytes_s, prefill_flops(size, at, num_context, at) / flops_per_s)
    wave_s = at * prompt_s + load.output_len * step_s
    return Limit(model, load.name, at, prompt_s, step_s, at * load.output_len / wave_s)


def measured_limits(directories: dict[str, Path], num_cores: int) -> dict[str, Any]:
    """Returns rates and limits for a report. The machine has to do nothing else; each rate is the best of
    ``PASSES`` measurements."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores)
    best: dict[str, float] = {}
    try:
        for _ in range(PASSES):
            rates = CpuRates()
            list(_limits(directories, rates))
            best = {name: max(rate, best.get(name, 0.0)) for name, rate in rates.known.items()}
    finally:
        torch.set_num_threads(before)
    return {"rates": best, "limits": [asdict(one) for one in _limits(directories, CpuRates(best))]}


def _limits(directories: dict[str, Path], rates: CpuRates) -> Iterable[Limit]:
    for model, directory in directories.items():
        size = StepSize.of(read_config(directory, device="cpu"))
        for load in (LOADS[name] for name in LIMITED):
            for at in load.requests.get(model, ()):
                yield limit(model, size, load, at, rates)
