"""The operators of :mod:`kernels.cpu.vector`, as LLVM instructions on one vector register.

This module is imported when the first kernel is compiled, since it needs numba. The compiler may contract
products and sums that are written apart into FMA, but may change nothing else: NaN and infinity keep their
meaning, and sums keep their order.
"""

from __future__ import annotations

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic, register_model

from kernels.cpu.exponential_ir import exponential_of, fused, silu_of
from kernels.cpu.format_ir import mix, narrow, round_bfloat16, widen

LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8

_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_CONTRACT = ("contract",)


class VectorType(types.Type):
    """LANES float32 in a register. A vector is local to a kernel, never its argument."""

    def __init__(self):
        super().__init__(name=f"float32x{LANES}")


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    """A vector is its LLVM value."""

    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _FLOATS)


VECTOR = VectorType()


def _indices(numbers):
    return ir.Constant(_INTS, numbers)


_ELEMENTS = {types.float32: ir.FloatType(), types.uint16: ir.IntType(16), types.uint8: ir.IntType(8)}


def place_of(context, builder, numba_types, values, count=LANES):
    """Return a pointer to the place of a vector, or of a number, given by an array and an index."""
    array = cgutils.create_struct_proxy(numba_types[0])(context, builder, value=values[0])
    index = context.cast(builder, values[1], numba_types[1], types.intp)
    element = _ELEMENTS[numba_types[0].dtype]
    kind = ir.VectorType(element, count) if count > 1 else element
    return builder.bitcast(builder.gep(array.data, [index]), kind.as_pointer())


def _alignment(kind):
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return 4 if element == ir.FloatType() else element.width // 8


def read_from(builder, place):
    """Read a value from an array of any supported type, as float32."""
    value = builder.load(place)
    value.align = _alignment(value.type)
    return widen(builder, value)


def write_to(builder, value, place):
    kind = place.type.pointee
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    builder.store(narrow(builder, value, element), place).align = _alignment(kind)


@intrinsic
def lanes(typing_context):
    def generate(context, builder, signature, values):
        return ir.Constant(ir.IntType(64), LANES)

    return types.intp(), generate


@intrinsic
def load(typing_context, array, index):
    def generate(context, builder, signature, values):
        return read_from(builder, place_of(context, builder, signature.args, values))

    return VECTOR(array, index), generate


@intrinsic
def store(typing_context, array, index, vector):
    def generate(context, builder, signature, values):
        write_to(builder, values[2], place_of(context, builder, signature.args, values))
        return context.get_dummy_value()

    return types.none(array, index, vector), generate


@intrinsic
def load_number(typing_context, array, index):
    def generate(context, builder, signature, values):
        return read_from(builder, place_of(context, builder, signature.args, values, count=1))

    return types.float32(array, index), generate


@intrinsic
def store_number(typing_context, array, index, number):
    def generate(context, builder, signature, values):
        place = place_of(context, builder, signature.args, values, count=1)
        write_to(builder, context.cast(builder, values[2], signature.args[2], types.float32), place)
        return context.get_dummy_value()

    return types.none(array, index, number), generate


@intrinsic
def splat(typing_context, number):
    def generate(context, builder, signature, values):
        return splat_of(builder, context.cast(builder, values[0], signature.args[0], types.float32))

    return VECTOR(number), generate


@intrinsic
def prefetch(typing_context, array, index):
    def generate(context, builder, signature, values):
        prefetch_of(builder, place_of(context, builder, signature.args, values))
        return context.get_dummy_value()

    return types.none(array, index), generate


def prefetch_of(builder, place):
    # To the second-level cache: only some twenty lines are under way to the first one, too few for memory.
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    for_reading, second_level, data = (ir.Constant(ir.IntType(32), n) for n in (0, 2, 1))
    builder.call(call, [builder.bitcast(place, kind.args[0]), for_reading, second_level, data])


@intrinsic
def broadcast(typing_context, array, index):
    def generate(context, builder, signature, values):
        return splat_of(
            builder, read_from(builder, place_of(context, builder, signature.args, values, count=1))
        )

    return VECTOR(array, index), generate


def splat_of(builder, number):
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    vector = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(vector, vector, _indices([0] * LANES))


