"""The operators of :mod:`kernels.sampling.race_vectors`, as LLVM instructions on one vector register.

This module is imported when the first kernel is compiled, since it needs numba.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kernels.cpu.vector_ir import LANES, VECTOR
from kernels.sampling.noise import GOLDEN_32, MIX_3, MIX_4

_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_WORDS, _FLOATS = ir.VectorType(_WORD, LANES), ir.VectorType(ir.FloatType(), LANES)


def _words(number):
    return ir.Constant(_WORDS, [number] * LANES)


def _floats(number):
    return ir.Constant(_FLOATS, [number] * LANES)


def _splat(builder, number):
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    vector = builder.insert_element(undefined, number, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(vector, vector, _words(0))


def _coarse(builder, key, token):
    """Emit the formula of :func:`kernels.sampling.noise.coarse_noise` for ``token`` and those after it."""
    low, high = builder.trunc(key, _WORD), builder.trunc(builder.lshr(key, ir.Constant(_LONG, 32)), _WORD)
    steps = ir.Constant(_WORDS, [lane * GOLDEN_32 & 0xFFFFFFFF for lane in range(LANES)])
    start = builder.add(builder.mul(builder.trunc(token, _WORD), ir.Constant(_WORD, GOLDEN_32)), low)
    z = builder.add(_splat(builder, start), steps)
    z = builder.mul(builder.xor(z, builder.lshr(z, _words(16))), _words(MIX_3))
    z = builder.xor(z, _splat(builder, high))
    z = builder.mul(builder.xor(z, builder.lshr(z, _words(15))), _words(MIX_4))
    return builder.xor(z, builder.lshr(z, _words(16)))


@intrinsic
def noise_bound(typing_context, key, token):
    def generate(context, builder, signature, values):
        token = context.cast(builder, values[1], signature.args[1], types.int64)
        number = builder.uitofp(_coarse(builder, values[0], token), _FLOATS)
        # The bits of a float, read as an integer, are 2^23 (127 + its logarithm to base 2) or a little less.
        bits = builder.sitofp(builder.bitcast(number, _WORDS), _FLOATS)
        product = builder.fmul(bits, _floats(-(2.0**-23)), flags=("contract",))
        return builder.fadd(product, _floats(127.0 + 32.0), flags=("contract",))

    return VECTOR(key, token), generate


@intrinsic
def where_at_least(typing_context, values, least, results, otherwise):
    def generate(context, builder, signature, args):
        least, otherwise = (
            _splat(builder, context.cast(builder, args[i], signature.args[i], types.float32)) for i in (1, 3)
        )
        return builder.select(builder.fcmp_ordered(">=", args[0], least), args[2], otherwise)

    return VECTOR(values, least, results, otherwise), generate


def _mask(builder, flags):
    return builder.zext(builder.bitcast(flags, ir.IntType(LANES)), _LONG)


def _count_bits(context, builder, name, arguments):
    kinds = [argument.type for argument in arguments]
    call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_LONG, kinds), name)
    return builder.call(call, arguments)


def _compared(operator, is_counted):
    """Return an operator that compares lanes with a number: a mask of one bit a lane, or its count."""

    def typing(context, vector, number):
        def generate(context, builder, signature, args):
            number = _splat(builder, context.cast(builder, args[1], signature.args[1], types.float32))
            mask = _mask(builder, builder.fcmp_ordered(operator, args[0], number))
            return _count_bits(context, builder, "llvm.ctpop.i64", [mask]) if is_counted else mask

        return types.int64(vector, number), generate

    return intrinsic(typing)


lanes_at_least = _compared(">=", False)
lanes_equal = _compared("==", False)
count_at_least = _compared(">=", True)


@intrinsic
def first_lane(typing_context, mask):
    def generate(context, builder, signature, args):
        mask = context.cast(builder, args[0], signature.args[0], types.int64)
        return _count_bits(context, builder, "llvm.cttz.i64", [mask, ir.Constant(ir.IntType(1), 1)])

    return types.int64(mask), generate


@intrinsic
def array_at(typing_context, address, count, like):
    """Return the ``count`` elements at ``address`` as an array of the type of ``like``."""

    def generate(context, builder, signature, args):
        from numba.np.arrayobj import make_array, populate_array

        kind = signature.return_type
        array = make_array(kind)(context, builder)
        size = ir.Constant(_LONG, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        count = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = builder.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer())
        populate_array(array, data=pointer, shape=[count], strides=[size], itemsize=size, meminfo=None)
        return array._getvalue()

    kind = types.Array(like.dtype, 1, "C")
    return kind(address, count, like), generate
