"""The exponential and silu of a vector as LLVM instructions (:mod:`kernels.cpu.vector_ir`).

Both have the range reduction and the polynomial of :func:`kernels.cpu.exp.exp_f32`, but find 2^n without a
conversion: after 1.5 * 2^23 + 127 is added to a number, its lowest bits are the rounded number plus 127,
which is the exponent of 2^n.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.format_ir import constant

_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOG2_E, _LN2 = 1.44269504, 0.69314718
_SMALLEST, _LARGEST = -88.0, 88.0  # at the smallest, the exponent of 2^n is 0, which makes 2^n 0 as well
_ROUNDING = 1.5 * 2**23 + 127
_MANTISSA_BITS = 23


def exponential_of(builder, x):
    """Emit e^x: 0 where 2^n would be denormal, e^88 above 88, and NaN for NaN."""
    inside = _limited(builder, _limited(builder, x, ">", _SMALLEST), "<", _LARGEST)
    return _power(builder, inside)


def silu_of(builder, x):
    """Emit x / (1 + e^-x). What e^-x is for large x does not matter, since 1 absorbs it."""
    negative = builder.fsub(constant(x.type, -0.0), x)
    power = exponential_of(builder, negative)
    return builder.fdiv(x, builder.fadd(constant(x.type, 1.0), power, flags=("contract",)))


def fused(builder, a, b, c):
    """Round once, always: a contracted product and sum stay apart where branches share the product."""
    return _call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])


def _power(builder, x):
    """Emit e^x for numbers between the smallest and the largest, and NaN for NaN."""
    rounding = constant(x.type, _ROUNDING)
    shifted = fused(builder, x, constant(x.type, _LOG2_E), rounding)
    r = fused(builder, builder.fsub(shifted, rounding), constant(x.type, -_LN2), x)
    p = constant(x.type, _POLYNOMIAL[0])
    for coefficient in (*_POLYNOMIAL[1:], 1.0, 1.0):
        p = fused(builder, p, r, constant(x.type, coefficient))
    integers = ir.VectorType(ir.IntType(32), x.type.count)
    exponent = builder.bitcast(shifted, integers)
    two_to_n = builder.shl(exponent, ir.Constant(integers, [_MANTISSA_BITS] * x.type.count))
    return builder.fmul(p, builder.bitcast(two_to_n, x.type), flags=("contract",))


def _limited(builder, x, operator, bound):
    """Emit x where it is on this side of a bound, else the bound; NaN stays NaN."""
    limit = constant(x.type, bound)
    return builder.select(builder.fcmp_unordered(operator, x, limit), x, limit)


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)
