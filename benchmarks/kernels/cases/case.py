"""One op at one shape, and who computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from benchmarks.kernels.cases.models import Model
from benchmarks.kernels.cases.work import Work

LEAST_TOKENS = 256
"""Rows of so many are the tokens of a prompt."""

_DRAWN = (1 << 20) + 13

Call = Callable[[], object]
"""Computes the op once, on operands that it is bound to."""

Bind = Callable[[SimpleNamespace], Call]
"""Binds a contender to a set of operands, which it may lay out anew. ImportError: it is not installed."""


@dataclass(frozen=True)
class Case:
    """One row of the table. Nothing is allocated before ``operands`` is called."""

    op: str
    shape: str
    """Model, then rows, tokens and the like."""
    work: Work
    weight_bytes: int
    """Of the whole model: what a step reads before it comes to these operands again."""
    operands: Callable[[torch.device], SimpleNamespace]
    """A set of operands on the device, other random numbers every time."""
    ours: Bind
    peers: Mapping[str, Bind] = field(default_factory=dict)
    compiled: str | None = None
    """The peer that torch.compile is tried on too; None if it has nothing to fuse or a loop to unroll."""
    comparable: bool = True
    """Whether all contenders' first outputs are the same but for rounding."""

    @property
    def contenders(self) -> dict[str, Bind]:
        return {"ours": self.ours, **self.peers}


def case_name(model: Model, **sizes: int) -> str:
    """``8 B, batch 8, 4 positions``; one position or query goes without saying."""
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
    """Standard normal, the same numbers again every :data:`_DRAWN`: drawing them all would take minutes."""
    size = math.prod(shape)
    drawn = torch.randn(min(size, _DRAWN), device=device, dtype=dtype)
    return (drawn if size <= _DRAWN else drawn.repeat(-(-size // _DRAWN))[:size]).view(shape)


def int32(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
