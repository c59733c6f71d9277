"""The operators of :mod:`kernels.ssm.state_rows`, as LLVM instructions on vector registers.

This module is imported when the first kernel is compiled, since it needs numba. Each operator has one loop
over columns; the rows that it takes together are written out in it. So each load of a token's vectors serves
all rows, and the rows' sums stay in registers until they are folded together.
"""

from __future__ import annotations

import inspect

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
    rounded_for,
    splat_of,
    write_to,
)

HALF = LANES // 2
"""Rows whose sums are in registers at once."""

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_ZERO = ir.Constant(_FLOATS, [0.0] * LANES)


def _word(number):
    return ir.Constant(_WORD, number)


class _Arguments:
    """An operator's arguments by name, with what the operators emit about them."""

    def __init__(self, context, builder, names, signature, values):
        self.context, self.builder = context, builder
        self._kinds = dict(zip(names, signature.args, strict=True))
        self._values = dict(zip(names, values, strict=True))

    def word(self, name):
        return self.context.cast(self.builder, self._values[name], self._kinds[name], types.intp)

    def splat(self, name):
        number = self.context.cast(self.builder, self._values[name], self._kinds[name], types.float32)
        return splat_of(self.builder, number)

    def vector(self, name):
        return self._values[name]

    def pointer(self, array, at, count=LANES):
        kinds, values = (self._kinds[array], types.intp), (self._values[array], at)
        return place_of(self.context, self.builder, kinds, values, count)

    def load(self, array, at, count=LANES):
        return read_from(self.builder, self.pointer(array, at, count))

    def places(self, index, stride, first, count, n):
        """Return the indices of column n of ``count`` rows from the first one on."""
        stride = self.word(stride)
        at = self.builder.add(self.word(index), n)
        if first:
            at = self.builder.add(at, self.builder.mul(stride, _word(first)))
        found = [at]
        for _ in range(count - 1):
            found.append(self.builder.add(found[-1], stride))
        return found

    def keep(self, h, place, row, n):
        """Store columns n of a row, rounded if the array has 16 bits. Return what was stored."""
        builder = self.builder
        element = builder.add(self.word("element"), builder.mul(self.word("width"), _word(row)))
        key, element = (builder.trunc(word, _INT) for word in (self.word("key"), builder.add(element, n)))
        chance = self._values["by_chance"]
        chance = builder.icmp_signed("!=", chance, ir.Constant(chance.type, 0))
        h = rounded_for(builder, self._kinds["target"].dtype, h, chance, key, element, ir.Constant(_INT, 1))
        write_to(builder, h, self.pointer("target", place))
        return h

    def columns(self):
        """Return the loop over whole vectors of columns, and its index."""
        return cgutils.for_range_slice(self.builder, _word(0), self.word("whole"), _word(LANES), _WORD)

    def sums(self, count):
        return [cgutils.alloca_once_value(self.builder, _ZERO) for _ in range(count)]

    def add_product(self, a, b, total):
        self.builder.store(fused(self.builder, a, b, self.builder.load(total)), total)


def _operator(names, result, emit):
    """Return an operator with these arguments: ``emit(arguments)`` has the type ``result``."""
    names = names.split()

    def operator(typing_context, *kinds):
        def generate(context, builder, signature, values):
            found = emit(_Arguments(context, builder, names, signature, values))
            return context.get_dummy_value() if found is None else found

        return result(*kinds), generate

    # numba would pass *kinds as one tuple.
    order = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("context", *names)]
    operator.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
    return intrinsic(operator)


def _advance(count):
    def emit(a):
        sums = []
        for first in range(0, count, HALF):
            sums += _advance_group(a, first, min(HALF, count - first))
        return folded_rows(a.builder, sums + [_ZERO] * (LANES - count))

    return emit


