"""One op at one shape, and its implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from benchmarks.kernels.cases.models import Model
from benchmarks.kernels.cases.work import Work
from kernels.cpu.host_memory import host_zeros

LEAST_TOKENS = 256
"""From this number on, rows are the tokens of a prompt."""

_DRAWN = (1 << 20) + 13

Call = Callable[[], object]
"""Computes the op once, on its bound operands."""

Bind = Callable[[SimpleNamespace], Call]
"""Binds a contender to a set of operands, whose layout it may change. Raises ImportError if it is not
installed."""


@dataclass(frozen=True)
class Case:
    """One row of the table. Nothing is allocated before ``operands`` is called."""

    op: str
    shape: str
    """Model name, then rows, tokens and other sizes."""
    work: Work
    weight_bytes: int
    """Weight bytes of the whole model, which a step reads before it uses these operands again."""
    operands: Callable[[torch.device], SimpleNamespace]
    """Makes a set of operands on the device, with different random numbers every time."""
    ours: Bind
    peers: Mapping[str, Bind] = field(default_factory=dict)
    compiled: str | None = None
    """The peer that also runs with torch.compile; None if there is nothing to fuse, or a loop would be
    unrolled."""
    comparable: bool = True
    """Whether all contenders' first outputs are equal up to rounding."""
    replayed: bool = False
    """Whether decode steps on a CPU replay our op (kernels/cpu/graph.py) and don't call it from Python."""

    @property
    def contenders(self) -> dict[str, Bind]:
        return {"ours": self.ours, **self.peers}


def case_name(model: Model, **sizes: int) -> str:
    """Returns for example ``8 B, batch 8, 4 positions``; a single position or query is not mentioned."""
    words = {
        "rows": "batch {}" if sizes.get("rows", 0) < LEAST_TOKENS else "{:,} tokens",
        "tokens": "{:,} tokens",
        "context": "context {:,}",
        "positions": "{} positions",
        "queries": "{} queries",
    }
    named = [words[name].format(size) for name, size in sizes.items() if size > 1 or name == "rows"]
    return ", ".join([model.name, *named])


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns standard normal numbers that repeat every :data:`_DRAWN`: drawing all of them would take
    minutes."""
    size = math.prod(shape)
    drawn = torch.randn(min(size, _DRAWN), device=device, dtype=dtype)
    return (drawn if size <= _DRAWN else drawn.repeat(-(-size // _DRAWN))[:size]).view(shape)


def in_pool(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy where engines have their pools: on a CPU, on huge pages."""
    return tensor if tensor.is_cuda else host_zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def int32(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
