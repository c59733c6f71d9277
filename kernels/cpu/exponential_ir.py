"""The exponential and silu of a vector as LLVM instructions (:mod:`kernels.cpu.vector_ir`).

Both have the formula of :func:`kernels.cpu.exp.exp_f32`. With AVX-512 one instruction multiplies by 2^n; the
product is exact, so that the bits are those of the integers that build 2^n elsewhere.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.format_ir import constant

_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOG2_E, _LN2 = 1.44269504, 0.69314718
_SMALLEST, _LARGEST = -87.33, 88.0
_AVX512_LANES = 16
_TO_NEAREST = ir.Constant(ir.IntType(32), 4)  # the rounding that the processor is set to


def exponential_of(builder, x):
    """Emit e^x: 0 below the smallest exponent."""
    inside = _between(builder, x, _SMALLEST, _LARGEST)
    is_small = builder.fcmp_ordered("<", x, constant(x.type, _SMALLEST))
    return builder.select(is_small, constant(x.type, 0.0), _power(builder, inside))


def silu_of(builder, x):
    """Emit x / (1 + e^-x). What e^-x is for large x does not matter, since 1 absorbs it."""
    negative = builder.fsub(
        constant(x.type, 0.0), _between(builder, x, -_LARGEST, -_SMALLEST), flags=("contract",)
    )
    return builder.fdiv(
        x, builder.fadd(constant(x.type, 1.0), _power(builder, negative), flags=("contract",))
    )


def fused(builder, a, b, c):
    """Round once, always: a contracted product and sum stay apart where branches share the product."""
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def _power(builder, x):
    """Emit e^x for numbers between the smallest and the largest, and NaN for NaN."""
    scaled = fused(builder, x, constant(x.type, _LOG2_E), constant(x.type, 0.5))
    n = _call(builder, f"llvm.floor.v{x.type.count}f32", x.type, [scaled])
    r = fused(builder, n, constant(x.type, -_LN2), x)
    p = constant(x.type, _POLYNOMIAL[0])
    for coefficient in (*_POLYNOMIAL[1:], 1.0, 1.0):
        p = fused(builder, p, r, constant(x.type, coefficient))
    return _scaled(builder, p, n)


def _scaled(builder, p, n):
    """Emit p 2^n for whole n."""
    if n.type.count == _AVX512_LANES:
        every_lane = ir.Constant(ir.IntType(_AVX512_LANES), -1)
        operands = [p, n, constant(p.type, 0.0), every_lane, _TO_NEAREST]
        return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", p.type, operands)
    kind = ir.VectorType(ir.IntType(32), n.type.count)
    exponent = builder.add(builder.fptosi(n, kind), ir.Constant(kind, [127] * kind.count))
    two_to_n = builder.bitcast(builder.shl(exponent, ir.Constant(kind, [23] * kind.count)), p.type)
    return builder.fmul(p, two_to_n, flags=("contract",))


def _between(builder, x, least, most):
    """Emit x limited to a range; NaN stays NaN."""
    inside = builder.select(builder.fcmp_ordered("<", x, constant(x.type, least)), constant(x.type, least), x)
    return builder.select(
        builder.fcmp_ordered(">", inside, constant(x.type, most)), constant(x.type, most), inside
    )


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
