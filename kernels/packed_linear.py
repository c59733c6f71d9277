"""Linear layers on CPU in float32, for any number of rows.

    y[r, o] = act(bias[o] + sum over k of x[r, k] W[o, k])          act = identity or max(y, 0)^2

The weight is stored once, in panels of ``PANEL`` outputs: ``[panels, in, PANEL]``, zeros behind the last
output. A tile is up to six rows times a panel, its sums in vector registers: an input value is broadcast, a
row of the panel is loaded, and all of the tile's sums take one fused multiply-add each. A sum runs over k in
order and knows nothing of the tile that it stands in: a row's result is the same bits in every batch.

Rows are taken so many at a time that they stay in the L2 cache while all panels pass by; threads share
panels and blocks of rows. µs for 1 / 4 / 32 / 256 rows, one thread of a shared AVX-512 machine:

| weight | here | torch (MKL) | oneDNN, packed |
|---|---|---|---|
| 384 × 256 | 13 / 17 / 75 / 583 | 18 / 22 / 89 / 552 | 51 / 56 / 115 / 632 |
| 3864 × 768 | 650 / 730 / 2,520 / 17,300 | 686 / 1,300 / 3,050 / 16,000 | 900 / 909 / 2,560 / 18,200 |
| 768 × 2304 | 394 / 483 / 1,970 / 13,700 | 429 / 887 / 2,350 / 12,900 | 541 / 525 / 1,800 / 12,500 |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.cpu_jit import as_array, as_flat_array, cpu_intrinsic, cpu_jit
from kernels.host_memory import host_empty

FLOAT_BYTES = 4
TILE_ROWS = 6
_ROW_BLOCK_ELEMENTS = 2**17
"""Inputs that are worked on while all panels pass by: half a megabyte."""
_GRAIN_PRODUCTS = 2**22  # a thread's least share: about 100 µs
_ROWS_A_READ = 7  # a panel comes out of memory in the time that so many rows take to compute


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, relu_squared: bool = False
) -> torch.Tensor:
    """``[n, in]`` and ``[out, in]`` to ``[n, out]``."""
    y = torch.nn.functional.linear(x, weight, bias)
    return y.relu().square() if relu_squared else y


@functools.cache
def vector_shape() -> tuple[int, int]:
    """Floats in a vector register of this machine, and registers that a panel is wide.

    A tile of six rows has its sums, a row of the panel and a broadcast input in 29 of 32 registers with
    AVX-512 or NEON, in 15 of 16 with AVX2.
    """
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 4
    return (8, 2) if features.get("avx2") else (4, 4)


def panel_width() -> int:
    """Outputs of a panel."""
    lanes, registers = vector_shape()
    return lanes * registers


@cpu_intrinsic
def _panel_width() -> Any:
    from numba.core import types
    from numba.extending import intrinsic

    @intrinsic
    def width(typing_context):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return context.get_constant(types.int64, panel_width())

        return types.int64(), generate

    return width


def _tile(num_rows: int) -> Any:
    """The tile of so many rows: addresses and strides in elements, ``live`` outputs are stored.

    ``tile(x, x_stride, panel, num_inputs, bias, y, y_stride, live, squares)``
    """
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    lanes, registers = vector_shape()
    integer, real = ir.IntType(64), ir.FloatType()
    vector = ir.VectorType(real, lanes)

    def function(builder, name, result, *arguments):  # type: ignore[no-untyped-def]
        known = builder.module.globals.get(name)
        return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)

    def splat(builder, value, element):  # type: ignore[no-untyped-def]
        empty = ir.Constant(ir.VectorType(element, lanes), ir.Undefined)
        first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(
            first, empty, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        )

    def load(builder, base, offset):  # type: ignore[no-untyped-def]
        address = builder.gep(base, [offset])
        found = builder.load(builder.bitcast(address, vector.as_pointer()))
        found.align = FLOAT_BYTES
        return found

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        x, x_stride, panel, num_inputs, bias, y, y_stride, live, squares = args
        x, panel, bias, y = (builder.inttoptr(base, real.as_pointer()) for base in (x, panel, bias, y))
        at = functools.partial(ir.Constant, integer)
        fma = function(builder, f"llvm.fma.v{lanes}f32", vector, vector, vector, vector)
        rows = [builder.gep(x, [builder.mul(x_stride, at(r))]) for r in range(num_rows)]
        start = [load(builder, bias, at(v * lanes)) for v in range(registers)]

        entry, loop, end = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(integer)
        sums = [[builder.phi(vector) for _ in range(registers)] for _ in range(num_rows)]
        first = builder.mul(k, at(lanes * registers))
        weights = [load(builder, panel, builder.add(first, at(v * lanes))) for v in range(registers)]
        added = []
        for row in range(num_rows):
            value = splat(builder, builder.load(builder.gep(rows[row], [k])), real)
            added.append([builder.call(fma, [value, w, s]) for w, s in zip(weights, sums[row], strict=True)])
        following = builder.add(k, at(1))
        k.add_incoming(at(0), entry)
        k.add_incoming(following, loop)
        for row in range(num_rows):
            for v in range(registers):
                sums[row][v].add_incoming(start[v], entry)
                sums[row][v].add_incoming(added[row][v], loop)
        builder.cbranch(builder.icmp_signed("<", following, num_inputs), loop, end)

        builder.position_at_end(end)
        mask_type = ir.VectorType(ir.IntType(1), lanes)
        store = function(
            builder,
            f"llvm.masked.store.v{lanes}f32.p0",
            ir.VoidType(),
            vector,
            vector.as_pointer(),
            ir.IntType(32),
            mask_type,
        )
        zero = ir.Constant(vector, [0.0] * lanes)
        numbers = ir.VectorType(integer, lanes)
        live, is_squared = splat(builder, live, integer), builder.icmp_signed("!=", squares, at(0))
        for v in range(registers):
            columns = ir.Constant(numbers, [v * lanes + lane for lane in range(lanes)])
            mask = builder.icmp_signed("<", columns, live)
            for row in range(num_rows):
                total = added[row][v]
                # An ordered comparison: NaN is not below zero and comes out as NaN.
                positive = builder.select(builder.fcmp_ordered("<", total, zero), zero, total)
                total = builder.select(is_squared, builder.fmul(positive, positive), total)
                target = builder.gep(y, [builder.add(builder.mul(y_stride, at(row)), at(v * lanes))])
                pointer = builder.bitcast(target, vector.as_pointer())
                builder.call(store, [total, pointer, ir.Constant(ir.IntType(32), FLOAT_BYTES), mask])
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, x, x_stride, panel, num_inputs, bias, y, y_stride, live, squares):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 9), generate

    return tile


@cpu_intrinsic
def _tile_of_1() -> Any:
    return _tile(1)


@cpu_intrinsic
def _tile_of_2() -> Any:
    return _tile(2)


@cpu_intrinsic
def _tile_of_3() -> Any:
    return _tile(3)


@cpu_intrinsic
def _tile_of_4() -> Any:
    return _tile(4)


@cpu_intrinsic
def _tile_of_5() -> Any:
    return _tile(5)


@cpu_intrinsic
def _tile_of_6() -> Any:
    return _tile(6)


@cpu_jit
def _multiply(x, x_stride, panel, num_inputs, bias, y, y_stride, live, squares, num_rows):
    """All rows with one panel; rows are dealt out evenly, as small tiles wait for their loads."""
    row = 0
    while row < num_rows:
        left = num_rows - row
        size = min(6, left)
        if 6 < left < 12:
            size = (left + 1) // 2
        x_row, y_row = x + row * x_stride * 4, y + row * y_stride * 4
        if size == 6:
            _tile_of_6(x_row, x_stride, panel, num_inputs, bias, y_row, y_stride, live, squares)
        elif size == 5:
            _tile_of_5(x_row, x_stride, panel, num_inputs, bias, y_row, y_stride, live, squares)
        elif size == 4:
            _tile_of_4(x_row, x_stride, panel, num_inputs, bias, y_row, y_stride, live, squares)
        elif size == 3:
            _tile_of_3(x_row, x_stride, panel, num_inputs, bias, y_row, y_stride, live, squares)
        elif size == 2:
            _tile_of_2(x_row, x_stride, panel, num_inputs, bias, y_row, y_stride, live, squares)
        else:
            _tile_of_1(x_row, x_stride, panel, num_inputs, bias, y_row, y_stride, live, squares)
        row += size


@cpu_jit
def _linear(x, x_stride, weight, bias, y, shape, block_rows, squares, begin, end):
    """Items are panels of a block of rows, then those of the next block."""
    num_rows, num_inputs, num_outputs = shape
    width = _panel_width()
    num_panels = (num_outputs + width - 1) // width
    for item in range(begin, end):
        row = item // num_panels * block_rows
        output = item % num_panels * width
        _multiply(
            x.ctypes.data + row * x_stride * 4,
            x_stride,
            weight.ctypes.data + output * num_inputs * 4,
            num_inputs,
            bias.ctypes.data + output * 4,
            y.ctypes.data + (row * num_outputs + output) * 4,
            num_outputs,
            min(width, num_outputs - output),
            squares,
            min(block_rows, num_rows - row),
        )


@dataclass(frozen=True)
class PackedLinear:
    """A float32 weight in panels, and its bias (zeros where there is none)."""

    panels: torch.Tensor
    """``[panels, in, PANEL]``"""
    bias: torch.Tensor
    """``[panels * PANEL]``"""
    num_outputs: int

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """From ``[out, in]`` and ``[out]``."""
        num_outputs, num_inputs = weight.shape
        width = panel_width()
        num_panels = -(-num_outputs // width)
        panels = host_empty(num_panels * num_inputs * width).view(num_panels, num_inputs, width)
        whole = num_outputs // width
        panels[:whole] = weight[: whole * width].view(whole, width, num_inputs).transpose(1, 2)
        if whole < num_panels:
            panels[whole] = 0
            panels[whole, :, : num_outputs - whole * width] = weight[whole * width :].T
        padded = torch.zeros(num_panels * width)
        if bias is not None:
            padded[:num_outputs] = bias
        return cls(panels, padded, num_outputs)

    def __call__(self, x: torch.Tensor, *, relu_squared: bool = False) -> torch.Tensor:
        """``[n, in]`` float32, rows at any stride, to ``[n, out]``."""
        num_rows, num_inputs = x.shape
        y = torch.empty(num_rows, self.num_outputs)
        if num_rows == 0:
            return y
        if x.stride(1) != 1:
            x = x.contiguous()
        block_rows = max(TILE_ROWS, _ROW_BLOCK_ELEMENTS // num_inputs // TILE_ROWS * TILE_ROWS)
        num_panels = len(self.panels)
        products = max(min(block_rows, num_rows), _ROWS_A_READ) * num_inputs * self.panels.shape[2]
        _linear.parallel_for(
            -(-num_rows // block_rows) * num_panels,
            1 + _GRAIN_PRODUCTS // products,
            as_flat_array(x),
            x.stride(0),
            self._panels,
            self._bias,
            as_array(y),
            (num_rows, num_inputs, self.num_outputs),
            block_rows,
            int(relu_squared),
        )
        return y

    @functools.cached_property
    def _panels(self) -> np.ndarray:
        return as_array(self.panels.view(-1))

    @functools.cached_property
    def _bias(self) -> np.ndarray:
        return as_array(self.bias)
