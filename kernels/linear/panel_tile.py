"""The innermost loop of linear layers on CPU: a tile of up to six rows times a panel of outputs.

    sums[r, o] = bias[o] + sum over k of x[r, k] w[k, o]        y = act(sums), act = identity or max(., 0)^2

All sums are in vector registers. For each k the panel's row is read, one input per row is broadcast, and each
sum takes one fused multiply-add. The additions come in the order of k, so a row's result has the same bits in
every tile. A panel is ``[in, PANEL]`` of one of these types:

| stored | weight |
|---|---|
| float32 | the stored value |
| bfloat16 | the stored value, widened without loss: its bits are the upper half of a float32 |
| fp8 (float8_e4m3fn) | float32(w) * scale |
| int8 | float32(w) * scale |

``scales`` are ``[groups, PANEL]``: one row per group of ``group`` inputs. An fp8 number is widened by way of
float16, for which the machine has instructions: its seven low bits, shifted left by seven, are a float16 of
a 256th of its value, also for subnormals. Therefore scales of fp8 are multiplied by 256. The product with the
scale is rounded once, so the sums have the same bits as with a weight that was dequantised in advance.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal

from kernels.cpu.compiler import CpuIntrinsic

TILE_ROWS = 6
ROWS_BY_PAIRS = 4
"""From this number of rows on, a tile takes two inputs in one iteration of its loop. The loop has four
instructions of its own, beside up to 34 that compute. Of two threads that share a core, each starts three
instructions a cycle, as many as a tile of six rows needs without those four."""
FLOAT_BYTES = 4
FP8_SCALE_FACTOR = 256.0

_LINE_BYTES = 64
_NARROW = 3
"""Stands for a share in the choice of a tile: one register's outputs, nothing fetched ahead."""

Stored = Literal["float32", "bfloat16", "fp8", "int8"]

STORED_BYTES: dict[Stored, int] = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1}
_SHARES: dict[Stored, tuple[int, ...]] = {
    "float32": (0, 1, 2),
    "bfloat16": (0, 1, 2),
    "fp8": (0,),
    "int8": (0,),
}
"""What a tile can fetch ahead: nothing, as many bytes as it reads of its panel, or half as many."""


@functools.cache
def vector_shape() -> tuple[int, int]:
    """Return the number of floats in a vector register of this machine, and a panel's width in registers.

    For a tile of six rows, the sums, a row of the panel and a broadcast input take 29 of 32 registers with
    AVX-512 or NEON, 15 of 16 with AVX2.
    """
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 4
    return (8, 2) if features.get("avx2") else (4, 4)


def panel_width() -> int:
    """Return the number of outputs in a panel."""
    lanes, registers = vector_shape()
    return lanes * registers


@CpuIntrinsic
def panel_width_here() -> Any:
    """Return :func:`panel_width` in compiled kernels."""
    from numba.core import types
    from numba.extending import intrinsic

    @intrinsic
    def width(typing_context):
        def generate(context, builder, signature, args):
            return context.get_constant(types.int64, panel_width())

        return types.int64(), generate

    return width


@CpuIntrinsic
def tile_of_float32() -> Any:
    return _tile("float32")


@CpuIntrinsic
def tile_of_bfloat16() -> Any:
    return _tile("bfloat16")


@CpuIntrinsic
def tile_of_fp8() -> Any:
    return _tile("fp8")


@CpuIntrinsic
def tile_of_int8() -> Any:
    return _tile("int8")


@CpuIntrinsic
def widen_fp8() -> Any:
    return _widening("fp8")


@CpuIntrinsic
def widen_int8() -> Any:
    return _widening("int8")


