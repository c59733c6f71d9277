"""Tensors that are bound once to an operator of this folder.

On a CPU, inspecting the tensors in every step would take longer than computing the rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import as_array


@dataclass(frozen=True, kw_only=True)
class BoundTensors:
    """Base of an operator whose fields are contiguous tensors. Its kernel takes them in the fields' order."""

    def __post_init__(self) -> None:
        assert all(tensor.is_contiguous() for tensor in self._tensors)

    @functools.cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the fields. Tensors of bools are viewed as bytes, for Triton."""
        tensors = [one for field in fields(self) if isinstance(one := getattr(self, field.name), Tensor)]
        return tuple(one.view(torch.uint8) if one.dtype == torch.bool else one for one in tensors)

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(map(as_array, self._tensors))
