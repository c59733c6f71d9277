"""Compares greedy tokens with a reference's logits, where two logits may be equal up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

TIE = 1e-5
"""If the reference's two best logits have a smaller relative distance than this, both tokens count as
right."""
MAX_TIES = 1 / 2000


def count_ties(num_prompt: int, answer: Sequence[int], logits: Tensor) -> int:
    """Counts the ties in an answer, every token of which must be one of the reference's best.

    logits ``[num_prompt + len(answer) - 1, vocab]``: the reference's logits after the prompt and each part of
    the answer. Raises :class:`AssertionError` that names the first token that is not among the best.
    """
    ties = 0
    for step, (token, row) in enumerate(zip(answer, logits[num_prompt - 1 :], strict=True)):
        best, second = row.topk(2).values.tolist()
        if token != int(row.argmax()):
            close = (best - second) / max(abs(best), 1e-30) <= TIE and float(row[token]) == second
            assert close, (
                f"prompt of {num_prompt}: token {step} is {token}, the reference's {int(row.argmax())}"
            )
            ties += 1
    return ties