def _advance_group(a, first, count):
    sums, decays = a.sums(count), a.splat("decay")
    gains = [a.pointer("gains", _word(first + p), 1) for p in range(count)]
    with a.columns() as (n, _):
        B, C = (a.load(array, a.builder.add(a.word(at), n)) for array, at in ("Bb", "Cc"))
        sources, targets, fetched = (
            a.places(index, stride, first, count, n)
            for index, stride in (("s", "stride"), ("t", "target_stride"), ("f", "fetched_stride"))
        )
        for p in range(count):
            prefetch_of(a.builder, a.pointer("fetched", fetched[p]))
            written = a.builder.fmul(splat_of(a.builder, a.builder.load(gains[p])), B)
            h = fused(a.builder, a.load("source", sources[p]), decays, written)
            a.keep(h, targets[p], first + p, n)
            a.add_product(h, C, sums[p])
    return [a.builder.load(total) for total in sums]


_ADVANCE = (
    "source s stride target t target_stride fetched f fetched_stride decay gains B b C c whole"
    " width by_chance key element"
)
advance_rows = _operator(_ADVANCE, VECTOR, _advance(LANES))
advance_4_rows = _operator(_ADVANCE, VECTOR, _advance(4))


def _read(a):
    sums = a.sums(2 * HALF)
    with a.columns() as (n, _):
        k, q = (a.load(array, a.builder.add(a.word("at"), n)) for array in ("keys", "queries"))
        for p, place in enumerate(a.places("s", "stride", 0, HALF, n)):
            prefetch_of(a.builder, a.pointer("source", a.builder.add(place, a.word("ahead"))))
            h = a.load("source", place)
            a.add_product(h, k, sums[p])
            a.add_product(h, q, sums[HALF + p])
    return folded_rows(a.builder, [a.builder.load(total) for total in sums])


def _update(reads):
    def emit(a):
        builder, sums = a.builder, a.sums(2 * HALF)
        deltas = [_lanes_of(builder, a.vector("deltas"), [p] * LANES) for p in range(HALF)]
        decays = a.splat("decay")
        with a.columns() as (n, _):
            k = a.load("keys", builder.add(a.word("at"), n))
            later = [a.load(array, builder.add(a.word("later"), n)) for array in ("keys", "queries") if reads]
            sources = a.places("s", "stride", 0, HALF, n)
            targets = a.places("t", "target_stride", 0, HALF, n)
            for p in range(HALF):
                prefetch_of(builder, a.pointer("target", builder.add(targets[p], a.word("ahead"))))
                h = builder.fmul(a.load("source", sources[p]), decays)
                h = a.keep(fused(builder, deltas[p], k, h), targets[p], p, n)
                for vector, total in zip(later, (sums[p], sums[HALF + p]), strict=False):
                    a.add_product(h, vector, total)
        return folded_rows(builder, [builder.load(total) for total in sums]) if reads else None

    return emit


def _solve(a):
    """``u = beta (v - decay m)`` and ``y = decay o + u kq``; m and o are the two halves of the sums."""
    builder, sums = a.builder, a.vector("sums")
    m, o = (_lanes_of(builder, sums, range(first, first + HALF)) for first in (0, HALF))
    decay, beta, kq = (_lanes_of(builder, a.splat(name), range(HALF)) for name in ("decay", "beta", "kq"))
    lost = builder.fmul(decay, m)
    u = builder.fmul(beta, builder.fsub(a.load("v", a.word("at"), HALF), lost))
    write_to(builder, fused(builder, u, kq, builder.fmul(decay, o)), a.pointer("y", a.word("out"), HALF))
    return _lanes_of(builder, u, [*range(HALF)] * 2)


def _lanes_of(builder, vector, lanes):
    lanes = list(lanes)
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_INT, len(lanes)), lanes))


_UPDATE = (
    "source s stride target t target_stride ahead decay deltas keys {} whole width by_chance key element"
)
read_half = _operator("source s stride ahead keys queries at whole", VECTOR, _read)
solve_half = _operator("sums decay beta kq v at y out", VECTOR, _solve)
update_half = _operator(_UPDATE.format("at"), types.none, _update(reads=False))
update_and_read_half = _operator(_UPDATE.format("queries at later"), VECTOR, _update(reads=True))
