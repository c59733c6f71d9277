"""Models that a process has loaded before it was forked into servers of the same machine.

Weights are never written, so all these servers read the same pages of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.weight_dtype import WeightDtype
from engine.models.causal_lm import CausalLM


@dataclass(frozen=True)
class LoadKey:
    """All that decides what a model is loaded like, on one rank without others."""

    model_dir: Path
    dtype: str
    device: str
    load_format: str
    has_mtp: bool
    batch_invariant: bool
    weight_dtype: WeightDtype


@dataclass(frozen=True)
class LoadedModel:
    """A model, and the bytes of its weights as they are stored."""

    model: CausalLM
    weight_bytes: int


_models: dict[LoadKey, LoadedModel] = {}
_keeps: list[bool] = []


def keep_models() -> None:
    """Keeps all models that are loaded from now on, for this process and for those that it forks."""
    _keeps[:] = [True]


def keep(key: LoadKey, loaded: LoadedModel) -> None:
    """Keeps a model if :func:`keep_models` was called."""
    if _keeps:
        _models[key] = loaded


def kept(key: LoadKey) -> LoadedModel | None:
    """Returns the model that was kept for the same settings, if there is one."""
    return _models.get(key)
