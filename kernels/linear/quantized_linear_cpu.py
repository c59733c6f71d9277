"""Linear layers with weights of one byte on CPU, for any number of float32 rows.

The weight is stored once, in panels like those of :mod:`kernels.linear.packed_linear`, but of bytes. Its
scales are ``[panels, groups, PANEL]``: for each panel, one row of scales per group of inputs. A decode step
reads one byte per weight. For up to ``ROWS_IN_REGISTERS`` rows the panel is widened in registers. For more
rows a thread widens the panel once to float32. Both ways multiply with ``float32(w) * scale`` and add in the
order of the inputs. So the result has the same bits as if :class:`kernels.linear.packed_linear.PackedLinear`
had the dequantised weight. Times are in docs/quantization.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kernels.cpu.host_memory import host_empty
from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import aligned
from kernels.linear.packed_linear import multiply_panel, padded_bias, partial_sums, run_panels
from kernels.linear.panel_tile import (
    FP8_SCALE_FACTOR,
    panel_width,
    panel_width_here,
    tile_of_fp8,
    tile_of_int8,
    widen_fp8,
    widen_int8,
)
from kernels.linear.quantized_weight import QuantizedWeight

ROWS_IN_REGISTERS = 12
_ROWS_A_READ = 3


@cpu_jit
def _multiply_bytes(
    is_fp8, x, x_stride, panel, num_inputs, group, scales, bias, y, y_stride, live, squares, num_rows
):
    """Multiply a few rows with one panel of bytes."""
    row = 0
    while row < num_rows:
        left = num_rows - row
        size = (left + 1) // 2 if left > 6 else left
        x_row, y_row = x + row * x_stride * 4, y + row * y_stride * 4
        if is_fp8:
            tile_of_fp8(
                size,
                x_row,
                x_stride,
                panel,
                num_inputs,
                group,
                scales,
                bias,
                0,
                y_row,
                y_stride,
                live,
                squares,
                0,
                0,
            )
        else:
            tile_of_int8(
                size,
                x_row,
                x_stride,
                panel,
                num_inputs,
                group,
                scales,
                bias,
                0,
                y_row,
                y_stride,
                live,
                squares,
                0,
                0,
            )
        row += size


@cpu_jit
def _quantized_linear(
    x, x_stride, weight, scales, bias, y, shape, block_rows, threads, is_fp8, squares, begin, end
):
    """Items are all panels of one block of rows, then all panels of the next block."""
    num_rows, num_inputs, num_outputs, group = shape
    width = panel_width_here()
    num_panels = (num_outputs + width - 1) // width
    num_groups = (num_inputs + group - 1) // group
    widened = aligned(num_inputs * width if min(block_rows, num_rows) > ROWS_IN_REGISTERS else 0)
    sums = aligned(partial_sums(min(block_rows, num_rows), num_inputs))
    for item in range(begin, end):
        row = item // num_panels * block_rows
        output = item % num_panels * width
        rows = min(block_rows, num_rows - row)
        x_row = x.ctypes.data + row * x_stride * 4
        panel = weight.ctypes.data + output * num_inputs
        factors = scales.ctypes.data + output * num_groups * 4
        offsets = bias.ctypes.data + output * 4
        place = y.ctypes.data + (row * num_outputs + output) * 4
        live = min(width, num_outputs - output)
        if rows <= ROWS_IN_REGISTERS:
            _multiply_bytes(
                is_fp8,
                x_row,
                x_stride,
                panel,
                num_inputs,
                group,
                factors,
                offsets,
                place,
                num_outputs,
                live,
                squares,
                rows,
            )
            continue
        target = widened.ctypes.data
        if is_fp8:
            widen_fp8(panel, num_inputs, group, factors, target)
        else:
            widen_int8(panel, num_inputs, group, factors, target)
        multiply_panel(
            4, x_row, x_stride, target, target, num_inputs, offsets, place, num_outputs, live, squares, rows,
            sums,
        )  # fmt: skip


@dataclass(frozen=True)
class PackedQuantizedLinear:
    """A weight of bytes in panels, its scales, and its bias (zeros if it has none)."""

    panels: torch.Tensor
    """``[panels, in, PANEL]`` uint8: the bits of float8_e4m3fn or int8"""
    scales: torch.Tensor
    """``[panels, groups, PANEL]`` float32; scales of fp8 are multiplied by 256"""
    bias: torch.Tensor
    """``[panels * PANEL]`` float32"""
    num_outputs: int
    group: int
    """Number of consecutive inputs that share one scale per output."""
    is_fp8: bool

    @classmethod
    def pack(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> PackedQuantizedLinear:
        """Pack a weight ``[out, in]`` and a bias ``[out]``."""
        num_outputs, num_inputs = weight.shape
        width = panel_width()
        num_panels = -(-num_outputs // width)
        missing = num_panels * width - num_outputs
        values = torch.nn.functional.pad(weight.values.view(torch.uint8), (0, 0, 0, missing))
        panels = host_empty(num_panels * num_inputs * width, torch.uint8).view(num_panels, num_inputs, width)
        panels.copy_(values.view(num_panels, width, num_inputs).transpose(1, 2))
        rows = weight.scales.repeat_interleave(weight.block_rows, 0)[:num_outputs]
        rows = torch.nn.functional.pad(
            rows * (FP8_SCALE_FACTOR if weight.is_fp8 else 1.0), (0, 0, 0, missing)
        )
        scales = rows.view(num_panels, width, -1).transpose(1, 2).contiguous()
        padded = padded_bias(bias, num_panels * width)
        return cls(panels, scales, padded, num_outputs, weight.block_columns, weight.is_fp8)

    def __call__(self, x: torch.Tensor, *, relu_squared: bool = False) -> torch.Tensor:
        """Map ``[n, in]`` float32, rows at any stride, to ``[n, out]``."""
        flags = int(self.is_fp8), int(relu_squared)
        return run_panels(
            _quantized_linear,
            x,
            self.panels,
            self.num_outputs,
            _ROWS_A_READ,
            self._arrays,
            (self.group,),
            flags,
        )

    @functools.cached_property
    def _arrays(self) -> tuple[FlatArray, ...]:
        return tuple(FlatArray(tensor) for tensor in (self.panels, self.scales, self.bias))
