"""Chooses each position's token from its logits: the best one, or one drawn from what filters leave.

    greedy    the token with the largest logit, of equal ones the lowest: where temperature = 0
    drawn     of the tokens that remain, the one with the largest
              score(v) = x(v) / temperature - log(-log(1 - u(v)))

u is noise of the row's seed, the drawn token's index and the token alone (:mod:`kernels.sampling.noise`).
exp(-score) is an exponential time with rate exp(x / temperature). So v is drawn with probability exp(x(v) /
temperature) / (the sum over the tokens that remain). The race needs neither this sum nor an order of tokens.

Better means: a larger logit, or the same logit and a lower token id. Three filters follow each other:

    min-p     keeps x(v) >= float32(max x + temperature log(min_p))
    top-k     keeps the top_k best of these; 0, or at least V, keeps all
    top-p     keeps v if the units of the tokens that are better than v and were kept so far add up to less
              than ceil(top_p total), where total is the sum of all units kept so far, and
              units(v) = floor(2^40 exp((x(v) - max x) / temperature))

Units are integers, and so are their sums: they do not depend on the order of addition. Top-p needs no sort:
the winner of all tokens is drawn if the filter keeps it. If not, no token that is worse is kept, and the race
is run again among those that are better. With the same noise, the last winner is that of the kept tokens.

Few tokens need logarithms: since u <= -log(1 - u), a score is at most x / temperature - log(u). The float32
bits of u's first 32 bits bound log(u). Only tokens whose bound reaches the best score so far are computed, in
float64.

R is the number of rows, T of positions per row, V of tokens in the vocabulary. The race is equivalent to
argmax(log p + Gumbel noise): Maddison, Tarlow, Minka, A* Sampling, 2014.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import as_array
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.sampling.best_tokens import worst_kept
from kernels.sampling.noise import coarse_block, key_of, noise, noise_block
from kernels.sampling.sample_tokens_cpu import sample_rows

UNITS = 2.0**40
MOST_SHARES = 256
_BLOCK = 1024
_ROW_BLOCK = 2048
_LOG2_E = 1.4426950408889634
_LOWEST = -3.4028234663852886e38
_GREEDY_TOKENS, _DRAWN_TOKENS = 1 << 20, 1 << 17
"""About as many tokens as one thread reads in 100 µs."""


class _Results(NamedTuple):
    """Where the CPU path writes the results of a shape, and what else it needs to know of the shape."""

    tokens: Tensor
    is_finite: Tensor
    num_items: int
    greedy_grain: int
    drawn_grain: int
    arguments: tuple[np.ndarray, np.ndarray, int, int]

    @classmethod
    def make(cls, num_rows: int, num_positions: int, vocab_size: int) -> _Results:
        tokens = torch.empty((num_rows, num_positions), dtype=torch.int64)
        is_finite = torch.empty((num_rows, num_positions), dtype=torch.bool)
        flat = as_array(tokens.view(-1)), as_array(is_finite.view(-1))
        greedy, drawn = max(1, _GREEDY_TOKENS // vocab_size), max(1, _DRAWN_TOKENS // vocab_size)
        return cls(
            tokens, is_finite, num_rows * num_positions, greedy, drawn, (*flat, num_positions, vocab_size)
        )


@dataclass(frozen=True)
class SampleTokens:
    """Samples for rows of two tables of parameters, whose addresses never change.

    ``numbers`` ``[N, >= 3]`` float32 begins with temperature, top-p, min-p; ``integers`` ``[N, >= 2]`` int64
    with top-k and seed.
    """

    numbers: Tensor
    integers: Tensor
    _results: dict[torch.Size, _Results] = field(default_factory=dict)
    """Results on a CPU by the shape of logits. Allocating them would take as long as a greedy row."""

    def __call__(
        self, logits: Tensor, rows: Tensor, positions: Tensor, *, shift: int, random: bool, filtered: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens, int64, and whether the position's logits are sound, bool; ``[R, T]`` each.

        ``logits`` ``[R, T, V]`` float32; ``rows`` ``[R]`` int64 of the tables. A drawn token's index is
        ``positions`` ``[R, T]`` int64 plus ``shift``. ``random`` says whether some row is not greedy,
        ``filtered`` whether some random row has a filter. Logits are sound if they have no NaN, no plus
        infinity, and some finite number; otherwise the token is meaningless, but in the vocabulary. On a CPU,
        the next call with this shape overwrites the results. Does not wait for the device.
        """
        if not (logits.is_contiguous() and rows.is_contiguous() and positions.is_contiguous()):
            logits, rows, positions = logits.contiguous(), rows.contiguous(), positions.contiguous()
        if logits.is_cuda:
            return _launch(self, logits, rows, positions, shift=shift, random=random, filtered=filtered)
        results = self._results.get(logits.shape)
        if results is None:
            assert logits.dtype == torch.float32
            results = self._results[logits.shape] = _Results.make(*logits.shape)
        sample_rows.parallel_for(
            results.num_items,
            results.drawn_grain if random else results.greedy_grain,
            logits.data_ptr(),
            rows.data_ptr(),
            positions.data_ptr(),
            *results.arguments,
            *self._arrays,
            shift,
        )
        return results.tokens, results.is_finite

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return as_array(self.numbers), as_array(self.integers)


