"""Log-probabilities of tokens as they are reported to clients."""

from __future__ import annotations

import torch

from wire.generation import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of ``logits`` ``[m, V]``: its token's log-probability and rank, and the best alternatives.

    The distribution is the model's own: before penalties, temperature and filters. ``num_top[i]``
    alternatives are given for row i.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    most = min(max(num_top), logits.shape[1])
    top_values, top_ids = logprobs.topk(most, dim=-1)
    rows = zip(
        token_ids.tolist(),
        chosen[:, 0].tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top_values.tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, rank, ids, values, count in rows
    ]
