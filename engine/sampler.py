"""Chooses each row's next token from its logits.

The order is vLLM's: bias, forbidden stop tokens, penalties, temperature, min-p, top-k, top-p, draw. A draw
inverts the cumulative distribution at one uniform number, a function of the request's seed and the
token's position alone (:mod:`engine.uniform`), and every step of it works on a row by itself, so that
a request's tokens do not depend on whom it shares a batch with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logprobs import token_logprobs
from engine.request import Request
from engine.row_table import RowTable
from engine.uniform import uniform
from wire.generation import TokenLogprobs


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, in the order of the requests."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    is_finite: list[bool]
    """False marks a row whose logits hold NaN or infinity: its token means nothing."""


class Sampler:
    """Samples for requests whose parameters stand in ``rows``."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows

    def sample(self, logits: torch.Tensor, requests: list[Request]) -> Sampled:
        """One token for each of the ``m`` requests from ``logits`` ``[m, V]`` float32 (left unchanged)."""
        raw = logits
        logits = _apply_processors(logits, requests)
        best, token_ids = logits.max(dim=-1)
        table_rows = np.array([request.row for request in requests], dtype=np.int64)
        random = np.flatnonzero(self._rows.temperature[table_rows] > 0.0)
        if random.size:
            chosen = torch.from_numpy(random).to(logits.device)
            positions = np.array([len(requests[i].tokens) for i in random], dtype=np.int64)
            token_ids[chosen] = self._draw(logits[chosen], table_rows[random], positions)
        return Sampled(
            token_ids=token_ids.tolist(),
            logprobs=_chosen_logprobs(raw, token_ids, requests),
            is_finite=torch.isfinite(best).tolist(),
        )

    def _draw(
        self, logits: torch.Tensor, table_rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> torch.Tensor:
        """Draws one token a row from ``logits`` ``[m, V]`` by the rows' own parameters."""
        device = logits.device

        def column(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values[table_rows]).to(device)

        top_k, top_p = column(self._rows.top_k), column(self._rows.top_p)
        probs = torch.softmax(logits / column(self._rows.temperature)[:, None], dim=-1)
        probs = _apply_min_p(probs, column(self._rows.min_p))
        targets = uniform(column(self._rows.seed), torch.from_numpy(positions).to(device))
        token_ids = _invert_cdf(probs, targets)
        # Rows with a top-k or top-p filter draw in sorted order; the others never do, whatever their
        # batch holds, or the same seed would give other tokens in other company.
        filtered = np.flatnonzero((self._rows.top_k[table_rows] > 0) | (self._rows.top_p[table_rows] < 1.0))
        if filtered.size:
            chosen = torch.from_numpy(filtered).to(device)
            ordered, order = probs[chosen].sort(dim=-1, descending=True, stable=True)
            ordered = _apply_top_k_top_p(ordered, top_k[chosen], top_p[chosen])
            drawn = _invert_cdf(ordered, targets[chosen])
            token_ids[chosen] = order.gather(1, drawn[:, None])[:, 0]
        return token_ids


def _apply_min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    threshold = min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    return probs.masked_fill(probs < threshold, 0.0)


def _apply_top_k_top_p(ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """``ordered`` ``[m, V]`` descending. Top-k keeps k, top-p the shortest head of at least that mass."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), 0.0)
    total = ordered.sum(dim=-1, keepdim=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    return ordered.masked_fill((mass_before >= top_p[:, None] * total) & (ranks > 0), 0.0)


def _invert_cdf(weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """First index at which the running sum of ``weights`` ``[m, V]`` exceeds ``targets`` times the total."""
    running = weights.to(torch.float64).cumsum(dim=-1)
    goal = (targets * running[:, -1])[:, None]
    return (running <= goal).sum(dim=-1).clamp_(max=weights.shape[1] - 1)


def _apply_processors(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """Bias, forbidden stop tokens and penalties of the rows that ask for them; copies only if any does."""
    touched: torch.Tensor | None = None
    for i, request in enumerate(requests):
        params = request.params
        assert params is not None, "a request without sampling parameters never samples"
        forbids_stop = request.num_output < params.min_tokens and request.stop_token_ids
        if not (params.logit_bias or forbids_stop or params.has_penalties):
            continue
        if touched is None:
            touched = logits.clone()
        row = touched[i]
        for token_id, bias in params.logit_bias:
            row[token_id] += bias
        if forbids_stop:
            row[list(request.stop_token_ids)] = -torch.inf
        if params.has_penalties:
            _penalise(row, request)
    return logits if touched is None else touched


def _penalise(row: torch.Tensor, request: Request) -> None:
    """Repetition over prompt and answer, presence and frequency over the answer; in place on ``[V]``."""
    params = request.params
    assert params is not None
    seen = torch.tensor(request.tokens, device=row.device).unique()
    values = row[seen]
    row[seen] = torch.where(
        values > 0, values / params.repetition_penalty, values * params.repetition_penalty
    )
    answer = request.tokens[request.num_prompt :]
    if answer:
        token_ids, counts = torch.tensor(answer, device=row.device).unique(return_counts=True)
        row[token_ids] -= params.presence_penalty + params.frequency_penalty * counts


def _chosen_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, requests: list[Request]
) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(requests)
    wanted = [
        (i, request.params.logprobs)
        for i, request in enumerate(requests)
        if request.params is not None and request.params.logprobs is not None
    ]
    if wanted:
        index = torch.tensor([i for i, _ in wanted], device=logits.device)
        reported = token_logprobs(logits[index], token_ids[index], [count for _, count in wanted])
        for (i, _), logprobs in zip(wanted, reported, strict=True):
            found[i] = logprobs
    return found