def sample_tokens_reference(
    logits: Tensor, rows: Tensor, positions: Tensor, numbers: Tensor, integers: Tensor, *, shift: int
) -> Tensor:
    """Reference of :class:`SampleTokens` in float64, by a sort: the tokens, for finite logits."""
    temperature, top_p, min_p = numbers[rows, :3].double()[:, :, None, None].unbind(dim=1)
    top_k, seeds = integers[rows, :2][:, :, None, None].unbind(dim=1)
    x, token_ids = logits.double(), torch.arange(logits.shape[2], device=logits.device)
    heat = torch.where(temperature > 0, temperature, 1.0)
    top = x.amax(dim=-1, keepdim=True)
    score = x / heat - torch.log(-torch.log(1 - noise(seeds, (positions + shift)[..., None], token_ids)))
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = x.gather(-1, order)
    kept = ordered >= (top + heat * min_p.log()).float()
    kept &= token_ids < torch.where(top_k > 0, top_k, len(token_ids))
    units = (torch.exp((ordered - top) / heat) * UNITS).long() * kept
    goal = (top_p * units.sum(dim=-1, keepdim=True)).ceil().clamp(min=1)
    kept &= (units.cumsum(dim=-1) - units < goal) | (top_p >= 1)
    places = score.gather(-1, order).where(kept, -torch.inf).argmax(dim=-1, keepdim=True)
    drawn = order.gather(-1, places)[..., 0]
    return torch.where(temperature[..., 0] > 0, drawn, logits.argmax(dim=-1))


# Two launches. The first has a program for each share of a position's tokens: it finds the best token, the
# winner of the race, and NaN. The second has a program for each position: it joins the shares, and of a
# filtered row it reads all logits again, from L2 while they fit, once more for each race and sum.
@triton_jit
def _scan_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    numbers_ptr,
    integers_ptr,
    tops_ptr,
    best_ptr,
    scores_ptr,
    winners_ptr,
    num_positions,
    vocab_size,
    share,
    shift,
    number_columns,
    integer_columns,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + item * vocab_size
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, vocab_size)
    lanes = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    best = tl.full((BLOCK,), 0, tl.int32) + start
    is_nan = tl.full((BLOCK,), 0, tl.int32)
    row = tl.load(rows_ptr + item // num_positions)
    temperature = tl.load(numbers_ptr + row * number_columns)
    score = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), 0, tl.int32)
    if RANDOM:
        key = key_of(tl.load(integers_ptr + row * integer_columns + 1), tl.load(positions_ptr + item) + shift)
        inverse = _inverse(temperature)
        for first in range(start, end, BLOCK):
            v = first + lanes
            x = tl.load(x_ptr + v, mask=v < end, other=float("-inf"))
            best = tl.where(x > tops, v, best)
            tops = tl.where(x > tops, x, tops)
            is_nan |= (x != x).to(tl.int32)
            if temperature > 0:
                score, winner = _race_block(x, v, v < end, key, inverse, score, winner)
    else:
        for first in range(start, end, BLOCK):
            v = first + lanes
            x = tl.load(x_ptr + v, mask=v < end, other=float("-inf"))
            best = tl.where(x > tops, v, best)
            tops = tl.where(x > tops, x, tops)
            is_nan |= (x != x).to(tl.int32)
    out = item * tl.num_programs(1) + tl.program_id(1)
    top = tl.max(tops)
    tl.store(best_ptr + out, tl.min(tl.where(tops == top, best, vocab_size)))
    tl.store(tops_ptr + out, tl.where(tl.max(is_nan) > 0, float("nan"), top))
    if RANDOM:
        tl.store(scores_ptr + out, score)
        tl.store(winners_ptr + out, winner)


