"""Builds a quantised weight from a checkpoint's tensors and checks it against the configuration.

| tensor of layer X | contents |
|---|---|
| `X.weight` | float8_e4m3fn or int8 `[out, in]` |
| `X.weight_packed` | int32 `[out, ceil(in / 4)]`: four int8, each plus 128, the first in the lowest byte |
| `X.weight_shape` | shape `[out, in]` of the unpacked weight |
| `X.weight_scale`, `X.weight_scale_inv` | factors of the weight; both names mean the same |
| `X.input_scale` | scales of quantised inputs; not used |

Scales of blocks are `[rows, columns]`, or `[rows, 1, columns, 1]` as ModelOpt writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.checkpoint.quantization import Quantization, Stored, WeightScheme
from kernels.linear.quantized_weight import FP8, QuantizedWeight
from wire.errors import ModelLoadError

_STORED: dict[str, Stored] = {"F8_E4M3": "fp8", "I8": "int8"}
_SCALES = ("weight_scale", "weight_scale_inv")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
UNUSED_SUFFIXES = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale")
"""Suffixes of tensors that quantised checkpoints contain for engines that quantise inputs or KV."""


class StoredTensors(Protocol):
    """A checkpoint's tensors in their stored form."""

    def __contains__(self, name: str) -> bool: ...

    def stored_dtype(self, name: str) -> str | None:
        """Return the dtype as safetensors spells it; None if there is no such tensor."""

    def stored(self, name: str) -> Tensor: ...

    def path_of(self, name: str) -> Path: ...


class OneOfStack:
    """One layer of a stack of tensors ``[layers, ...]``, with the interface of a single layer.

    Each layer may have its own scales, or all layers share the same scales.
    """

    def __init__(self, stacked: StoredTensors, index: int, size: int) -> None:
        self._stacked = stacked
        self._index = index
        self._size = size

    def __contains__(self, name: str) -> bool:
        return name in self._stacked and not name.endswith(".weight_shape")  # the shape of the whole stack

    def stored_dtype(self, name: str) -> str | None:
        return self._stacked.stored_dtype(name)

    def stored(self, name: str) -> Tensor:
        tensor = self._stacked.stored(name)
        return tensor[self._index] if tensor.ndim > 0 and len(tensor) == self._size else tensor

    def path_of(self, name: str) -> Path:
        return self._stacked.path_of(name)


def is_quantized(tensors: StoredTensors, layer: str) -> bool:
    """Return whether a linear layer's weight is stored quantised. The configuration is not consulted."""
    return f"{layer}.weight_packed" in tensors or tensors.stored_dtype(f"{layer}.weight") in _STORED


def quantized_weight(
    tensors: StoredTensors, layer: str, shape: tuple[int, int], quantization: Quantization | None
) -> QuantizedWeight:
    """Return the whole weight ``[out, in]`` of ``layer``, in the checkpoint's memory.

    Raises :class:`ModelLoadError` if the weight is misshapen, holds NaN, or has an unknown scheme.
    """
    packed = f"{layer}.weight_packed"
    name = packed if packed in tensors else f"{layer}.weight"
    stored = "packed int8" if name == packed else _STORED[str(tensors.stored_dtype(name))]
    scheme = None if quantization is None else quantization.scheme_stored_as(layer, stored)
    if scheme is None:
        raise ModelLoadError(
            f"{tensors.path_of(name)}: tensor {name} is stored as {tensors.stored_dtype(name)}, and neither "
            "quantization_config in config.json nor hf_quant_config.json says how to read it"
        )
    for unsupported in ("weight_zero_point", "weight_g_idx"):
        if f"{layer}.{unsupported}" in tensors and tensors.stored(f"{layer}.{unsupported}").any():
            raise ModelLoadError(
                f"{tensors.path_of(name)}: tensor {layer}.{unsupported} is not zero; weights with zero "
                "points or with reordered inputs are not supported"
            )
    values = _unpacked(tensors, layer, shape) if name == packed else _values(tensors, name, shape)
    return _with_scales(tensors, layer, values, scheme)


def _values(tensors: StoredTensors, name: str, shape: tuple[int, int]) -> Tensor:
    values = tensors.stored(name)
    if tuple(values.shape) != shape:
        raise _misshapen(tensors, name, values, list(shape))
    if values.dtype == FP8 and (values.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ModelLoadError(f"{tensors.path_of(name)}: tensor {name} holds NaN")
    return values


def _unpacked(tensors: StoredTensors, layer: str, shape: tuple[int, int]) -> Tensor:
    name, shape_name = f"{layer}.weight_packed", f"{layer}.weight_shape"
    packed, num_words = tensors.stored(name), -(-shape[1] // 4)
    if packed.dtype != torch.int32 or tuple(packed.shape) != (shape[0], num_words):
        raise _misshapen(tensors, name, packed, [shape[0], num_words])
    if shape_name in tensors and tensors.stored(shape_name).tolist() != list(shape):
        raise ModelLoadError(
            f"{tensors.path_of(name)}: tensor {shape_name} says {tensors.stored(shape_name).tolist()}; "
            f"expected {list(shape)} by config.json"
        )
    # Four bytes per word, the lowest first: every machine that runs this code stores words in this order.
    return (packed.view(torch.uint8)[:, : shape[1]] ^ 0x80).view(torch.int8)


def _with_scales(tensors: StoredTensors, layer: str, values: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    name = next((name for s in _SCALES if (name := f"{layer}.{s}") in tensors), None)
    if name is None:
        raise ModelLoadError(
            f"{tensors.path_of(_any_of(tensors, layer))}: {layer} is quantised and lacks {layer}.{_SCALES[0]}"
        )
    scales, (num_outputs, num_inputs) = tensors.stored(name), values.shape
    if scales.dtype not in _FLOATS:
        raise _misshapen(tensors, name, scales, "a floating point dtype")
    scales = scales.to(torch.float32)
    if scales.ndim == 4 and scales.shape[1] == scales.shape[3] == 1:  # ModelOpt's blocks
        scales = scales.view(scales.shape[0], scales.shape[2])
    if not scales.isfinite().all():
        raise ModelLoadError(f"{tensors.path_of(name)}: tensor {name} is not finite")
    if scales.numel() == 1:
        return QuantizedWeight(values, scales.view(1, 1), num_outputs, num_inputs)
    if tuple(scales.shape) in ((num_outputs,), (num_outputs, 1)):
        return QuantizedWeight(values, scales.view(num_outputs, 1), 1, num_inputs)
    grid = scheme.scale_grid(num_outputs, num_inputs)
    if tuple(scales.shape) != grid:
        expected = f"shape {list(grid)}, as the checkpoint's quantization config says"
        raise _misshapen(tensors, name, scales, expected)
    return QuantizedWeight(
        values, scales, scheme.block_rows or num_outputs, scheme.block_columns or num_inputs
    )


def _any_of(tensors: StoredTensors, layer: str) -> str:
    packed = f"{layer}.weight_packed"
    return packed if packed in tensors else f"{layer}.weight"


def _misshapen(tensors: StoredTensors, name: str, found: Tensor, expected: object) -> ModelLoadError:
    dtype = str(found.dtype).removeprefix("torch.")
    return ModelLoadError(
        f"{tensors.path_of(name)}: tensor {name} is {dtype} of shape {list(found.shape)}; expected {expected}"
    )
