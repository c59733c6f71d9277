"""How often a sampled token equals a sampled draft: exact shares from the two distributions.

With p the target's distribution and q the drafter's, both at temperature 1, a first draft is accepted with

| draft | rule | share |
|---|---|---|
| greedy, argmax q | equals the target's sample | p(argmax q) |
| drawn at a number of its own | equals the target's sample | sum p q |
| drawn at the target's number (what the engine does) | equals the target's sample | length of the numbers in [0, 1) at which both inverse CDFs give the same token |
| drawn by the target's exponentials (Gumbel) | equals the target's sample | sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) |
| drawn, then accepted with min(1, p / q) | classic rejection sampling | sum min(p, q): no rule accepts more |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.speculation_prompts import example

CHUNK = 8
"""Contexts of ``[V, V]`` pairs at a time."""
GUMBEL_EVERY = 8
"""The pairs are many; a part of the contexts is enough."""


@torch.no_grad()
def first_draft_shares(
    model_dir: Path, vocab_size: int, texts: Sequence[list[int]], start: int
) -> dict[str, float]:
    """Means over the contexts behind token ``start`` of ``texts``, which are all of one length."""
    training = example("nemotron_h_training")
    config = training.TrainingConfig(vocab_size=vocab_size)
    model = example("published_checkpoint").load_checkpoint(model_dir, config)
    token_ids = torch.tensor(texts)
    hidden = model.hidden(token_ids)
    logits = model.lm_head(hidden)[:, 1:-1]  # about token i + 2
    drafts = model.mtp_logits(token_ids, hidden)[:, :-1]
    p = logits[:, start:].flatten(0, 1).double().softmax(-1)
    q = drafts[:, start:].flatten(0, 1).double().softmax(-1)
    return {
        "greedy draft": p.gather(1, q.argmax(-1, keepdim=True)).mean().item(),
        "independent draw": (p * q).sum(-1).mean().item(),
        "draw at the target's number": _same_number(p, q).mean().item(),
        "draw by the target's exponentials": _same_exponentials(p[::GUMBEL_EVERY], q[::GUMBEL_EVERY]),
        "rejection sampling, sum min(p, q)": torch.minimum(p, q).sum(-1).mean().item(),
        "contexts": len(p),
    }


def _same_number(p: Tensor, q: Tensor) -> Tensor:
    """``[n]``: overlap of each token's stretch of the two running sums."""
    p_end, q_end = p.cumsum(-1), q.cumsum(-1)
    both = torch.minimum(p_end, q_end) - torch.maximum(p_end - p, q_end - q)
    return both.clamp(min=0).sum(-1)


def _same_exponentials(p: Tensor, q: Tensor) -> float:
    """Mean over the contexts; the race's winner is the same in both with that probability."""
    total = 0.0
    for first in range(0, len(p), CHUNK):
        some_p, some_q = p[first : first + CHUNK], q[first : first + CHUNK]
        p_ratio = some_p[:, None, :] / some_p[:, :, None].clamp(min=1e-30)
        q_ratio = some_q[:, None, :] / some_q[:, :, None].clamp(min=1e-30)
        total += (1 / torch.maximum(p_ratio, q_ratio).sum(-1)).sum().item()
    return total / len(p)
