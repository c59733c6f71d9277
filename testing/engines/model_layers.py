"""The parts of a model, for tests that compare two models part by part."""

from __future__ import annotations

import torch

from engine.models.layers.linear import Linear
from kernels.moe.packed_experts import GroupedRows, PackedExperts


class OneExpert:
    """A projection of one expert, as a linear layer."""

    packed = None

    def __init__(self, experts: PackedExperts, index: int) -> None:
        self._experts = experts
        self._index = index
        self.in_features = experts.num_inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.full((len(x), 1), self._index)
        grouped = GroupedRows.sort(x, ids, len(self._experts))
        return self._experts(grouped.rows, grouped.segments)


def linears(part: object, seen: set[int] | None = None) -> list[Linear | OneExpert]:
    """Return all linear layers below a model's object, in order."""
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, torch.Tensor | str | int):
        return []
    seen.add(id(part))
    if isinstance(part, Linear):
        return [part]
    if isinstance(part, PackedExperts):
        return [OneExpert(part, index) for index in range(len(part))]
    parts = part if isinstance(part, list | tuple) else getattr(part, "__dict__", {}).values()
    return [layer for inner in parts for layer in linears(inner, seen)]
