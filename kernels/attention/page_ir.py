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
    place_of,
    prefetch_of,
    read_from,
    splat_of,
)

PAGE_TOKENS = 16
TOKENS = 2
"""Tokens of one page that the ``score_pages`` take."""
PAGES = LANES // TOKENS
STEP = PAGES * PAGE_TOKENS
PRODUCT_ROWS = 4 if LANES == 16 else 6
"""Rows of the products in registers: with two vectors each, 12 sums are in AVX2's 16 registers."""
_SUM_LANES = 8
_PAIR = 2 * LANES
_LINE = 16  # floats of a line of the caches

_WORD = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_EIGHT = ir.VectorType(ir.FloatType(), _SUM_LANES)


def _word(number):
    return ir.Constant(_WORD, number)


@intrinsic
def score_page(typing_context, query, q, keys, place, stride, width, scores, s, ahead, begin, end):
    def generate(context, builder, signature, args):
        words = _words(context, builder, signature, args, (1, 3, 4, 5, 7, 8, 9, 10))
        q, place, stride, width, s, *bounds = words
        rows = [builder.add(place, builder.mul(stride, _word(token))) for token in range(LANES)]
        arrays = _arrays(signature, args, (0, 2, 6))
        [found] = _dot(context, builder, 1, arrays, q, rows, width, bounds)
        _store_scores(context, builder, arrays[2], s, [found], list(range(LANES)))
        return context.get_dummy_value()

    return types.none(query, q, keys, place, stride, width, scores, s, ahead, begin, end), generate


def _scores(num_queries):
    """Return the operator for this many queries, which are a width apart and their scores a step."""

    @intrinsic
    def score_pages(
        typing_context, queries, q, keys, pages, offset, stride, width, scores, s, ahead, begin, end
    ):
        def generate(context, builder, signature, args):
            words = _words(context, builder, signature, args, (1, 4, 5, 6, 8, 9, 10, 11))
            q, offset, stride, width, s, *bounds = words
            places = cgutils.create_struct_proxy(signature.args[3])(context, builder, value=args[3]).data
            pages = [builder.load(builder.gep(places, [_word(page)])) for page in range(PAGES)]
            arrays = _arrays(signature, args, (0, 2, 7))
            inside = [builder.add(offset, builder.mul(stride, _word(token))) for token in range(TOKENS)]
            rows = [builder.add(page, token) for token in inside for page in pages]
            found: list[list[ir.Value]] = [[] for _ in range(num_queries)]
            for r in range(0, LANES, _SUM_LANES):
                sums = _dot(context, builder, num_queries, arrays, q, rows[r : r + _SUM_LANES], width, bounds)
                for vectors, [one] in zip(found, sums, strict=True):
                    vectors.append(one)
            # Lane p * TOKENS + t is token t of page p.
            order = [lane % TOKENS * PAGES + lane // TOKENS for lane in range(LANES)]
            _store_scores(context, builder, arrays[2], s, found, order)
            return context.get_dummy_value()

        arguments = queries, q, keys, pages, offset, stride, width, scores, s, ahead, begin, end
        return types.none(*arguments), generate

    return score_pages


score_pages_1, score_pages_2, score_pages_3 = (_scores(number) for number in (1, 2, 3))


def _words(context, builder, signature, args, which):
    return [context.cast(builder, args[i], signature.args[i], types.intp) for i in which]


def _arrays(signature, args, which):
    return [(signature.args[i], args[i]) for i in which]


def _pointer(context, builder, array, at, size):
    return place_of(context, builder, (array[0], types.intp), (array[1], at), size)


def _dot(context, builder, num_queries, arrays, q, rows, width, bounds):
    """Emit the products of each query with all rows; return its sums, eight in a vector.

    A sum is eight lanes wide whatever the processor has: Zen 4 computes 16 lanes in two halves, so products
    take as long, and lanes are added in three rounds instead of four. Queries share what is read of a row.
    The 16 registers of AVX2 hold the sums of three queries with four rows. A prefetch goes with each line,
    since many at once wait for one another.
    """
    queries, keys, _ = arrays
    ahead, begin, end = bounds
    firsts = [builder.add(q, builder.mul(width, _word(query))) for query in range(num_queries)]
    zero = ir.Constant(_EIGHT, [0.0] * _SUM_LANES)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in rows] for _ in firsts]

    def add_eight(d, chosen, is_ahead):
        places = [_pointer(context, builder, queries, builder.add(first, d), _SUM_LANES) for first in firsts]
        x = [read_from(builder, place) for place in places]
        for r in chosen:
            at = builder.add(rows[r], d)
            if is_ahead:
                prefetch_of(builder, _pointer(context, builder, keys, builder.add(at, ahead), _SUM_LANES))
            key = read_from(builder, _pointer(context, builder, keys, at, _SUM_LANES))
            for one, totals in zip(x, sums, strict=True):
                builder.store(fused(builder, one, key, builder.load(totals[r])), totals[r])

    at_once = len(rows) if num_queries == 1 or LANES > _SUM_LANES else len(rows) // 2
    for first_row in range(0, len(rows), at_once):
        chosen = range(first_row, first_row + at_once)
        with cgutils.for_range_slice(builder, _word(0), width, _word(_LINE), _WORD) as (d, _):
            fetches = builder.and_(builder.icmp_signed("<=", begin, d), builder.icmp_signed("<", d, end))
            with builder.if_else(fetches) as (then, otherwise):
                for branch, is_ahead in ((then, True), (otherwise, False)):
                    with branch:
                        add_eight(d, chosen, is_ahead)
                        add_eight(builder.add(d, _word(_SUM_LANES)), chosen, False)
    return [
        [
            _folded_eight(builder, [builder.load(total) for total in totals[r : r + _SUM_LANES]])
            for r in range(0, len(rows), _SUM_LANES)
        ]
        for totals in sums
    ]


