"""Linear layers on CPU, computed in float32, for any number of rows; weights in float32 or bfloat16.

    y[r, o] = act(bias[o] + sum over k of x[r, k] W[o, k])          act = identity or max(y, 0)^2

The weight is stored once, in panels of ``PANEL`` outputs: ``[panels, in, PANEL]``, with zeros after the last
output. It is multiplied tile by tile (:mod:`kernels.linear.panel_tile`). A sum runs over k in order and does
not depend on its tile, so a row's result has the same bits in every batch.

A weight in bfloat16 is widened in registers, each time a tile reads it, and nothing is lost: the result has
the bits of the same weight in float32. For one row it takes half the time, for many rows the same
(docs/decisions/045-weight-dtype.md).

A block of rows stays in the caches while it is multiplied with all panels; threads share panels and blocks of
rows. Times, beside torch's (MKL), are in docs/performance.md.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass

import torch

from kernels.cpu.host_memory import host_empty
from kernels.cpu.jit import CpuKernel, FlatArray, cpu_jit
from kernels.cpu.threads import kernel_threads
from kernels.cpu.vector import aligned, lanes
from kernels.gpu.strides import adjacent
from kernels.linear.panel_tile import (
    FLOAT_BYTES,
    TILE_ROWS,
    panel_width,
    panel_width_here,
    tile_of_bfloat16,
    tile_of_float32,
    vector_shape,
)

_USUAL_L2_BYTES = 2**20
GRAIN_PRODUCTS = 2**22  # a thread's minimum share: about 100 µs
ROWS_A_READ = 7
_PART_INPUTS = 128
"""The most inputs of a part of a panel: 32 KB with AVX-512, which fit into the L1 cache."""
_AHEAD_BYTES = 1024
"""How far a tile of two to six rows fetches its own panel ahead if a panel is two registers wide. The core's
own prefetchers stop at the end of each 4 KB."""
_LONG_PART_INPUTS = 2048
"""The most inputs of a part for more than 12 rows if a panel is two registers wide. A tile takes 64 bytes of
it in six cycles, and the L2 cache gives three times as many. Between two parts the sums are stored and
loaded."""


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, relu_squared: bool = False
) -> torch.Tensor:
    """Map ``[n, in]`` with weight ``[out, in]`` to ``[n, out]``."""
    y = torch.nn.functional.linear(x, weight, bias)
    return y.relu().square() if relu_squared else y


def padded_bias(bias: torch.Tensor | None, size: int) -> torch.Tensor:
    """Return bias ``[out]`` padded with zeros to ``[size]``; without a bias, only zeros."""
    padded = torch.zeros(size)
    if bias is not None:
        padded[: len(bias)] = bias
    return padded


@functools.cache
def _row_block_elements() -> int:
    """Return how many elements of x a block of rows has: they fill half of a core's L2 cache. If a panel is
    two registers wide, they fill twice that cache: a tile takes 24 bytes of x in six cycles, which the L3
    cache gives too, and panels come from memory less often.
    """
    name = "SC_LEVEL2_CACHE_SIZE"  # unknown to some systems, and 0 on others
    known = os.sysconf(name) if name in os.sysconf_names else 0
    l2_elements = (known if known > 0 else _USUAL_L2_BYTES) // FLOAT_BYTES
    return l2_elements * 2 if vector_shape()[1] == 2 else l2_elements // 2


def block_rows_for(num_inputs: int) -> int:
    """Return how many rows at most are multiplied with all panels before the next rows."""
    return max(TILE_ROWS, _row_block_elements() // num_inputs // TILE_ROWS * TILE_ROWS)


def pack_panels(weight: torch.Tensor, panels: torch.Tensor) -> None:
    """Write a weight ``[out, in]`` to ``[panels, in, PANEL]``, with zeros after the last output."""
    num_outputs, num_inputs = weight.shape
    width = panels.shape[2]
    whole = num_outputs // width
    panels[:whole] = weight[: whole * width].view(whole, width, num_inputs).transpose(1, 2)
    if whole < len(panels):
        panels[whole] = 0
        panels[whole, :, : num_outputs - whole * width] = weight[whole * width :].T


def panels_like(weight: torch.Tensor, *before: int) -> torch.Tensor:
    """Return room ``[*before, panels, in, PANEL]`` for weights ``[out, in]`` in their dtype."""
    num_outputs, num_inputs = weight.shape
    width = panel_width()
    shape = *before, -(-num_outputs // width), num_inputs, width
    return host_empty(math.prod(shape), weight.dtype).view(shape)


def as_bytes(panels: torch.Tensor) -> FlatArray:
    """Return panels as kernels get them, whatever their dtype is."""
    return FlatArray(panels.view(-1).view(torch.uint8))


def run_panels(
    kernel: CpuKernel, x: torch.Tensor, panels: torch.Tensor, num_outputs: int, rows_a_read: int,
    arrays: tuple[FlatArray, ...], sizes: tuple[int, ...], flags: tuple[int, ...],
) -> torch.Tensor:  # fmt: skip
    """Map ``[n, in]`` float32, rows at any stride, with ``panels`` ``[panels, in, PANEL]`` to ``[n, out]``.

    ``sizes`` follow the numbers of rows, inputs and outputs in the kernel's shape. The kernel's items are all
    panels of one block of rows, then all panels of the next block. Blocks are of similar size. Reading a
    panel from memory takes as long as computing ``rows_a_read`` rows.
    """
    num_rows, num_inputs = x.shape
    y = torch.empty(num_rows, num_outputs)
    if num_rows == 0:
        return y
    x = adjacent(x)
    num_blocks = -(-num_rows // block_rows_for(num_inputs))
    num_tiles = -(-num_rows // TILE_ROWS)
    block_rows = -(-num_tiles // num_blocks) * TILE_ROWS
    products = max(min(block_rows, num_rows), rows_a_read) * num_inputs * panels.shape[2]
    kernel.parallel_for(
        -(-num_rows // block_rows) * len(panels),
        1 + GRAIN_PRODUCTS // products,
        FlatArray(x),
        x.stride(0),
        *arrays,
        y,
        (num_rows, num_inputs, num_outputs, *sizes),
        block_rows,
        kernel_threads(),
        *flags,
    )
    return y


@cpu_jit
def partial_sums(most_rows, num_inputs):
    """Return the number of floats that :func:`multiply_panel` needs between two parts of a panel."""
    in_parts = most_rows > 6 and num_inputs > _PART_INPUTS
    return most_rows * panel_width_here() if in_parts else 0


@cpu_jit
def item_after(item, begin, end, threads):
    """Return the item that this thread probably takes after ``item`` of its share: behind the last one, the
    other threads have a share each."""
    return item + 1 if item + 1 < end else end + (threads - 1) * (end - begin)


@cpu_jit
def multiply_panel(
    item_bytes, x, x_stride, panel, following, num_inputs, bias, y, y_stride, live, squares, num_rows, sums
):
    """Multiply all rows with a panel of float32 (``item_bytes`` 4) or bfloat16 (2).

    Up to six rows are one tile, which reads the panel once. More rows take it in parts: while the first two
    tiles use a part, each fetches one half of the next part, or of the first one of ``following``, the panel
    that this thread multiplies next. Otherwise the first tile of each part would wait for memory, and memory
    for the later tiles. If the first tile fetched all, memory would wait for the second, since a core has
    few fetches under way. Between two parts the sums are in ``sums``. Tiles are of similar size, since small
    tiles wait for loads.
    """
    width = panel_width_here()
    has_narrow_panels = width == 2 * lanes()
    in_parts = num_rows > 6
    most = _LONG_PART_INPUTS if num_rows > 12 and has_narrow_panels else _PART_INPUTS
    num_parts = (num_inputs + most - 1) // most if in_parts else 1
    step = (num_inputs + num_parts - 1) // num_parts
    kept = lanes() if live <= lanes() else width  # whole registers: the next part loads nothing unwritten
    for first in range(0, num_inputs, step):
        count = min(step, num_inputs - first)
        is_last = first + count == num_inputs
        row = 0
        while row < num_rows:
            left = num_rows - row
            size = min(6, left)
            if 6 < left < 12:
                size = (left + 1) // 2
            saved = sums.ctypes.data + row * width * 4
            start, start_stride = (bias, 0) if first == 0 else (saved, width)
            target, target_stride = (y + row * y_stride * 4, y_stride) if is_last else (saved, width)
            x_tile, part = x + (row * x_stride + first) * 4, panel + first * width * item_bytes
            share, ahead = 0, 0
            if in_parts and row < 12:
                share, ahead = 2, following - part if is_last else count * width * item_bytes
                ahead += count * width * item_bytes // 2 if row > 0 else 0
            elif has_narrow_panels and 1 < num_rows <= 6:
                share, ahead = 1, _AHEAD_BYTES
            if item_bytes == 4:
                tile_of_float32(
                    size, x_tile, x_stride, part, count, count, 0, start, start_stride, target, target_stride,
                    live if is_last else kept, squares if is_last else 0, share, ahead,
                )  # fmt: skip
            else:
                tile_of_bfloat16(
                    size, x_tile, x_stride, part, count, count, 0, start, start_stride, target, target_stride,
                    live if is_last else kept, squares if is_last else 0, share, ahead,
                )  # fmt: skip
            row += size


@cpu_jit
def _linear(x, x_stride, weight, bias, y, shape, block_rows, threads, squares, begin, end):
    """Items are all panels of one block of rows, then all panels of the next block."""
    num_rows, num_inputs, num_outputs, item_bytes = shape
    width = panel_width_here()
    num_panels = (num_outputs + width - 1) // width
    sums = aligned(partial_sums(min(block_rows, num_rows), num_inputs))
    for item in range(begin, end):
        row = item // num_panels * block_rows
        output = item % num_panels * width
        following = item_after(item, begin, end, threads) % num_panels * width
        multiply_panel(
            item_bytes,
            x.ctypes.data + row * x_stride * 4,
            x_stride,
            weight.ctypes.data + output * num_inputs * item_bytes,
            weight.ctypes.data + following * num_inputs * item_bytes,
            num_inputs,
            bias.ctypes.data + output * 4,
            y.ctypes.data + (row * num_outputs + output) * 4,
            num_outputs,
            min(width, num_outputs - output),
            squares,
            min(block_rows, num_rows - row),
            sums,
        )


@dataclass(frozen=True)
class PackedLinear:
    """A weight in panels, and its bias (zeros if it has none)."""

    panels: torch.Tensor
    """``[panels, in, PANEL]`` float32 or bfloat16"""
    bias: torch.Tensor
    """``[panels * PANEL]``"""
    num_outputs: int

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Pack a weight ``[out, in]`` and a bias ``[out]``.

        A weight in bfloat16 keeps its dtype; any other becomes float32.
        """
        if weight.dtype != torch.bfloat16:
            weight = weight.float()
        panels = panels_like(weight)
        pack_panels(weight, panels)
        return cls(panels, padded_bias(bias, len(panels) * panel_width()), len(weight))

    def __call__(self, x: torch.Tensor, *, relu_squared: bool = False) -> torch.Tensor:
        """Map ``[n, in]``, rows at any stride, to ``[n, out]`` in x's dtype, rounded once."""
        sizes, flags = (self.panels.itemsize,), (int(relu_squared),)
        y = run_panels(
            _linear, x.float(), self.panels, self.num_outputs, ROWS_A_READ, self._arrays, sizes, flags
        )
        return y.to(x.dtype)

    @functools.cached_property
    def _arrays(self) -> tuple[FlatArray, ...]:
        return as_bytes(self.panels), FlatArray(self.bias)