def _tile(stored: Stored) -> Any:
    """``tile(num_rows, x, x_stride, panel, num_inputs, group, scales, start, start_stride, y, y_stride, live,
    squares, share, ahead)``

    Arguments are addresses, and strides in elements. Row r's sums begin with ``start[r * start_stride :]``.
    The first ``live`` outputs are stored; if one register holds them, no others are computed, and nothing is
    fetched ahead. float32 and bfloat16 have one group and no scales. ``share`` is one of :data:`_SHARES`.
    What is fetched begins ``ahead`` bytes after the panel.
    """
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def generate(context, builder, signature, args):
        end = builder.append_basic_block()
        integer = ir.IntType(64)
        lanes, registers = vector_shape()
        fits = builder.icmp_signed("<=", args[-4], ir.Constant(integer, lanes))
        variant = builder.select(fits, ir.Constant(integer, _NARROW), args[-2])
        switch = builder.switch(builder.add(builder.mul(args[0], ir.Constant(integer, 4)), variant), end)
        for num_rows, share in itertools.product(range(1, TILE_ROWS + 1), (*_SHARES[stored], _NARROW)):
            block = builder.append_basic_block()
            switch.add_case(ir.Constant(integer, num_rows * 4 + share), block)
            builder.position_at_end(block)
            is_narrow = share == _NARROW
            operands = [*args[1:-2], 0 if is_narrow else share, args[-1]]
            _Emitter(builder, 1 if is_narrow else registers).tile(stored, num_rows, *operands)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    @intrinsic
    def tile(
        typing_context, n, x, x_stride, panel, inputs, group, scales, start, start_stride,
        y, y_stride, live, squares, share, ahead,
    ):  # fmt: skip
        return types.void(*[types.int64] * 15), generate

    return tile


def _widening(stored: Stored) -> Any:
    """``widen(panel, num_inputs, group, scales, target)`` writes the panel to ``[in, PANEL]`` in float32."""
    from numba.core import types
    from numba.extending import intrinsic

    def generate(context, builder, signature, args):
        _Emitter(builder, vector_shape()[1]).widening(stored, *args)
        return context.get_dummy_value()

    @intrinsic
    def widen(typing_context, panel, num_inputs, group, scales, target):
        return types.void(*[types.int64] * 5), generate

    return widen


