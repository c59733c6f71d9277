"""Log-probabilities that are reported to clients, of an answer's tokens and of a prompt's own tokens.

A step computes them on the device. The host reads them when it reads the step's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.memory.async_copy import Download, upload
from kernels.sampling.token_logprobs import token_logprobs
from wire.messages.generation import TokenLogprobs

TOKENS_AT_ONCE = 128
"""Number of prompt tokens that are scored at once. No more rows of logits than these are in memory."""


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of ``m`` tokens, on the device.

    They are those of the model's own distribution, before penalties, temperature and filters.
    """

    numbers: torch.Tensor
    """``[m, 1 + num_top]`` float32: the token's log-probability, then those of the best alternatives."""
    integers: torch.Tensor
    """``[m, 2 + num_top]`` int64: the token, its rank, then the best alternatives."""

    @classmethod
    def compute(cls, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """Compute log-probabilities of ``token_ids`` ``[m]`` int64 from ``logits`` ``[m, vocabulary]``.

        For each token, the ``num_top`` best tokens at its place are reported as well.
        """
        return cls(*token_logprobs(logits.float(), token_ids, min(num_top, logits.shape[1])))

    def start_copy(self) -> LogprobCopy:
        """Queue the copy to the host after everything launched so far."""
        return LogprobCopy(Download(self.numbers), Download(self.integers))


@dataclass(frozen=True)
class LogprobCopy:
    """Log-probabilities on their way to the host."""

    numbers: Download
    integers: Download

    def read(self) -> list[TokenLogprobs]:
        """Return one entry per token. Waits only for the copy, not for steps that were launched after it."""
        # Through numpy: torch's own tolist takes ten times as long.
        numbers, integers = (part.wait().numpy().tolist() for part in (self.numbers, self.integers))
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
            for (logprob, *top_values), (token_id, rank, *top_ids) in zip(numbers, integers, strict=True)
        ]


class ComputesLogits(Protocol):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of one chunk of a prompt, on their way to the host.

    They are for requests with ``echo`` and ``logprobs``.
    """

    parts: tuple[LogprobCopy, ...]

    def read(self) -> list[TokenLogprobs]:
        """Return one entry for each scored token of the prompt, in order."""
        return [one for part in self.parts for one in part.read()]


def prompt_logprobs(
    model: ComputesLogits, hidden: torch.Tensor, targets: list[int], num_top: int
) -> PromptLogprobs:
    """Compute the log-probability of each token of ``targets``.

    ``hidden`` is ``[number of targets, hidden size]``: row i is the hidden state of the token that precedes
    ``targets[i]``.
    """
    token_ids = upload(np.array(targets, dtype=np.int64), hidden.device)
    parts = []
    for start in range(0, len(targets), TOKENS_AT_ONCE):
        part = token_ids[start : start + TOKENS_AT_ONCE]
        logits = model.logits(hidden[start : start + len(part)])
        parts.append(LogprobTensors.compute(logits, part, num_top).start_copy())
    return PromptLogprobs(tuple(parts))
