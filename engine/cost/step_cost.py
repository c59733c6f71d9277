"""Seconds that steps and handoffs take, as formulas over their contents. Pure numbers: no torch, no clock.

| part | seconds |
|---|---|
| prefill step | ``step_s + max(weights, tokens * token_s + pairs * pair_s)`` |
| decode step | ``step_s + max(weights + rows * row_s + context * context_s, rows * token_s)`` |
| handoff | ``latency_s + (state_bytes + tokens * token_bytes) / bytes_per_s`` |

``weights`` is the time to read the weights. ``pairs`` are the pairs of tokens that attention computes: each
token with itself and every earlier token.
``context`` is the sum of all rows' earlier tokens, whose KV is read. A row's state is read and written,
however long its context is. The values are computed from ``config.json`` and a GPU's rates
(:mod:`engine.cost.gpu`), or fitted to measured steps (``benchmarks/scale/step_measurement.py``). A fitted
``step_s`` includes the time to read the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightCost:
    """Time to read the weights once in a step. An expert is read only if a token of the step uses it."""

    always_s: float = 0.0
    experts_s: float = 0.0
    """Time to read all routed experts."""
    expert_share: float = 0.0
    """Share of the routed experts that a token uses. Tokens are assumed to choose experts evenly and
    independently of each other."""

    def seconds(self, num_tokens: int) -> float:
        return self.always_s + self.experts_s * share_used(self.expert_share, num_tokens)


@dataclass(frozen=True)
class PrefillCost:
    step_s: float
    token_s: float
    pair_s: float
    weights: WeightCost = WeightCost()

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """Returns the time of one step whose chunks have ``num_tokens`` tokens and ``num_pairs`` pairs in
        all."""
        computing = num_tokens * self.token_s + num_pairs * self.pair_s
        return self.step_s + max(self.weights.seconds(num_tokens), computing)

    def prompt_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Returns the time of a prompt that is computed alone, in chunks of at most ``chunk_tokens``."""
        return sum(self.seconds(size, pairs) for size, pairs in _chunks(num_tokens, chunk_tokens))

    def share_s(self, num_tokens: int, chunk_tokens: int) -> float:
        """Returns a prompt's share of the step time under load, when equal prompts fill each step up to
        ``chunk_tokens``."""
        return sum(
            self.seconds(chunk_tokens, pairs * chunk_tokens / size) * size / chunk_tokens
            for size, pairs in _chunks(num_tokens, chunk_tokens)
        )


@dataclass(frozen=True)
class DecodeCost:
    step_s: float
    row_s: float
    """Time to read and write one state, and all other time that one more row takes."""
    context_s: float
    """Time to read the KV of one token of one row."""
    token_s: float = 0.0
    """Time to compute a row. With few rows, the time to read memory hides it."""
    weights: WeightCost = WeightCost()

    def seconds(self, num_rows: int, num_context: float) -> float:
        """Returns the time of one step of rows with ``num_context`` earlier tokens in all."""
        reading = self.weights.seconds(num_rows) + num_rows * self.row_s + num_context * self.context_s
        return self.step_s + max(reading, num_rows * self.token_s)


@dataclass(frozen=True)
class HandoffCost:
    latency_s: float
    """Time of messages and of waits for event loops and engines. It is the same for all prompts."""
    state_bytes: int
    token_bytes: int
    """Bytes of one token's KV."""
    bytes_per_s: float

    def num_bytes(self, num_tokens: int) -> int:
        return self.state_bytes + num_tokens * self.token_bytes

    def reading_s(self, num_tokens: int) -> float:
        """Returns the time that one prompt's state and KV keep the link busy."""
        return self.num_bytes(num_tokens) / self.bytes_per_s

    def seconds(self, num_tokens: int) -> float:
        return self.latency_s + self.reading_s(num_tokens)


@dataclass(frozen=True)
class StepCosts:
    """Costs of one prefill server, one decode server and the handoff between them."""

    prefill: PrefillCost
    decode: DecodeCost
    handoff: HandoffCost


def pairs_of(start: int, num_tokens: int) -> float:
    """Returns the number of ``pairs``, as in the module's table, of ``num_tokens`` tokens that follow
    ``start`` earlier tokens."""
    return num_tokens * start + num_tokens * (num_tokens + 1) / 2


def share_used(share: float, num_tokens: int) -> float:
    """Returns the share of all experts that at least one token uses, if each token uses ``share`` of them."""
    return 1.0 - (1.0 - share) ** num_tokens


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, float]]:
    """Yields the tokens and pairs of each chunk of a prompt."""
    for start in range(0, num_tokens, chunk_tokens):
        size = min(chunk_tokens, num_tokens - start)
        yield size, pairs_of(start, size)
