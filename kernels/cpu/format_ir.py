"""Number formats of caches as LLVM instructions, for one number or a vector (:mod:`kernels.cpu.vector_ir`).

numpy has neither bfloat16 nor float8_e4m3fn: such arrays are passed as uint16 and uint8
(:func:`kernels.cpu.jit.FlatArray`).

    e4m3    byte s eeee mmm: (-1)^s 2^(e - 7) (1 + m / 8), or 2^-6 m / 8 where e = 0; 0x7F is NaN
    bf16    the upper half of a float32

The formulas of rounding are those of kernels/formats/stochastic_round.py.
"""

from __future__ import annotations

from llvmlite import ir

from kernels.formats.stochastic_round import GOLDEN, MIX_1, MIX_2

_INT = ir.IntType(32)


def _like(kind, scalar):
    """Return the type ``scalar``, or a vector of it with as many elements as ``kind`` has."""
    return ir.VectorType(scalar, kind.count) if isinstance(kind, ir.VectorType) else scalar


def constant(kind, number):
    """Return ``number`` in all elements of ``kind``."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def widen(builder, value):
    """Convert a loaded value to float32, exactly."""
    ints, floats = _like(value.type, _INT), _like(value.type, ir.FloatType())
    if value.type == floats:
        return value
    if value.type == _like(value.type, ir.IntType(8)):
        return _from_e4m3(builder, builder.zext(value, ints), ints, floats)
    bits = builder.shl(builder.zext(value, ints), constant(ints, 16))
    return builder.bitcast(bits, floats)


def narrow(builder, value, element):
    """Convert float32 to the stored type. e4m3 is rounded here. Numbers for bfloat16 are already rounded, so
    only their upper half is kept."""
    if element == ir.FloatType():
        return value
    ints = _like(value.type, _INT)
    bits = builder.bitcast(value, ints)
    if element == ir.IntType(8):
        bits = _to_e4m3(builder, value, bits, ints)
    else:
        bits = builder.lshr(bits, constant(ints, 16))
    return builder.trunc(bits, _like(value.type, element))


def _from_e4m3(builder, byte, ints, floats):
    magnitude = builder.and_(byte, constant(ints, 0x7F))
    # The exponents of the two formats differ by 120. The mantissa of a subnormal number counts units of 2^-9.
    normal = builder.add(builder.shl(magnitude, constant(ints, 20)), constant(ints, 120 << 23))
    small = builder.fmul(builder.sitofp(magnitude, floats), constant(floats, 2.0**-9))
    bits = builder.select(
        builder.icmp_signed("<", magnitude, constant(ints, 8)), builder.bitcast(small, ints), normal
    )
    is_nan = builder.icmp_signed("==", magnitude, constant(ints, 0x7F))
    bits = builder.select(is_nan, constant(ints, 0x7FC00000), bits)
    sign = builder.shl(builder.and_(byte, constant(ints, 0x80)), constant(ints, 24))
    return builder.bitcast(builder.or_(bits, sign), floats)


def _to_e4m3(builder, value, bits, ints):
    """Round to nearest, ties to even; numbers above 448 become 448; infinity and NaN become NaN."""
    floats = value.type
    magnitude = builder.and_(bits, constant(ints, 0x7FFFFFFF))
    normal = builder.lshr(_nearest(builder, magnitude, ints, 20), constant(ints, 20))
    normal = builder.sub(normal, constant(ints, 120 << 3))
    # The last bit of the sum is worth 2^-9, so the addition rounds to a multiple of 2^-9.
    at_16384 = builder.fadd(builder.bitcast(magnitude, floats), constant(floats, 16384.0))
    small = builder.sub(builder.bitcast(at_16384, ints), constant(ints, 0x46800000))
    byte = builder.select(builder.icmp_signed("<", magnitude, constant(ints, 121 << 23)), small, normal)
    most = constant(ints, 0x7E)
    byte = builder.select(builder.icmp_signed(">", byte, most), most, byte)
    is_finite = builder.icmp_signed("<", magnitude, constant(ints, 0x7F800000))
    byte = builder.select(is_finite, byte, constant(ints, 0x7F))
    sign = builder.and_(builder.lshr(bits, constant(ints, 24)), constant(ints, 0x80))
    return builder.or_(byte, sign)


def _nearest(builder, bits, ints, dropped):
    """Change ``bits`` so that cutting off the lower ``dropped`` bits rounds to nearest, ties to even."""
    last = builder.and_(builder.lshr(bits, constant(ints, dropped)), constant(ints, 1))
    return builder.add(builder.add(bits, last), constant(ints, (1 << (dropped - 1)) - 1))


def mix(builder, bits):
    """See :func:`kernels.formats.stochastic_round.mix`."""
    ints = bits.type
    for shift, factor in ((16, MIX_1), (15, MIX_2)):
        bits = builder.xor(bits, builder.lshr(bits, constant(ints, shift)))
        bits = builder.mul(bits, constant(ints, factor))
    return builder.xor(bits, builder.lshr(bits, constant(ints, 16)))


def round_bfloat16(builder, value, is_stochastic, key, element):
    """Round as kernels/formats/stochastic_round.py describes. ``element`` has the shape of ``value``."""
    ints = _like(value.type, _INT)
    bits = builder.bitcast(value, ints)
    with builder.if_else(is_stochastic) as (then, otherwise):
        with then:
            weyl = builder.mul(element, constant(ints, GOLDEN))
            noise = builder.lshr(mix(builder, builder.add(key, weyl)), constant(ints, 16))
            by_chance = builder.add(bits, noise)
            end_of_then = builder.block
        with otherwise:
            nearest = _nearest(builder, bits, ints, 16)
            end_of_otherwise = builder.block
    moved = builder.phi(ints)
    moved.add_incoming(by_chance, end_of_then)
    moved.add_incoming(nearest, end_of_otherwise)
    moved = builder.and_(moved, constant(ints, 0xFFFF0000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    moved = builder.select(is_nan, constant(ints, 0x7FC00000), moved)
    return builder.bitcast(moved, value.type)
