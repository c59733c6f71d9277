"""Compares greedy tokens with a reference's logits, where two logits may be equal up to rounding.

| model | two logits are equal if their relative distance is at most | share of such tokens |
|---|---|---|
| float32 | 1e-5 | at most 1 in 2,000 |
| bfloat16, L layers | 3 sqrt(2 L) 2^-8: 0.04 for 6 layers, 0.16 for 100 | at most 1 in 20 |

The second bound follows from the dtype. Each layer rounds the residual stream to 8 bits, by 2^-8 at most.
Another order of sums makes some of these roundings fall the other way, in either of two computations. 2 L
independent errors add up to sqrt(2 L) 2^-8; the bound is three such deviations. Measured with random models
on a CPU, torch's products against packed ones: of 2,880 tokens 42 were others in 6 layers, at most 0.019
apart, and 105 in 24 layers, at most 0.061 apart (bound 0.081). Batch-invariant engines need no such bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TIE = 1e-5
"""If two logits of a float32 model have a smaller relative distance than this, both tokens count as right."""
MAX_TIES = 1 / 2000
MAX_TIES_BFLOAT16 = 1 / 20


def tie_of(dtype: torch.dtype, num_layers: int) -> float:
    """Return the largest relative distance of two logits that count as equal."""
    return TIE if dtype == torch.float32 else 3 * math.sqrt(2 * num_layers) * 2**-8


def count_ties(num_prompt: int, answer: Sequence[int], logits: Tensor, *, tie: float = TIE) -> int:
    """Counts the ties in an answer, every token of which must be one of the reference's best.

    logits ``[num_prompt + len(answer) - 1, vocab]``: the reference's logits after the prompt and each part of
    the answer. Raises :class:`AssertionError` that names the first token that is not among the best.
    """
    ties = 0
    for step, (token, row) in enumerate(zip(answer, logits[num_prompt - 1 :], strict=True)):
        best = float(row.max())
        if token != int(row.argmax()):
            distance = (best - float(row[token])) / max(abs(best), 1e-30)
            assert distance <= tie, (
                f"prompt of {num_prompt}: token {step} is {token}, the reference's {int(row.argmax())}; "
                f"their logits are {distance:.2g} apart, more than {tie:.2g}"
            )
            ties += 1
    return ties
