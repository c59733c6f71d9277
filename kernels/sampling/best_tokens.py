"""Finds the worst of the best tokens of a row of logits on a GPU, without a sort.

Better means: a larger logit, or the same logit and a lower token id.
A program goes through its row by blocks.
"""

from __future__ import annotations

from kernels.gpu.triton_jit import tl, triton_jit


@triton_jit
def worst_kept(x_ptr, vocab_size, least, top_k, BLOCK: tl.constexpr):
    """Return logit and id of the worst of the ``top_k`` best tokens: a radix select, eight bits at a time."""
    bins = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.int64)
    left = top_k
    total = top_k
    num_equal = top_k
    for digit in tl.static_range(4):
        counts = tl.full((256,), 0, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            v = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + v, mask=v < vocab_size, other=float("-inf"))
            ordered = _ordered(x)
            counted = (v < vocab_size) & (x >= least)
            if digit > 0:
                counted &= (ordered >> (32 - 8 * digit)).to(tl.int64) == prefix
            bin_of = (ordered >> (24 - 8 * digit)) & 255
            counts += tl.histogram(bin_of.to(tl.int32), 256, mask=counted)
        num_counted = tl.sum(counts)
        if digit == 0:
            total = num_counted
        up_to = tl.cumsum(counts)
        chosen = tl.max(tl.where(num_counted - up_to + counts >= left, bins, 0))
        num_equal = tl.sum(tl.where(bins == chosen, counts, 0))
        left -= tl.sum(tl.where(bins > chosen, counts, 0))
        prefix = prefix * 256 + chosen
    last = tl.full((), 2147483647, tl.int32)
    if total > top_k:
        bits = tl.where(prefix >= 2147483648, prefix - 2147483648, 4294967295 - prefix).to(tl.uint32)
        least = bits.to(tl.float32, bitcast=True)
        if left < num_equal:
            last = _nth_equal(x_ptr, vocab_size, least, left, BLOCK)
    return least, last


@triton_jit
def _ordered(x):
    """Return integers, uint32, in the order of the floats; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 4294967295, bits ^ 2147483648).to(tl.uint32)


@triton_jit
def _nth_equal(x_ptr, vocab_size, value, n, BLOCK: tl.constexpr):
    """Return the id of the n-th token with this logit, counted from 1."""
    seen = tl.full((), 0, tl.int32)
    found = tl.full((), 2147483647, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < vocab_size, other=float("-inf"))
        is_equal = ((x == value) & (v < vocab_size)).to(tl.int32)
        place = seen + tl.cumsum(is_equal)
        found = tl.minimum(found, tl.min(tl.where((is_equal > 0) & (place == n), v, 2147483647)))
        seen += tl.sum(is_equal)
    return found