class _Emitter:
    """Emits the instructions of a tile of ``registers`` by some rows at a builder's position."""

    def __init__(self, builder: Any, registers: int) -> None:
        from llvmlite import ir

        self.ir, self.builder, self.registers = ir, builder, registers
        self.lanes, _ = vector_shape()
        self.integer, self.real = ir.IntType(64), ir.FloatType()
        self.vector = ir.VectorType(self.real, self.lanes)

    def tile(
        self,
        stored,
        num_rows,
        x,
        x_stride,
        panel,
        num_inputs,
        group,
        scales,
        start,
        start_stride,
        y,
        y_stride,
        live,
        squares,
        share,
        ahead,
    ):
        builder = self.builder
        x, start, y = (builder.inttoptr(base, self.real.as_pointer()) for base in (x, start, y))
        rows = [builder.gep(x, [builder.mul(x_stride, self.at(r))]) for r in range(num_rows)]
        first = [
            self.load(start, builder.add(builder.mul(start_stride, self.at(r)), self.at(v * self.lanes)))
            for r in range(num_rows)
            for v in range(self.registers)
        ]
        fetched = builder.add(panel, ahead)
        fma = self.function(f"llvm.fma.v{self.lanes}f32", self.vector, *[self.vector] * 3)

        def add(k, weights, sums, *, is_even=True):
            if share:
                self.fetch(fetched, k, panel_width() * STORED_BYTES[stored] // share, is_even=is_even)
            added = []
            for row in range(num_rows):
                value = self.splat(builder.load(builder.gep(rows[row], [k])))
                own = sums[row * self.registers : (row + 1) * self.registers]
                added += [builder.call(fma, [value, w, s]) for w, s in zip(weights, own, strict=True)]
            return added

        by_pairs = num_rows >= ROWS_BY_PAIRS
        sums = self.loop_over_panel(stored, panel, num_inputs, group, scales, first, add, by_pairs=by_pairs)
        self.store_tile(sums, num_rows, y, y_stride, live, squares)

    def fetch(self, base, k, num_bytes, *, is_even):
        """Fetch ``num_bytes`` for input k to the second-level cache. If they are less than a line, even
        inputs fetch one for the odd inputs too."""
        ir, builder = self.ir, self.builder
        if num_bytes < _LINE_BYTES and not is_even:
            return
        kind = ir.IntType(8).as_pointer()
        fetch = self.function("llvm.prefetch.p0i8", ir.VoidType(), kind, *[ir.IntType(32)] * 3)
        first = builder.add(base, builder.mul(k, self.at(num_bytes)))
        for start in range(0, num_bytes, _LINE_BYTES):
            place = builder.inttoptr(builder.add(first, self.at(start)), kind)
            for_reading, second_level, data = (ir.Constant(ir.IntType(32), n) for n in (0, 2, 1))
            builder.call(fetch, [place, for_reading, second_level, data])

    def widening(self, stored, panel, num_inputs, group, scales, target):
        target = self.builder.inttoptr(target, self.real.as_pointer())

        def write(k, weights, carried):
            first = self.builder.mul(k, self.at(panel_width()))
            for v, weight in enumerate(weights):
                place = self.builder.gep(target, [self.builder.add(first, self.at(v * self.lanes))])
                self.builder.store(
                    weight, self.builder.bitcast(place, self.vector.as_pointer())
                ).align = FLOAT_BYTES
            return []

        self.loop_over_panel(stored, panel, num_inputs, group, scales, [], write)

    def loop_over_panel(self, stored, panel, num_inputs, group, scales, carried, body, *, by_pairs=False):
        """Emit ``carried = body(k, weights, carried)`` for every k. Returns the last ``carried``.

        ``by_pairs``: see :data:`ROWS_BY_PAIRS`; weights with scales are never taken by pairs.
        """
        if stored in ("float32", "bfloat16"):
            is_narrow = stored == "bfloat16"
            element = self.ir.IntType(16) if is_narrow else self.real
            panel = self.builder.inttoptr(panel, element.as_pointer())
            row = self.bfloat16_row if is_narrow else self.panel_row

            def one_input(k, found, **place):
                return body(k, row(panel, k), found, **place)

            if by_pairs:
                return self.loop_by_pairs(num_inputs, carried, one_input)
            return self.loop(self.at(0), num_inputs, self.at(1), carried, one_input)
        panel = self.builder.inttoptr(panel, self.ir.IntType(8).as_pointer())
        scales = self.builder.inttoptr(scales, self.real.as_pointer())

        def one_group(first, found):
            place = self.builder.mul(self.builder.sdiv(first, group), self.at(panel_width()))
            factors = self.panel_row(scales, place, scaled=False)
            behind = self.builder.add(first, group)
            stop = self.builder.select(self.builder.icmp_signed("<", behind, num_inputs), behind, num_inputs)

            def one_scaled_input(k, sums):
                stored_row = self.stored_row(panel, k, self.ir.IntType(8))
                weights = [
                    self.builder.fmul(self.widened(stored, w), factor)
                    for w, factor in zip(stored_row, factors, strict=True)
                ]
                return body(k, weights, sums)

            return self.loop(first, stop, self.at(1), found, one_scaled_input)

        return self.loop(self.at(0), num_inputs, group, carried, one_group)

    def loop(self, first, stop, step, carried, body):
        """Emit a loop that runs at least once and carries vectors from one iteration to the next."""
        builder = self.builder
        before = builder.block
        head = builder.append_basic_block()
        builder.branch(head)
        builder.position_at_end(head)
        number = builder.phi(self.integer)
        phis = [builder.phi(self.vector) for _ in carried]
        results = body(number, phis)
        following = builder.add(number, step)
        number.add_incoming(first, before)
        number.add_incoming(following, builder.block)
        for phi, initial, result in zip(phis, carried, results, strict=True):
            phi.add_incoming(initial, before)
            phi.add_incoming(result, builder.block)
        end = builder.append_basic_block()
        builder.cbranch(builder.icmp_signed("<", following, stop), head, end)
        builder.position_at_end(end)
        return results

    def loop_by_pairs(self, stop, carried, body):
        """Emit ``carried = body(k, carried)`` for every k below ``stop``, two in one iteration."""
        builder = self.builder
        even = builder.and_(stop, self.at(-2))

        def pair(k, found):
            return body(builder.add(k, self.at(1), flags=("nsw",)), body(k, found), is_even=False)

        carried = self.loop_if_any(self.at(0), even, self.at(2), carried, pair)
        return self.loop_if_any(even, stop, self.at(1), carried, body)

    def loop_if_any(self, first, stop, step, carried, body):
        """Emit a loop that may not run at all."""
        builder = self.builder
        before = builder.block
        with builder.if_then(builder.icmp_signed("<", first, stop)):
            results = self.loop(first, stop, step, carried, body)
            inside = builder.block
        phis = [builder.phi(self.vector) for _ in carried]
        for phi, initial, result in zip(phis, carried, results, strict=True):
            phi.add_incoming(initial, before)
            phi.add_incoming(result, inside)
        return phis

    def panel_row(self, base, k, *, scaled=True):
        """Load a row of float32 into registers; ``k`` counts rows if ``scaled``, else elements."""
        first = self.builder.mul(k, self.at(panel_width())) if scaled else k
        return [
            self.load(base, self.builder.add(first, self.at(v * self.lanes))) for v in range(self.registers)
        ]

    def bfloat16_row(self, base, k):
        """Load row k of a panel of bfloat16 and widen it: shifted left by 16 bits it is float32."""
        ints = self.ir.VectorType(self.ir.IntType(32), self.lanes)
        by_16 = self.ir.Constant(ints, [16] * self.lanes)
        return [
            self.builder.bitcast(self.builder.shl(self.builder.zext(bits, ints), by_16), self.vector)
            for bits in self.stored_row(base, k, self.ir.IntType(16))
        ]

    def stored_row(self, base, k, element):
        """Load row k of a panel of integers, each vector of them at any alignment of its elements."""
        kind = self.ir.VectorType(element, self.lanes)
        first = self.builder.mul(k, self.at(panel_width()))
        row = []
        for v in range(self.registers):
            place = self.builder.gep(base, [self.builder.add(first, self.at(v * self.lanes))])
            row.append(self.builder.load(self.builder.bitcast(place, kind.as_pointer())))
            row[-1].align = element.width // 8
        return row

    def widened(self, stored, weights):
        """Widen bytes to float32; fp8 becomes a 256th of its value."""
        ir, builder = self.ir, self.builder
        if stored == "int8":
            return builder.sitofp(weights, self.vector)
        halves = ir.VectorType(ir.IntType(16), self.lanes)
        shifted = builder.shl(builder.sext(weights, halves), ir.Constant(halves, [7] * self.lanes))
        kept = builder.and_(shifted, ir.Constant(halves, [0xBF80] * self.lanes))
        return builder.fpext(builder.bitcast(kept, ir.VectorType(ir.HalfType(), self.lanes)), self.vector)

    def store_tile(self, sums, num_rows, y, y_stride, live, squares):
        """Store the first ``live`` outputs of each row: whole registers if all live, else under a mask, which
        takes an AVX2 processor of AMD 40 instructions a register."""
        ir, builder = self.ir, self.builder
        zero = ir.Constant(self.vector, [0.0] * self.lanes)
        is_squared = builder.icmp_signed("!=", squares, self.at(0))
        totals = []
        for total in sums:
            # The comparison is ordered: NaN is not below zero and stays NaN.
            positive = builder.select(builder.fcmp_ordered("<", total, zero), zero, total)
            totals.append(builder.select(is_squared, builder.fmul(positive, positive), total))
        pointer = self.vector.as_pointer()
        places = [
            builder.bitcast(
                builder.gep(y, [builder.add(builder.mul(y_stride, self.at(r)), self.at(v * self.lanes))]),
                pointer,
            )
            for r in range(num_rows)
            for v in range(self.registers)
        ]
        all_live = builder.icmp_signed(">=", live, self.at(self.registers * self.lanes))
        with builder.if_else(all_live, likely=True) as (whole, partial):
            with whole:
                for total, place in zip(totals, places, strict=True):
                    builder.store(total, place).align = FLOAT_BYTES
            with partial:
                self.store_masked(totals, places, live)

    def store_masked(self, totals, places, live):
        ir, builder = self.ir, self.builder
        alignment, masks = ir.IntType(32), ir.VectorType(ir.IntType(1), self.lanes)
        store = self.function(
            f"llvm.masked.store.v{self.lanes}f32.p0",
            *(ir.VoidType(), self.vector, self.vector.as_pointer(), alignment, masks),
        )
        numbers, live = ir.VectorType(self.integer, self.lanes), self.splat(live, self.integer)
        masks_of = []
        for v in range(self.registers):
            columns = ir.Constant(numbers, [v * self.lanes + lane for lane in range(self.lanes)])
            masks_of.append(builder.icmp_signed("<", columns, live))
        for i, (total, place) in enumerate(zip(totals, places, strict=True)):
            builder.call(
                store, [total, place, ir.Constant(alignment, FLOAT_BYTES), masks_of[i % self.registers]]
            )

    def at(self, number):
        return self.ir.Constant(self.integer, number)

    def load(self, base, offset):
        place = self.builder.bitcast(self.builder.gep(base, [offset]), self.vector.as_pointer())
        found = self.builder.load(place)
        found.align = FLOAT_BYTES
        return found

    def splat(self, value, element=None):
        ir = self.ir
        empty = ir.Constant(ir.VectorType(element or self.real, self.lanes), ir.Undefined)
        first = self.builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(
            first, empty, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        )

    def function(self, name, result, *arguments):
        module = self.builder.module
        known = module.globals.get(name)
        return known or self.ir.Function(module, self.ir.FunctionType(result, arguments), name)
