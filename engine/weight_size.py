"""Memory that a model's weights take, by its configuration alone.

The model is put together as for loading, out of tensors without memory (torch's meta device), and what it
asks for is added up: what loading allocates on a GPU, whether the files are there or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.model_config import ModelConfig
from engine.models import build_model
from engine.tensor_parallel import ALONE, TensorParallel
from engine.weights import WHOLE, OneOf, Part
from kernels.quantized_weight import QuantizedWeight


def weight_bytes(config: ModelConfig, tp: TensorParallel = ALONE, *, mtp: bool = False) -> int:
    """Bytes of a rank's weights as they are kept; a tied output head counts once.

    With ``mtp`` the MTP layer counts too; it shares embedding and output head.
    """
    weights = CountedWeights(config)
    build_model(config, weights, mtp=mtp, tp=tp)
    return weights.bytes_taken


class CountedWeights:
    """Tensors of whatever is asked for, without memory; see :class:`engine.weights.Weights`."""

    def __init__(self, config: ModelConfig) -> None:
        self.directory = Path()
        self.dtype = config.dtype
        self.quantization = config.quantization
        self.device = torch.device("meta")
        self.bytes_taken = 0

    def __contains__(self, name: str) -> bool:
        """A checkpoint as published has none of the tensors that one may have or lack."""
        return False

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        part: Part = WHOLE,
    ) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        if not part.is_all_of(shape):
            tensor = part.of(tensor)
        self.bytes_taken += tensor.nbytes
        return tensor

    def take_weight(
        self, layer: str, shape: tuple[int, int], *, part: Part = WHOLE, of: OneOf | None = None
    ) -> Tensor | QuantizedWeight:
        scheme = None if self.quantization is None else self.quantization.scheme_of(layer)
        if scheme is None:
            return self.take(f"{layer}.weight", shape, part=part)
        weight = scheme.empty_weight(shape, self.device)
        if not part.is_all_of(shape):
            weight = part.of_quantized(weight)
        self.bytes_taken += weight.nbytes
        return weight

    def is_quantized(self, layer: str) -> bool:
        return self.quantization is not None and self.quantization.scheme_of(layer) is not None

    def number(self, *names: str, default: float) -> float:
        return default

    def unused(self) -> list[str]:
        return []
