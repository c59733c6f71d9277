"""The least that one step of a model must move and compute, from ``config.json``, whatever the kernels.

| bytes of a decode step | |
|---|---|
| weights | all layers and the output head once; of experts those that tokens are sent to |
| states | of each row one slot read and ``1 + k`` written, convolution and SSM |
| KV | each row's context read once for all its positions, their own written |
| logits | written and read once, in the model's dtype |

Not counted: activations, block tables, embedding rows, messages between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cost.step_cost import share_used
from engine.cost.step_size import StepSize


@dataclass(frozen=True)
class DecodeBytes:
    """The bytes of one decode step."""

    weights: float
    states: int
    kv: int
    logits: int

    @property
    def total(self) -> float:
        return self.weights + self.states + self.kv + self.logits


def decode_bytes(size: StepSize, num_rows: int, num_context: int, num_positions: int = 1) -> DecodeBytes:
    """Returns the bytes of rows with ``num_context`` tokens before them in total; ``num_positions`` is 1 +
    k."""
    num_tokens = num_rows * num_positions
    return DecodeBytes(
        weights=size.body + size.head + size.experts * share_used(size.expert_share, num_tokens),
        states=num_rows * size.row_state_bytes(num_positions),
        kv=(num_context + num_tokens) * size.token_bytes,
        logits=2 * num_tokens * size.logit_bytes,
    )


def prefill_flops(size: StepSize, num_tokens: int, num_pairs: float, num_sampled: int = 0) -> float:
    """Returns the FLOP of prompts' tokens with ``num_pairs`` (:func:`engine.cost.step_cost.pairs_of`); after
    ``num_sampled`` of them a token is sampled."""
    computing = num_tokens * size.token_flops + num_pairs * size.pair_flops
    return computing + num_sampled * size.head_flops