@intrinsic
def multiply_add_number(typing_context, a, b, c):
    def generate(context, builder, signature, values):
        return builder.fma(
            *(context.cast(builder, *one, types.float32) for one in zip(values, signature.args, strict=True))
        )

    return types.float32(a, b, c), generate


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _folded(builder, vector, join):
    """Join the vector's halves, then the halves of the result, until one number is left."""
    width = LANES // 2
    while width:
        moved = [(lane + width) % LANES for lane in range(LANES)]
        vector = join(vector, builder.shuffle_vector(vector, vector, _indices(moved)))
        width //= 2
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _of_vectors(count, result, emit):
    """Return an operator on ``count`` vectors: ``emit(builder, *vectors)`` has the type ``result``."""

    def generate(context, builder, signature, values):
        return emit(builder, *values)

    typings = {
        1: lambda context, a: (result(a), generate),
        2: lambda context, a, b: (result(a, b), generate),
        3: lambda context, a, b, c: (result(a, b, c), generate),
    }
    return intrinsic(typings[count])


add = _of_vectors(2, VECTOR, lambda builder, a, b: builder.fadd(a, b, flags=_CONTRACT))
subtract = _of_vectors(2, VECTOR, lambda builder, a, b: builder.fsub(a, b, flags=_CONTRACT))
multiply = _of_vectors(2, VECTOR, lambda builder, a, b: builder.fmul(a, b, flags=_CONTRACT))
divide = _of_vectors(2, VECTOR, lambda builder, a, b: builder.fdiv(a, b))
multiply_add = _of_vectors(3, VECTOR, fused)
maximum = _of_vectors(2, VECTOR, _larger)
exponential = _of_vectors(1, VECTOR, exponential_of)
silu = _of_vectors(1, VECTOR, silu_of)
sum_of = _of_vectors(1, types.float32, lambda builder, vector: _folded(builder, vector, builder.fadd))
largest_of = _of_vectors(
    1, types.float32, lambda builder, vector: _folded(builder, vector, lambda a, b: _larger(builder, a, b))
)


@intrinsic
def transpose(typing_context, source, index, row_stride, target, target_index, target_stride):
    def generate(context, builder, signature, values):
        _transpose(context, builder, signature.args, values)
        return context.get_dummy_value()

    arguments = (source, index, row_stride, target, target_index, target_stride)
    return types.none(*arguments), generate


def _transpose(context, builder, numba_types, values):
    """Exchange the off-diagonal blocks of 1, 2, 4 … lanes of each pair of rows."""
    rows = [read_from(builder, place) for place in _row_places(context, builder, numba_types[:3], values[:3])]
    width = 1
    while width < LANES:
        low = [lane if not lane & width else LANES + (lane ^ width) for lane in range(LANES)]
        high = [lane | width if not lane & width else LANES + lane for lane in range(LANES)]
        for r in range(LANES):
            if not r & width:
                pair = rows[r], rows[r | width]
                rows[r] = builder.shuffle_vector(*pair, _indices(low))
                rows[r | width] = builder.shuffle_vector(*pair, _indices(high))
        width *= 2
    places = _row_places(context, builder, numba_types[3:], values[3:])
    for row, place in zip(rows, places, strict=True):
        write_to(builder, row, place)


def _row_places(context, builder, numba_types, values):
    """Return pointers to LANES rows, given an array, the first row's index and the stride between rows."""
    array, index, stride = values
    index = context.cast(builder, index, numba_types[1], types.intp)
    stride = context.cast(builder, stride, numba_types[2], types.intp)
    places = []
    for _ in range(LANES):
        places.append(place_of(context, builder, (numba_types[0], types.intp), (array, index)))
        index = builder.add(index, stride)
    return places


@intrinsic
def row_sums(typing_context, array, index):
    def generate(context, builder, signature, values):
        stride = types.int64, ir.Constant(_WORD, LANES)
        numba_types, values = zip(*zip(signature.args, values, strict=True), stride, strict=True)
        places = _row_places(context, builder, numba_types, values)
        return folded_rows(builder, [read_from(builder, place) for place in places])

    return VECTOR(array, index), generate


def folded_rows(builder, rows):
    """Return the sum of each of LANES vectors: halve their number and double the sums in a vector, in turns.

    Lanes that differ in one bit are added, from the lowest bit on.
    """
    width = 1
    while width < LANES:
        own = [lane if not lane & width else LANES + lane for lane in range(LANES)]
        other = [LANES + lane if not lane & width else lane for lane in range(LANES)]
        moved = [lane ^ width for lane in range(LANES)]
        joined = []
        for a, b in zip(rows[::2], rows[1::2], strict=True):
            kept, crossed = (builder.shuffle_vector(a, b, _indices(which)) for which in (own, other))
            crossed = builder.shuffle_vector(crossed, crossed, _indices(moved))
            joined.append(builder.fadd(kept, crossed, flags=_CONTRACT))
        rows, width = joined, 2 * width
    return rows[0]


