"""Log-probabilities of a prompt's own tokens: what ``echo`` with ``logprobs`` reports."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.logprobs import token_logprobs
from wire.generation import TokenLogprobs

TOKENS_AT_ONCE = 128
"""Bounds the logits held at a time to this many rows of the vocabulary."""


class ComputesLogits(Protocol):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def prompt_logprobs(
    model: ComputesLogits, hidden: torch.Tensor, targets: list[int], num_top: int
) -> list[TokenLogprobs]:
    """How likely each target was: ``hidden`` ``[n, H]`` of the tokens before them, in order."""
    scored: list[TokenLogprobs] = []
    for start in range(0, len(targets), TOKENS_AT_ONCE):
        part = torch.tensor(targets[start : start + TOKENS_AT_ONCE], device=hidden.device)
        logits = model.logits(hidden[start : start + len(part)])
        scored += token_logprobs(logits, part, [num_top] * len(part))
    return scored