@triton_jit
def _inverse(temperature):
    return 1.0 / tl.where(temperature > 0, temperature, 1.0).to(tl.float64)


@triton_jit
def _race_block(
    x, v, runs, key, inverse, score, winner, LOG2_E: tl.constexpr = _LOG2_E, LOWEST: tl.constexpr = _LOWEST
):
    """Let the tokens ``v`` that ``runs`` names run against the best score so far; return the new one."""
    coarse = coarse_block(key, v)
    bits = coarse.to(tl.float32).to(tl.int32, bitcast=True)
    may = x * (inverse * LOG2_E).to(tl.float32) + (159.0 - bits.to(tl.float32) * (1 / (1 << 23)))
    goal = score * LOG2_E
    goal = tl.maximum(goal - 0.01 - (tl.abs(goal) + 64) * (1 / (1 << 21)), LOWEST).to(tl.float32)
    comes_near = runs & (may >= goal)
    if tl.max(comes_near.to(tl.int32)) > 0:
        u = noise_block(key, coarse, v)
        scores = tl.where(comes_near, x.to(tl.float64) * inverse - tl.log(-tl.log(1.0 - u)), float("-inf"))
        highest = tl.max(scores)
        if highest > score:
            winner = tl.min(tl.where(scores == highest, v, 2147483647))
            score = highest
    return score, winner


@triton_jit
def _choose_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    numbers_ptr,
    integers_ptr,
    tops_ptr,
    best_ptr,
    scores_ptr,
    winners_ptr,
    tokens_ptr,
    is_finite_ptr,
    num_positions,
    vocab_size,
    num_shares,
    shift,
    number_columns,
    integer_columns,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SHARES)
    out = item * num_shares + s
    inside = s < num_shares
    tops = tl.load(tops_ptr + out, mask=inside, other=float("-inf"))
    is_nan = tl.max((tops != tops).to(tl.int32)) > 0
    top = tl.max(tl.where(tops == tops, tops, float("-inf")))
    best = tl.load(best_ptr + out, mask=inside, other=vocab_size)
    token = tl.min(tl.where(tops == top, best, vocab_size))
    is_finite = (top < float("inf")) & (top > float("-inf")) & (is_nan == 0)
    if RANDOM:
        row = tl.load(rows_ptr + item // num_positions)
        temperature = tl.load(numbers_ptr + row * number_columns)
        if temperature > 0:
            scores = tl.load(scores_ptr + out, mask=inside, other=float("-inf"))
            winners = tl.load(winners_ptr + out, mask=inside, other=vocab_size)
            token = tl.min(tl.where(scores == tl.max(scores), winners, vocab_size))
            if FILTERED:
                top_p = tl.load(numbers_ptr + row * number_columns + 1)
                min_p = tl.load(numbers_ptr + row * number_columns + 2)
                top_k = tl.load(integers_ptr + row * integer_columns)
                top_k = tl.where(top_k < vocab_size, top_k, 0).to(tl.int32)
                if is_finite & ((top_p < 1.0) | (min_p > 0.0) | (top_k > 0)):
                    seed = tl.load(integers_ptr + row * integer_columns + 1)
                    key = key_of(seed, tl.load(positions_ptr + item) + shift)
                    x_ptr = logits_ptr + item * vocab_size
                    token = _filter(
                        x_ptr, vocab_size, token, top, temperature, top_p, min_p, top_k, key, BLOCK
                    )
    tl.store(tokens_ptr + item, tl.where(token < vocab_size, token, 0).to(tl.int64))
    tl.store(is_finite_ptr + item, is_finite.to(tl.uint8))


@triton_jit
def _filter(x_ptr, vocab_size, winner, top, temperature, top_p, min_p, top_k, key, BLOCK: tl.constexpr):
    """Return the winner of the tokens that the filters keep; ``winner`` is that of all tokens."""
    inverse = _inverse(temperature)
    log_min_p = tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64))
    least = (top + temperature.to(tl.float64) * log_min_p).to(tl.float32)
    least = tl.where(min_p > 0, least, float("-inf"))
    last = tl.full((), 2147483647, tl.int32)  # the last token that is kept of those whose logit is `least`
    if top_k > 0:
        least, last = worst_kept(x_ptr, vocab_size, least, top_k, BLOCK)
    value = tl.load(x_ptr + winner)
    if (value < least) | ((value == least) & (winner > last)):
        winner = _race_row(x_ptr, vocab_size, key, inverse, least, last, float("-inf"), vocab_size, BLOCK)
        value = tl.load(x_ptr + winner)
    if top_p < 1.0:
        slope = 1.0 / temperature
        total, above = _weigh(x_ptr, vocab_size, top, slope, least, last, value, winner, BLOCK)
        goal = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        while above >= goal:
            winner = _race_row(x_ptr, vocab_size, key, inverse, least, last, value, winner, BLOCK)
            value = tl.load(x_ptr + winner)
            total, above = _weigh(x_ptr, vocab_size, top, slope, least, last, value, winner, BLOCK)
    return winner


