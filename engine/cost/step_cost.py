"""Seconds that steps and handoffs take, as a formula of what is in them. Pure numbers: no torch, no clock.

| part | seconds |
|---|---|
| prefill step | ``step_s + max(weights, tokens * token_s + pairs * pair_s)`` |
| decode step | ``step_s + max(weights + rows * row_s + context * context_s, rows * token_s)`` |
| handoff | ``latency_s + (state + tokens * KV of one) / bytes_per_s`` |

``pairs`` is what attention computes: each token with each one up to it. ``context`` is the sum of all rows'
tokens so far, whose KV is read; a row's state is read and written, whatever its context. Figures come from
``config.json`` and a GPU's rates (:mod:`engine.cost.gpu`) or are fitted to measured steps
(``benchmarks/scale/step_measurement.py``), where ``step_s`` holds the weights as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightCost:
    """Reading weights once a step. An expert is read only if one of the step's tokens is sent to it."""

    always_s: float = 0.0
    experts_s: float = 0.0
    """Of all routed experts."""
    expert_share: float = 0.0
    """How many of them a token uses; which ones is taken to be even and independent."""

    def seconds(self, num_tokens: int) -> float:
        return self.always_s + self.experts_s * share_used(self.expert_share, num_tokens)


@dataclass(frozen=True)
class PrefillCost:
    step_s: float
    token_s: float
    pair_s: float
    weights: WeightCost = WeightCost()

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """One step over chunks of so many tokens and pairs in all."""
        computing = num_tokens * self.token_s + num_pairs * self.pair_s
        return self.step_s + max(self.weights.seconds(num_tokens), computing)

    def prompt_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """A prompt alone, in chunks of at most ``chunk_tokens``."""
        return sum(self.seconds(size, pairs) for size, pairs in _chunks(num_tokens, chunk_tokens))

    def share_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """A prompt's share of steps that others like it fill up to ``chunk_tokens``, as under load."""
        return sum(
            self.seconds(chunk_tokens, pairs * chunk_tokens / size) * size / chunk_tokens
            for size, pairs in _chunks(num_tokens, chunk_tokens)
        )


@dataclass(frozen=True)
class DecodeCost:
    step_s: float
    row_s: float
    """One state read and written, and what else a row brings."""
    context_s: float
    """KV of one token of one row."""
    token_s: float = 0.0
    """Computing a row, which reading hides until rows are many."""
    weights: WeightCost = WeightCost()

    def seconds(self, num_rows: int, num_context: float) -> float:
        """One step of rows that have ``num_context`` tokens before them in all."""
        reading = self.weights.seconds(num_rows) + num_rows * self.row_s + num_context * self.context_s
        return self.step_s + max(reading, num_rows * self.token_s)


@dataclass(frozen=True)
class HandoffCost:
    latency_s: float
    """Messages and the waits for event loops and engines, whatever the prompt."""
    state_bytes: int
    token_bytes: int
    """KV of one token."""
    bytes_per_s: float

    def num_bytes(self, num_tokens: int) -> int:
        return self.state_bytes + num_tokens * self.token_bytes

    def reading_s(self, num_tokens: int) -> float:
        """What the link is busy with one prompt's state and KV."""
        return self.num_bytes(num_tokens) / self.bytes_per_s

    def seconds(self, num_tokens: int) -> float:
        return self.latency_s + self.reading_s(num_tokens)


@dataclass(frozen=True)
class StepCosts:
    """Of one prefill server, one decode server and what is between them."""

    prefill: PrefillCost
    decode: DecodeCost
    handoff: HandoffCost


def pairs_of(start: int, num_tokens: int) -> float:
    """Pairs of a query and a key, itself included, of ``num_tokens`` behind ``start`` others."""
    return num_tokens * start + num_tokens * (num_tokens + 1) / 2


def share_used(share: float, num_tokens: int) -> float:
    """Of all experts, those that at least one token uses, where each token uses ``share`` of them."""
    return 1.0 - (1.0 - share) ** num_tokens


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, float]]:
    """Tokens and pairs of each chunk of a prompt."""
    for start in range(0, num_tokens, chunk_tokens):
        size = min(chunk_tokens, num_tokens - start)
        yield size, pairs_of(start, size)
