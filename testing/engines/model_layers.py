"""The parts of a model, for tests that compare two models part by part."""

from __future__ import annotations

import torch

from engine.models.layers.linear import Linear


def linears(part: object, seen: set[int] | None = None) -> list[Linear]:
    """Return all linear layers below a model's object, in order."""
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, torch.Tensor | str | int):
        return []
    seen.add(id(part))
    if isinstance(part, Linear):
        return [part]
    parts = part if isinstance(part, list | tuple) else getattr(part, "__dict__", {}).values()
    return [layer for inner in parts for layer in linears(inner, seen)]