def _of_interleaved(count):
    """Return an operator that loads ``count`` vectors; lane i of vector k is element ``i * count + k``."""

    @intrinsic
    def load_interleaved(typing_context, array, index):
        def generate(context, builder, signature, values):
            pieces = _adjacent(context, builder, signature.args, values, count)
            pieces = [read_from(builder, place) for place in pieces]
            found = [
                _gathered(builder, pieces, [lane * count + k for lane in range(LANES)]) for k in range(count)
            ]
            return context.make_tuple(builder, signature.return_type, found)

        return UniTuple(VECTOR, count)(array, index), generate

    return load_interleaved


load_3, load_4 = _of_interleaved(3), _of_interleaved(4)


@intrinsic
def store_3(typing_context, array, index, a, b, c):
    def generate(context, builder, signature, values):
        places = _adjacent(context, builder, signature.args, values, 3)
        for number, place in enumerate(places):
            elements = range(number * LANES, (number + 1) * LANES)
            chosen = [element % 3 * LANES + element // 3 for element in elements]
            write_to(builder, _gathered(builder, values[2:], chosen), place)
        return context.get_dummy_value()

    return types.none(array, index, a, b, c), generate


def _adjacent(context, builder, numba_types, values, count):
    """Return pointers to adjacent vectors, given an array and the first one's index."""
    first = context.cast(builder, values[1], numba_types[1], types.intp)
    indices = [builder.add(first, ir.Constant(_WORD, number * LANES)) for number in range(count)]
    kinds = numba_types[0], types.intp
    return [place_of(context, builder, kinds, (values[0], index)) for index in indices]


def _gathered(builder, vectors, elements):
    """Return a vector of the given elements of several vectors, counted through all of them."""
    found = None
    for number, vector in enumerate(vectors):
        here = [element // LANES == number for element in elements]
        if found is None:
            which = [element % LANES for element in elements]
            found = builder.shuffle_vector(vector, vector, _indices(which))
        else:
            pairs = zip(here, elements, strict=True)
            which = [LANES + e % LANES if own else lane for lane, (own, e) in enumerate(pairs)]
            found = builder.shuffle_vector(found, vector, _indices(which))
    return found


@intrinsic
def rounding_key(typing_context, layer_seed, head, position):
    def generate(context, builder, signature, values):
        seed, head, position = _words(builder, values)
        return builder.zext(mix(builder, builder.add(mix(builder, builder.add(seed, head)), position)), _WORD)

    return types.int64(layer_seed, head, position), generate


@intrinsic
def rounded(typing_context, pool, vector, is_stochastic, key, element, stride):
    def generate(context, builder, signature, values):
        by_chance, words = _is_set(builder, values[2]), _words(builder, values[3:])
        return rounded_for(builder, signature.args[0].dtype, values[1], by_chance, *words)

    return VECTOR(pool, vector, is_stochastic, key, element, stride), generate


def rounded_for(builder, stored, vector, by_chance, key, element, stride):
    """Round a vector as an array of numba's type ``stored`` holds it. The last three are 32-bit integers."""
    if stored != types.uint16:
        return vector
    steps = builder.mul(splat_of(builder, stride), _indices(list(range(LANES))))
    elements = builder.add(splat_of(builder, element), steps)
    return round_bfloat16(builder, vector, by_chance, splat_of(builder, key), elements)


@intrinsic
def rounded_number(typing_context, pool, number, is_stochastic, key, element):
    def generate(context, builder, signature, values):
        number = context.cast(builder, values[1], signature.args[1], types.float32)
        if signature.args[0].dtype != types.uint16:
            return number
        return round_bfloat16(builder, number, _is_set(builder, values[2]), *_words(builder, values[3:]))

    return types.float32(pool, number, is_stochastic, key, element), generate


_WORD = ir.IntType(64)


def _words(builder, values):
    """Cut integers to 32 bits."""
    return [builder.trunc(value, ir.IntType(32)) for value in values]


def _is_set(builder, value):
    return builder.icmp_signed("!=", value, ir.Constant(value.type, 0))
