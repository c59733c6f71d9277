"""A linear layer's weight in one byte per element, with its scales.

    W[o, k] = float32(values[o, k]) * scales[o // block_rows, k // block_columns]

One scale per tensor, per output, per group of inputs or per block: here all of these are blocks of different
sizes. If a weight is cut out of another weight, or joined from several, it gets the largest blocks that fit.
So every element keeps its scale, and nothing is quantised again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_INT8 = 127.0
Range = tuple[int, int]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight ``[out, in]``; the last block of either axis may be smaller."""

    values: Tensor
    """``[out, in]`` float8_e4m3fn or int8"""
    scales: Tensor
    """``[ceil(out / block_rows), ceil(in / block_columns)]`` float32"""
    block_rows: int
    block_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.values.shape
        return num_outputs, num_inputs

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == FP8

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``[out, in]``, rounded once to float32, and once more if ``dtype`` is another type."""
        num_outputs, num_inputs = self.shape
        scales = self.scales.repeat_interleave(self.block_rows, 0)[:num_outputs]
        scales = scales.repeat_interleave(self.block_columns, 1)[:, :num_inputs]
        return (self.values.to(torch.float32) * scales).to(dtype)

    def cut(self, axis: int, ranges: Sequence[Range]) -> QuantizedWeight:
        """Return the weight with only these half-open ranges of one axis, one after the other."""
        values = torch.cat([_slice(self.values, axis, one) for one in ranges], dim=axis)
        block, num_blocks = self._blocks(axis)
        if num_blocks == 1:
            return self._with(axis, values, self.scales, values.shape[axis])
        lengths = [stop - start for start, stop in ranges]
        unit = math.gcd(block, *(start for start, _ in ranges), *lengths[:-1])
        finer = self.scales.repeat_interleave(block // unit, axis)
        parts = [_slice(finer, axis, (start // unit, -(-stop // unit))) for start, stop in ranges]
        return self._with(axis, values, torch.cat(parts, dim=axis), unit)

    def scaled(self, factors: float | Tensor) -> QuantizedWeight:
        """Return the weight with outputs multiplied by ``factors [out]``, or all by one number."""
        if not isinstance(factors, Tensor):
            return replace(self, scales=self.scales * factors)
        rows = self.scales.repeat_interleave(self.block_rows, 0)[: self.shape[0]]
        return replace(self, scales=rows * factors.to(rows)[:, None], block_rows=1)

    def in_blocks(self, rows: int, columns: int) -> QuantizedWeight:
        """Return the weight in blocks of this size, which must divide the present size; a single block may be
        cut into blocks of any size."""
        found = self
        for axis, size in enumerate((rows, columns)):
            block, num_blocks = found._blocks(axis)
            wanted = -(-found.shape[axis] // size)
            repeats = wanted if num_blocks == 1 else block // size
            scales = _slice(found.scales.repeat_interleave(repeats, axis), axis, (0, wanted))
            found = found._with(axis, found.values, scales, size)
        return found

    def rows_padded(self, num_rows: int) -> QuantizedWeight:
        """Return the weight with zero outputs appended, up to ``num_rows`` outputs."""
        missing = num_rows - self.shape[0]
        if missing == 0:
            return self
        none = torch.zeros(missing, self.shape[1], dtype=torch.uint8, device=self.device)
        one = torch.ones(1, 1, device=self.device)
        return join([self, QuantizedWeight(none.view(self.values.dtype), one, missing, self.shape[1])])

    def to(self, device: torch.device) -> QuantizedWeight:
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    def _blocks(self, axis: int) -> tuple[int, int]:
        """Return the size of blocks along an axis, and their number."""
        return (self.block_rows, self.block_columns)[axis], self.scales.shape[axis]

    def _with(self, axis: int, values: Tensor, scales: Tensor, block: int) -> QuantizedWeight:
        if axis == 0:
            return QuantizedWeight(values, scales, block, self.block_columns)
        return QuantizedWeight(values, scales, self.block_rows, block)


def quantized_by_rows(weight: Tensor) -> QuantizedWeight:
    """Round a weight ``[out, in]`` to int8, with one scale for each output, so that its largest becomes 127.

    A row of zeros gets the scale 1.
    """
    weight = weight.to(torch.float32)
    scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST_INT8
    scales = torch.where(scales == 0.0, 1.0, scales)
    values = (weight / scales).round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
    return QuantizedWeight(values, scales, 1, weight.shape[1])


def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join the outputs of weights with the same inputs and dtype, in order."""
    if len(weights) == 1:
        return weights[0]
    num_inputs = weights[0].shape[1]
    columns = math.gcd(*(one.block_columns for one in weights if one.scales.shape[1] > 1)) or num_inputs
    lengths = [one.shape[0] for one in weights]
    rows = math.gcd(*(one.block_rows for one in weights if one.scales.shape[0] > 1), *lengths[:-1])
    scales = [one.in_blocks(rows, columns).scales for one in weights]
    values = torch.cat([one.values for one in weights])
    return QuantizedWeight(values, torch.cat(scales), rows, columns)


def _slice(tensor: Tensor, axis: int, one: Range) -> Tensor:
    return tensor[(slice(None),) * axis + (slice(*one),)]