@triton_jit
def _race_row(x_ptr, vocab_size, key, inverse, least, last, value, token, BLOCK: tl.constexpr):
    """Return the winner of the kept tokens that are better than ``token``, whose logit is ``value``.

    With minus infinity and ``vocab_size``, all kept tokens run.
    """
    score = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), 0, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < vocab_size, other=float("-inf"))
        runs = (x > least) | ((x == least) & (v <= last))
        runs &= (x > value) | ((x == value) & (v < token))
        score, winner = _race_block(x, v, runs & (v < vocab_size), key, inverse, score, winner)
    return winner


@triton_jit
def _weigh(x_ptr, vocab_size, top, slope, least, last, value, token, BLOCK: tl.constexpr):
    """Return the units of all kept tokens, and of those that are better than ``token``."""
    total = tl.full((BLOCK,), 0, tl.int64)
    above = tl.full((BLOCK,), 0, tl.int64)
    for first in range(0, vocab_size, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < vocab_size, other=float("-inf"))
        units = (tl.exp((x - top) * slope) * 1099511627776.0).to(tl.int64)
        units = tl.where((x > least) | ((x == least) & (v <= last)), units, 0)
        total += units
        above += tl.where((x > value) | ((x == value) & (v < token)), units, 0)
    return tl.sum(total), tl.sum(above)


def _launch(
    op: SampleTokens,
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    shift: int,
    random: bool,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, num_positions, vocab_size = logits.shape
    num_items, device = num_rows * num_positions, logits.device
    tokens = torch.empty(positions.shape, dtype=torch.int64, device=device)
    is_finite = torch.empty(positions.shape, dtype=torch.bool, device=device)
    if num_items == 0:
        return tokens, is_finite
    # Enough programs to fill a GPU at one row; few shares per row if there are many rows.
    smallest = max(_BLOCK, vocab_size * num_items // MOST_SHARES)
    num_shares = min(MOST_SHARES, triton.cdiv(vocab_size, smallest))
    share = triton.cdiv(triton.cdiv(vocab_size, num_shares), _BLOCK) * _BLOCK
    tops = torch.empty((num_items, num_shares), dtype=torch.float32, device=device)
    best = torch.empty((num_items, num_shares), dtype=torch.int32, device=device)
    scores, winners = tops, best
    if random:
        scores, winners = torch.empty_like(tops, dtype=torch.float64), torch.empty_like(best)
    parameters, found = (rows, positions, op.numbers, op.integers), (tops, best, scores, winners)
    columns = op.numbers.shape[1], op.integers.shape[1]
    _scan_kernel[(num_items, num_shares)](
        logits,
        *parameters,
        *found,
        num_positions,
        vocab_size,
        share,
        shift,
        *columns,
        RANDOM=random,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    _choose_kernel[(num_items,)](
        logits if filtered else tops,  # which is not read
        *parameters,
        *found,
        tokens,
        is_finite.view(torch.uint8),
        num_positions,
        vocab_size,
        num_shares,
        shift,
        *columns,
        RANDOM=random,
        FILTERED=filtered,
        SHARES=MOST_SHARES,
        BLOCK=_ROW_BLOCK,
        num_warps=8 if filtered else 1,
    )
    return tokens, is_finite
