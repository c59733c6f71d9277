"""Draws one random token per position: each token gets an exponential time, and the smallest time wins.

    noise(seed, index, v)  = u in (0, 1), SplitMix64 of only these three
    time(v)                = -log(1 - u) / weight(v)
    token                  = the v with the smallest time, of those with weight(v) > least,
                             or weight(v) = least and v <= last

Times are exponential with rate weight(v). So v wins with probability weight(v) / (sum of the weights of all
tokens that take part), and a token of weight 0 never wins. The race needs neither the weights' sum nor their
order. A filter is described by two numbers: ``least``, the smallest weight that takes part, and ``last``, the
last token that takes part with exactly this weight. The noise depends on nothing that a generator would have
to remember, so a request draws the same tokens in any batch, after a preemption, and on another server.

Two distributions that are raced with the same noise mostly have the same winner. Therefore drafts are drawn
with the target's noise. If the target draws from p and the drafter from q, both draw the same token with
probability sum_i 1 / sum_j max(p_j / p_i, q_j / q_i). They would agree far less if each looked up one common
random number in the running sum of its distribution (docs/decisions/008-acceptance.md).

u has 52 bits: odd multiples of 2^-53, which float64 can all represent, so neither u nor 1 - u is ever 0.
The times that win are small. They come from small u, for which -log(1 - u) keeps its digits. The probability
that a time is below a bound is right to 2^-53.

R is the number of rows, T of positions per row, V of tokens in the vocabulary.

SplitMix64: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014. This race is
equivalent to argmax(log p + Gumbel noise): Maddison, Tarlow, Minka, A* Sampling, 2014.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import as_array, cpu_jit
from kernels.gpu.triton_jit import tl, triton, triton_jit

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NEVER = 1e300
"""Longer than any time: the longest is 37 / 1.4e-45. Not infinity, which is NaN when multiplied by 0."""
_BLOCK = 1024
_STRETCH = 512
_TOKENS_A_THREAD = 1 << 17


def exponential_race(weights: Tensor, least: Tensor, last: Tensor, seeds: Tensor, index: Tensor) -> Tensor:
    """Return the winners, ``[R, T]`` int64; an arbitrary token if none takes part, or if weights are NaN.

    ``weights`` ``[R, T, V]`` float32, contiguous, not negative; ``least`` ``[R, T]`` float32; ``last``
    ``[R, T]`` int64; ``seeds`` ``[R]`` int64; ``index`` ``[R, T]`` int64 is the drawn token's index in its
    sequence. Does not wait for the device.
    """
    assert weights.is_contiguous()
    if weights.is_cuda:
        return _launch(weights, least, last, seeds, index)
    num_rows, num_positions, vocab_size = weights.shape
    winners = torch.empty((num_rows, num_positions), dtype=torch.int64)
    _race_cpu.parallel_for(
        num_rows * num_positions,
        max(1, _TOKENS_A_THREAD // vocab_size),
        as_array(weights.view(-1, vocab_size)),
        as_array(least.contiguous().view(-1)),
        as_array(last.contiguous().view(-1)),
        as_array(seeds.contiguous()),
        as_array(index.contiguous().view(-1)),
        as_array(winners.view(-1)),
    )
    return winners


def exponential_race_reference(
    weights: Tensor, least: Tensor, last: Tensor, seeds: Tensor, index: Tensor
) -> Tensor:
    """Reference of :func:`exponential_race`: all tokens at once."""
    token_ids = torch.arange(weights.shape[2], device=weights.device)
    times = -torch.log(1 - noise(seeds[:, None, None], index[:, :, None], token_ids)) / weights
    runs = (weights > least[..., None]) | ((weights == least[..., None]) & (token_ids <= last[..., None]))
    return times.where(runs, torch.inf).argmin(dim=-1)


def noise(seeds: Tensor, index: Tensor, token_ids: Tensor) -> Tensor:
    """Return numbers in (0, 1), float64, in the shape to which the int64 arguments broadcast."""
    key = _mix(_mix(seeds + _signed(_GOLDEN)) + (index + 1) * _signed(_GOLDEN))
    bits = _mix(key + (token_ids + 1) * _signed(_GOLDEN))
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)


def _signed(constant: int) -> int:
    """Return the constant as int64, since torch has no uint64 arithmetic."""
    return constant - (1 << 64)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift logically: int64's own shift would extend the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# A program goes through its share of a position's tokens in blocks. One logarithm per token would take longer
# than everything else. Since u <= -log(1 - u), almost no logarithm is needed: of V tokens about log(V) beat
# all earlier tokens, so only a few blocks compute logarithms. The caller compares the shares' winners.
@triton_jit
def _race_kernel(
    weights_ptr,
    least_ptr,
    last_ptr,
    seeds_ptr,
    index_ptr,
    times_ptr,
    winners_ptr,
    num_positions,
    vocab_size,
    share,
    BLOCK: tl.constexpr,
    GOLDEN: tl.constexpr = _GOLDEN,
    MIX_1: tl.constexpr = _MIX_1,
    MIX_2: tl.constexpr = _MIX_2,
    NEVER: tl.constexpr = _NEVER,
):
    item = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + item // num_positions).to(tl.uint64)
    index = tl.load(index_ptr + item).to(tl.uint64)
    state = _mix_block(_mix_block(seed + GOLDEN, MIX_1, MIX_2) + (index + 1) * GOLDEN, MIX_1, MIX_2)
    least = tl.load(least_ptr + item)
    last = tl.load(last_ptr + item)
    best = tl.full((), NEVER, tl.float64)
    winner = tl.full((), 0, tl.int64)
    start = tl.program_id(1) * share
    for first in range(start, tl.minimum(start + share, vocab_size), BLOCK):
        v = first + tl.arange(0, BLOCK)
        weight = tl.load(weights_ptr + item * vocab_size + v, mask=v < vocab_size, other=0)
        runs = (weight > least) | ((weight == least) & (v <= last))
        bits = _mix_block(state + (v + 1).to(tl.uint64) * GOLDEN, MIX_1, MIX_2)
        u = ((bits >> 12).to(tl.float64) + 0.5) * (1 / (1 << 52))
        comes_near = runs & (u < best * weight.to(tl.float64))
        if tl.max(comes_near.to(tl.int32)) > 0:
            time = tl.where(comes_near, -tl.log(1.0 - u) / tl.where(comes_near, weight, 1.0), NEVER)
            first_time = tl.min(time)
            if first_time < best:
                winner = tl.min(tl.where(time == first_time, v, vocab_size)).to(tl.int64)
                best = first_time
    out = item * tl.num_programs(1) + tl.program_id(1)
    tl.store(times_ptr + out, best)
    tl.store(winners_ptr + out, winner)


@triton_jit
def _mix_block(z, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


def _launch(weights: Tensor, least: Tensor, last: Tensor, seeds: Tensor, index: Tensor) -> Tensor:
    num_rows, num_positions, vocab_size = weights.shape
    # Enough programs to fill a GPU at one row; few shares per row if there are many rows.
    num_shares = triton.cdiv(vocab_size, max(_BLOCK, vocab_size * num_rows * num_positions // 256))
    share = triton.cdiv(triton.cdiv(vocab_size, num_shares), _BLOCK) * _BLOCK
    shape = (num_rows, num_positions, num_shares)
    times = torch.empty(shape, dtype=torch.float64, device=weights.device)
    winners = torch.empty(shape, dtype=torch.int64, device=weights.device)
    _race_kernel[(num_rows * num_positions, num_shares)](
        weights,
        least.contiguous(),
        last.contiguous(),
        seeds.contiguous(),
        index.contiguous(),
        times,
        winners,
        num_positions,
        vocab_size,
        share,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return winners.gather(2, times.argmin(dim=2, keepdim=True))[..., 0]


_GOLDEN_U64, _MIX_1_U64, _MIX_2_U64 = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
_ONE_BITS = np.uint64(0x3FF0000000000000)
"""The bits of 1.0. Together with the 52 bits of a fraction they are a float64 in [1, 2)."""


@cpu_jit
def _mix_u64(z):
    z = (z ^ (z >> np.uint64(30))) * _MIX_1_U64
    z = (z ^ (z >> np.uint64(27))) * _MIX_2_U64
    return z ^ (z >> np.uint64(31))


@cpu_jit
def _noise(state, i):
    bits = _mix_u64(state + np.uint64(i + 1) * _GOLDEN_U64)
    return np.uint64((bits >> np.uint64(12)) | _ONE_BITS).view(np.float64) - 1.0 + 2.0**-53


@cpu_jit
def _runs(weight, token, least, last):
    return (weight > least) | ((weight == least) & (token <= last))


@cpu_jit
def _may_win(weights, state, best, least, last):
    """Return whether any of the tokens can beat ``best``. Without an early exit, the loop is vectorized."""
    count = np.int64(0)
    for i in range(weights.shape[0]):
        weight = weights[i]
        count += np.int64((_noise(state, i) < best * weight) & _runs(weight, i, least, last))
    return count > 0


@cpu_jit
def _race_cpu(weights, least, last, seeds, index, winners, begin, end):
    vocab_size, num_positions = weights.shape[1], index.shape[0] // seeds.shape[0]
    for item in range(begin, end):
        state = _mix_u64(np.uint64(seeds[item // num_positions]) + _GOLDEN_U64)
        state = _mix_u64(state + np.uint64(index[item] + 1) * _GOLDEN_U64)
        best, winner = _NEVER, 0
        for first in range(0, vocab_size, _STRETCH):
            stretch = weights[item, first : min(first + _STRETCH, vocab_size)]
            start = state + np.uint64(first) * _GOLDEN_U64
            if not _may_win(stretch, start, best, least[item], last[item] - first):
                continue
            for i in range(stretch.shape[0]):
                u = _noise(start, i)
                if u < best * stretch[i] and _runs(stretch[i], i, least[item], last[item] - first):
                    time = -math.log(1.0 - u) / stretch[i]
                    if time < best:
                        best, winner = time, first + i
        winners[item] = winner
