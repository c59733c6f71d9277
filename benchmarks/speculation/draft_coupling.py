"""How often a sampled token equals a sampled draft: exact shares from the two distributions.

With p the target's distribution and q the drafter's, both at temperature 1, a first draft is accepted with

| draft | rule | share |
|---|---|---|
| greedy, argmax q | equals the target's sample | p(argmax q) |
| drawn at a number of its own | equals the target's sample | sum p q |
| drawn at one shared number, by inverse CDFs | equals the target's sample | length of the numbers in [0, 1) at which both give the same token |
| drawn by the target's exponentials (what the engine does) | equals the target's sample | sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) |
| drawn, then accepted with min(1, p / q) | classic rejection sampling | sum min(p, q): no rule accepts more |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.speculation.prompts import example


@torch.no_grad()
def first_draft_shares(
    model_dir: Path, vocab_size: int, texts: Sequence[list[int]], start: int
) -> dict[str, float]:
    """Returns means over the contexts after token ``start`` of ``texts``, which all have the same length."""
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
        "draw at one shared number": _same_number(p, q).mean().item(),
        "draw by the target's exponentials": _same_exponentials(p, q).mean().item(),
        "rejection sampling, sum min(p, q)": torch.minimum(p, q).sum(-1).mean().item(),
        "contexts": len(p),
    }


def _same_number(p: Tensor, q: Tensor) -> Tensor:
    """Returns ``[n]``: the overlap of each token's intervals in the two running sums."""
    p_end, q_end = p.cumsum(-1), q.cumsum(-1)
    both = torch.minimum(p_end, q_end) - torch.maximum(p_end - p, q_end - q)
    return both.clamp(min=0).sum(-1)


def _same_exponentials(p: Tensor, q: Tensor) -> Tensor:
    """Returns ``[n]``: the probability that both races have the same winner.

    max(p_j / p_i, q_j / q_i) is the former if p_j / q_j is the greater ratio: ordered by the ratios, the sum
    over j is a tail of p's and a head of q's.
    """
    order = (p / q).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    tail, head = p.flip(-1).cumsum(-1).flip(-1), q.cumsum(-1) - q
    return (1 / (tail / p + head / q)).sum(-1)
