"""Log-probabilities of a prompt's own tokens: what ``echo`` with ``logprobs`` reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.async_copy import upload
from engine.logprobs import LogprobCopy, LogprobTensors
from wire.generation import TokenLogprobs

TOKENS_AT_ONCE = 128
"""Bounds the logits held at a time to this many rows of the vocabulary."""


class ComputesLogits(Protocol):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class PromptLogprobs:
    """A chunk's log-probabilities on their way to the host."""

    parts: tuple[LogprobCopy, ...]

    def read(self) -> list[TokenLogprobs]:
        """One entry a target, in order."""
        return [one for part in self.parts for one in part.read()]


def prompt_logprobs(
    model: ComputesLogits, hidden: torch.Tensor, targets: list[int], num_top: int
) -> PromptLogprobs:
    """How likely each target was: ``hidden`` ``[n, H]`` of the tokens before them, in order."""
    token_ids = upload(np.array(targets, dtype=np.int64), hidden.device)
    parts = []
    for start in range(0, len(targets), TOKENS_AT_ONCE):
        part = token_ids[start : start + TOKENS_AT_ONCE]
        logits = model.logits(hidden[start : start + len(part)])
        parts.append(LogprobTensors.compute(logits, part, num_top).start_copy())
    return PromptLogprobs(tuple(parts))
