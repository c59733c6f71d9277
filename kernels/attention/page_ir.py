"""The operators of :mod:`kernels.attention.page_vectors`, as LLVM instructions on vector registers.

This module is imported when the first kernel is compiled, since it needs numba.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kernels.cpu.exponential_ir import fused
from kernels.cpu.vector_ir import (
    LANES,
    VECTOR,
    folded_rows,
    place_of,
    prefetch_of,
    read_from,
    splat_of,
)

PAGES = 8
TOKENS = LANES // PAGES
"""Tokens of one page that :func:`dot_pages` takes."""
_PAIR = 2 * LANES

_WORD = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


def _word(number):
    return ir.Constant(_WORD, number)


@intrinsic
def dot_page(typing_context, a, a_index, b, place, stride, depth, ahead, begin, end):
    def generate(context, builder, signature, values):
        array, index, rows, *words = _cast(context, builder, signature.args, values)
        place, stride, *rest = words
        places = [builder.add(place, builder.mul(stride, _word(token))) for token in range(LANES)]
        return _dot(context, builder, array, index, rows, [places], *rest)

    return VECTOR(a, a_index, b, place, stride, depth, ahead, begin, end), generate


@intrinsic
def dot_pages(typing_context, a, a_index, b, pages, offset, stride, depth, ahead, begin, end):
    def generate(context, builder, signature, values):
        kinds = [*signature.args[:3], *signature.args[4:]]
        array, index, rows, *words = _cast(context, builder, kinds, [*values[:3], *values[4:]])
        offset, stride, *rest = words
        found = cgutils.create_struct_proxy(signature.args[3])(context, builder, value=values[3])
        firsts = [
            builder.add(builder.load(builder.gep(found.data, [_word(page)])), offset) for page in range(PAGES)
        ]
        places = [
            [builder.add(first, builder.mul(stride, _word(token))) for first in firsts]
            for token in range(TOKENS)
        ]
        return _dot(context, builder, array, index, rows, places, *rest)

    return VECTOR(a, a_index, b, pages, offset, stride, depth, ahead, begin, end), generate


def _cast(context, builder, kinds, values):
    """Return an array with its type, its index, another array with its type, and the other values as
    words."""
    numbers = zip(kinds[3:], values[3:], strict=True)
    words = [context.cast(builder, value, kind, types.intp) for kind, value in numbers]
    index = context.cast(builder, values[1], kinds[1], types.intp)
    return (kinds[0], values[0]), index, (kinds[2], values[2]), *words


def _dot(context, builder, array, index, rows, places, depth, ahead, begin, end):
    """Emit one sum for each place, a list of places after the other.

    A prefetch goes with each product, since many at once wait for one another.
    """

    def pointer(of, at):
        return place_of(context, builder, (of[0], types.intp), (of[1], at))

    def products(d, together, sums, is_ahead):
        x = read_from(builder, pointer(array, builder.add(index, d)))
        for place, total in zip(together, sums, strict=True):
            at = builder.add(place, d)
            if is_ahead:
                prefetch_of(builder, pointer(rows, builder.add(at, ahead)))
            product = fused(builder, x, read_from(builder, pointer(rows, at)), builder.load(total))
            builder.store(product, total)

    found = []
    for together in places:
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * LANES)) for _ in together]
        with cgutils.for_range_slice(builder, _word(0), depth, _word(LANES), _WORD) as (d, _):
            fetches = builder.and_(builder.icmp_signed("<=", begin, d), builder.icmp_signed("<", d, end))
            with builder.if_else(fetches) as (then, otherwise):
                with then:
                    products(d, together, sums, True)
                with otherwise:
                    products(d, together, sums, False)
        found.append([builder.load(total) for total in sums])
    # Lane p * TOKENS + t is token t of page p.
    return folded_rows(builder, [sums[p] for p in range(len(found[0])) for sums in found])


@intrinsic
def order_pages(typing_context, scores, index):
    def generate(context, builder, signature, values):
        first = context.cast(builder, values[1], signature.args[1], types.intp)
        kinds = signature.args[0], types.intp
        places = [
            place_of(context, builder, kinds, (values[0], builder.add(first, _word(LANES * row))))
            for row in range(PAGES)
        ]
        rows = [read_from(builder, place) for place in places]
        width = 1
        while width < PAGES:  # exchange the off-diagonal blocks of each pair of rows
            step = width * TOKENS
            low = [lane if not lane & step else LANES + (lane ^ step) for lane in range(LANES)]
            high = [lane | step if not lane & step else LANES + lane for lane in range(LANES)]
            for r in range(PAGES):
                if not r & width:
                    pair = rows[r], rows[r | width]
                    rows[r] = builder.shuffle_vector(*pair, _lanes(low))
                    rows[r | width] = builder.shuffle_vector(*pair, _lanes(high))
            width *= 2
        for row, place in zip(rows, places, strict=True):
            builder.store(row, place).align = 4
        return context.get_dummy_value()

    return types.none(scores, index), generate


def _adds(num_queries):
    """Return the operator for this many queries, whose weights are a step apart and whose sums a width."""

    @intrinsic
    def add_pages(typing_context, weights, p, values, pages, stride, acc, a, width, ahead, bounds):
        def generate(context, builder, signature, args):
            kinds = signature.args
            words = [context.cast(builder, args[i], kinds[i], types.intp) for i in (1, 4, 6, 7)]
            bound = [builder.extract_value(args[9], i) for i in range(5)]
            found, then = (
                cgutils.create_struct_proxy(kinds[i])(context, builder, value=args[i]).data for i in (3, 8)
            )
            arrays = [(kinds[i], args[i]) for i in (0, 2, 5)]
            _add(context, builder, num_queries, arrays, found, then, words, bound)
            return context.get_dummy_value()

        return types.none(weights, p, values, pages, stride, acc, a, width, ahead, bounds), generate

    return add_pages


add_pages_1, add_pages_2, add_pages_3 = (_adds(number) for number in (1, 2, 3))


def _add(context, builder, num_queries, arrays, pages, ahead, words, bound):
    """Emit the sums, four vectors of each query in registers, and two at the end of an odd width."""
    weights, values, acc = arrays
    p, stride, a, width = words
    first, last, count, begin, end = bound
    pairs = builder.lshr(width, _word(_PAIR.bit_length() - 1))
    whole = builder.shl(builder.lshr(pairs, _word(1)), _word(_PAIR.bit_length()))

    def pointer(of, at, shift=0, size=LANES):
        at = builder.add(at, _word(shift)) if shift else at
        return place_of(context, builder, (of[0], types.intp), (of[1], at), size)

    def sums_of(d, vectors):
        sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(vectors)] for _ in range(num_queries)]
        firsts = [
            builder.add(builder.add(a, builder.mul(width, _word(query))), d) for query in range(num_queries)
        ]
        places = [[pointer(acc, at, v * LANES) for v in range(vectors)] for at in firsts]
        for row, totals in zip(places, sums, strict=True):
            for place, total in zip(row, totals, strict=True):
                builder.store(read_from(builder, place), total)
        num_pages = builder.sdiv(builder.add(count, _word(LANES - 1)), _word(LANES))
        stop = builder.select(builder.icmp_signed("<", last, count), last, count)
        with cgutils.for_range_slice(builder, first, stop, _word(1), _WORD) as (t, _):
            inside = builder.add(builder.mul(t, stride), d)
            with cgutils.for_range_slice(builder, _word(0), num_pages, _word(1), _WORD) as (page, _):
                token = builder.add(builder.mul(page, _word(LANES)), t)
                with builder.if_then(builder.icmp_signed("<", token, count)):
                    add_token(page, token, inside, sums)
        for row, totals in zip(places, sums, strict=True):
            for place, total in zip(row, totals, strict=True):
                builder.store(builder.load(total), place).align = 4

    def add_token(page, token, inside, sums):
        fetches = builder.and_(builder.icmp_signed("<=", begin, page), builder.icmp_signed("<", page, end))
        with builder.if_then(fetches):
            at = builder.add(builder.load(builder.gep(ahead, [page])), inside)
            for v in range(len(sums[0])):
                prefetch_of(builder, pointer(values, at, v * LANES))
        at = builder.add(builder.load(builder.gep(pages, [page])), inside)
        found = [read_from(builder, pointer(values, at, v * LANES)) for v in range(len(sums[0]))]
        for query, totals in enumerate(sums):
            weight = read_from(builder, pointer(weights, builder.add(p, token), query * PAGES * LANES, 1))
            weight = splat_of(builder, weight)
            for value, total in zip(found, totals, strict=True):
                builder.store(fused(builder, weight, value, builder.load(total)), total)

    with cgutils.for_range_slice(builder, _word(0), whole, _word(2 * _PAIR), _WORD) as (d, _):
        sums_of(d, 4)
    with builder.if_then(builder.icmp_signed("<", whole, width)):
        sums_of(whole, 2)


def _lanes(numbers):
    return ir.Constant(ir.VectorType(ir.IntType(32), LANES), numbers)
