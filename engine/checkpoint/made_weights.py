"""Weights that are made on request, without a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_dtype import item_bytes
from engine.checkpoint.weights import WHOLE, OneOf, Part, take_unquantized, take_unquantized_stack
from kernels.linear.quantized_weight import QuantizedWeight


class Values(Protocol):
    """Fills new tensors. Each tensor is a whole one, never a rank's part."""

    def fill(self, tensor: Tensor, name: str) -> None: ...

    def fill_quantized(self, weight: QuantizedWeight, name: str) -> None: ...


class NoValues:
    """Leaves new tensors unfilled. It is used on torch's meta device, whose tensors have no memory."""

    def fill(self, tensor: Tensor, name: str) -> None:
        pass

    def fill_quantized(self, weight: QuantizedWeight, name: str) -> None:
        pass


class MadeWeights:
    """Makes every tensor that the model takes; see :class:`engine.checkpoint.weights.Weights`."""

    def __init__(
        self,
        directory: str | Path,
        config: ModelConfig,
        device: torch.device | str,
        values: Values,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.dtype = config.dtype
        self.quantization = config.quantization
        self.device = torch.device(device)
        self.batch_invariant = batch_invariant
        self.weight_dtype = config.weight_dtype
        self.bytes_taken = 0
        self._values = values

    def __contains__(self, name: str) -> bool:
        """Return False: like a published checkpoint, made weights have no optional tensors."""
        return False

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        part: Part = WHOLE,
    ) -> Tensor:
        """Make a tensor. A part is cut from a whole tensor, so a rank needs memory for the whole one."""
        whole = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        self._values.fill(whole, name)
        tensor = whole if part.is_all_of(shape) else part.of(whole)
        self.bytes_taken += tensor.nbytes
        return tensor

    def take_weight(
        self, layer: str, shape: tuple[int, int], *, part: Part = WHOLE, of: OneOf | None = None
    ) -> Tensor | QuantizedWeight:
        """Make a linear layer's weight, quantised if the configuration says so. See :meth:`take`."""
        name = f"{layer}.weight" if of is None else f"{layer}.{of.index}.weight"
        scheme = None if self.quantization is None else self.quantization.scheme_of(layer)
        if scheme is None:
            before = self.bytes_taken
            taken = take_unquantized(self, name, shape, part)
            self.bytes_taken = before + self._kept_bytes([taken])
            return taken
        weight = scheme.empty_weight(shape, self.device)
        self._values.fill_quantized(weight, name)
        if not part.is_all_of(shape):
            weight = part.of_quantized(weight)
        self.bytes_taken += weight.nbytes
        return weight

    def take_stack(
        self, name: str, shape: tuple[int, int, int], *, part: Part = WHOLE
    ) -> list[Tensor] | list[QuantizedWeight]:
        """Make the weights of several layers. See :meth:`take`."""
        before = self.bytes_taken
        taken = take_unquantized_stack(self, name, shape, part)
        self.bytes_taken = before + self._kept_bytes(taken)
        return taken

    def _kept_bytes(self, weights: Sequence[Tensor | QuantizedWeight]) -> int:
        """Return the bytes that layers keep of these weights, whatever bytes they were made in."""
        each = item_bytes(self.weight_dtype, self.dtype)
        return sum(w.nbytes if isinstance(w, QuantizedWeight) else w.numel() * each for w in weights)

    def is_quantized(self, layer: str) -> bool:
        return self.quantization is not None and self.quantization.scheme_of(layer) is not None

    def number(self, *names: str, default: float) -> float:
        return default

    def unused(self) -> list[str]:
        return []
