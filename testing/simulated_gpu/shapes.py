"""The results of operators without their values: torch computes shapes on its meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from testing.simulated_gpu.device_tensor import mapped


@dataclass(frozen=True)
class Spec:
    """A result that is a new tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def on(self, device: str) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


class Shapes:
    """Results of operators by their arguments. A step calls the same operators again and again."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result with a ``Spec`` in each tensor's place."""
        key = operator, _hashable(args), _hashable(tuple(sorted(kwargs.items())))
        if key not in self._known:
            args, kwargs = mapped(_on_meta, (args, kwargs))
            self._known[key] = mapped(_spec, operator(*args, **kwargs))
        return self._known[key]


def _hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Spec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return type(value), value


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Numbers that became tensors keep their values: a meta tensor would change the result's dtype.
        return value if value.ndim == 0 and type(value) is Tensor else Spec.of(value).on("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _spec(value: Any) -> Any:
    return Spec.of(value) if isinstance(value, Tensor) else value