def _folded_eight(builder, rows):
    """Return the sum of each of eight vectors of eight lanes; neighbours are added first."""
    # Within each half of four lanes: two of the first vector, then two of the second.
    even = [0, 2, 8, 10, 4, 6, 12, 14]
    odd = [lane + 1 for lane in even]
    for _ in range(2):
        rows = [_joined(builder, a, b, even, odd) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    low = [0, 1, 2, 3, 8, 9, 10, 11]
    first, second = rows
    return _joined(builder, first, second, low, [lane + 4 for lane in low])


def _joined(builder, a, b, these, those):
    first, second = (builder.shuffle_vector(a, b, _lanes(which)) for which in (these, those))
    return builder.fadd(first, second)


def _store_scores(context, builder, scores, s, found, order):
    """Store a vector of scores for each query: its sums, eight in a vector, in an order."""
    for query, vectors in enumerate(found):
        second = vectors[1] if len(vectors) == 2 else vectors[0]
        row = builder.shuffle_vector(vectors[0], second, _lanes(order))
        at = builder.add(s, _word(query * STEP))
        builder.store(row, _pointer(context, builder, scores, at, LANES)).align = 4


@intrinsic
def order_pages(typing_context, scores, index):
    def generate(context, builder, signature, values):
        first = context.cast(builder, values[1], signature.args[1], types.intp)
        kinds = signature.args[0], types.intp

        def places_of(indices):
            return [
                place_of(context, builder, kinds, (values[0], builder.add(first, _word(at))))
                for at in indices
            ]

        rows = [read_from(builder, place) for place in places_of(range(0, STEP, LANES))]
        width = 1
        while width < PAGES:  # exchange the off-diagonal blocks of each pair of rows
            step = width * TOKENS
            low = [lane if not lane & step else LANES + (lane ^ step) for lane in range(LANES)]
            high = [lane | step if not lane & step else LANES + lane for lane in range(LANES)]
            for r in range(len(rows)):
                if not r & width:
                    pair = rows[r], rows[r | width]
                    rows[r] = builder.shuffle_vector(*pair, _lanes(low))
                    rows[r | width] = builder.shuffle_vector(*pair, _lanes(high))
            width *= 2
        # Row s * PAGES + p is the s-th vector of page p.
        targets = [r % PAGES * PAGE_TOKENS + r // PAGES * LANES for r in range(len(rows))]
        for row, place in zip(rows, places_of(targets), strict=True):
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
        num_pages = builder.sdiv(builder.add(count, _word(PAGE_TOKENS - 1)), _word(PAGE_TOKENS))
        stop = builder.select(builder.icmp_signed("<", last, count), last, count)
        with cgutils.for_range_slice(builder, first, stop, _word(1), _WORD) as (t, _):
            inside = builder.add(builder.mul(t, stride), d)
            with cgutils.for_range_slice(builder, _word(0), num_pages, _word(1), _WORD) as (page, _):
                token = builder.add(builder.mul(page, _word(PAGE_TOKENS)), t)
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
        weight_at = builder.add(p, token)
        places = [pointer(weights, weight_at, query * STEP, 1) for query in range(num_queries)]
        each = [splat_of(builder, read_from(builder, place)) for place in places]
        for v, totals in enumerate(zip(*sums, strict=True)):
            value = read_from(builder, pointer(values, at, v * LANES))
            for weight, total in zip(each, totals, strict=True):
                builder.store(fused(builder, weight, value, builder.load(total)), total)

    with cgutils.for_range_slice(builder, _word(0), whole, _word(2 * _PAIR), _WORD) as (d, _):
        sums_of(d, 4)
    with builder.if_then(builder.icmp_signed("<", whole, width)):
        sums_of(whole, 2)


@intrinsic
def product_rows(typing_context):
    def generate(context, builder, signature, args):
        return _word(PRODUCT_ROWS)

    return types.intp(), generate


def _products(num_vectors):
    """Return the operator for this many vectors of columns."""

    @intrinsic
    def multiply(typing_context, a, i, row, b, j, stride, depth, c, k, width, adds):
        def generate(context, builder, signature, args):
            words = _words(context, builder, signature, args, (1, 2, 4, 5, 6, 8, 9, 10))
            _multiply(context, builder, num_vectors, _arrays(signature, args, (0, 3, 7)), words)
            return context.get_dummy_value()

        return types.none(a, i, row, b, j, stride, depth, c, k, width, adds), generate

    return multiply


multiply_2, multiply_4 = _products(2), _products(4)


def _multiply(context, builder, num_vectors, arrays, words):
    """Emit a product whose sums stay in registers. Each sum is in the order of the depth."""
    a, b, c = arrays
    i, row, j, stride, depth, k, width, adds = words

    def adjacent(array, start):
        return [
            _pointer(context, builder, array, builder.add(start, _word(v * LANES)), LANES)
            for v in range(num_vectors)
        ]

    rows = [builder.add(i, builder.mul(row, _word(r))) for r in range(PRODUCT_ROWS)]
    sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(num_vectors)] for _ in rows]
    places = [adjacent(c, builder.add(k, builder.mul(width, _word(r)))) for r in range(PRODUCT_ROWS)]
    pairs = [pair for one in zip(sums, places, strict=True) for pair in zip(*one, strict=True)]
    with builder.if_else(builder.icmp_signed("!=", adds, _word(0))) as (then, otherwise):
        with then:
            for total, at in pairs:
                builder.store(read_from(builder, at), total)
        with otherwise:
            for total, _ in pairs:
                builder.store(ir.Constant(_FLOATS, [0.0] * LANES), total)
    with cgutils.for_range_slice(builder, _word(0), depth, _word(1), _WORD) as (d, _):
        vectors = [read_from(builder, at) for at in adjacent(b, builder.add(j, builder.mul(d, stride)))]
        for first, totals in zip(rows, sums, strict=True):
            at = _pointer(context, builder, a, builder.add(first, d), 1)
            each = splat_of(builder, read_from(builder, at))
            for total, vector in zip(totals, vectors, strict=True):
                builder.store(fused(builder, each, vector, builder.load(total)), total)
    for total, at in pairs:
        builder.store(builder.load(total), at).align = 4


def _lanes(numbers):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)
