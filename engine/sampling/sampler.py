"""Chooses each row's next tokens from its logits.

The order is vLLM's: bias, forbidden stop tokens, penalties, grammar, temperature, min-p, top-k, top-p, draw.
A draw is a race among the tokens that are left (:mod:`kernels.sampling.exponential_race`): its noise is a
function of the request's seed, the token's index and the token alone, and every step of it works on a row by
itself, so that a request's tokens depend neither on whom it shares a batch with nor on what was drafted: the
target's own token stands at every index, and a draft is right exactly if it is that token.

Shapes depend on nothing but the arguments' own, and nothing is read back: all of it can stand inside a
CUDA graph, one for each kind of :class:`~engine.sampling.sampling_table.SamplingNeeds`.
"""

from __future__ import annotations

import torch

from engine.sampling.logits_processors import count_tokens, process_logits
from engine.sampling.sampling_table import SamplingColumns, SamplingNeeds, SamplingTable
from kernels.sampling.exponential_race import exponential_race
from kernels.sampling.token_mask import mask_tokens

_LARGEST_INT32 = (1 << 31) - 1


class Sampler:
    """Samples for rows whose parameters stand in ``table``.

    ``masks`` ``[N + 1, T, W]`` int32 are the bits of what rows with grammars may choose
    (:mod:`engine.grammar_masks`); None: no row has one.
    """

    def __init__(self, table: SamplingTable, masks: torch.Tensor | None = None) -> None:
        self._table = table
        self._masks = masks

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        needs: SamplingNeeds,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's token behind every position, and whether its logits are finite, each ``[R, T]``.

        ``logits`` ``[R, T, V]`` float32 (left unchanged) are those of ``input_ids`` ``[R, T]`` int64 at
        ``positions`` ``[R, T]`` int64 of the requests in ``rows`` ``[R]`` int64. A token whose logits
        hold NaN or infinity means nothing.
        """
        raw = logits
        if needs.random or needs.processed:
            index = positions + 1
            columns = self._table.gather(rows)
        if needs.processed:
            logits = process_logits(
                logits,
                rows=rows,
                index=index,
                input_ids=input_ids,
                columns=columns,
                stop_ids=self._table.stop_ids[rows],
                tokens=self._table.tokens,
            )
        if needs.constrained:
            logits = self._constrain(raw, logits, rows)
        best, token_ids = logits.max(dim=-1)
        if needs.random:
            drawn = _draw(logits, columns, index, filtered=needs.filtered)
            token_ids = torch.where(columns.temperature[:, None] > 0, drawn, token_ids)
        return token_ids, best.abs() < torch.inf  # what isfinite is, in half the launches

    def _constrain(self, raw: torch.Tensor, processed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``processed`` without the tokens that grammars forbid.

        Where ``min_tokens`` forbids all that a grammar leaves, the grammar's end comes first.
        """
        assert self._masks is not None
        logits = mask_tokens(processed, rows, self._masks)
        if processed is raw:
            return logits
        is_stuck = logits.amax(dim=-1, keepdim=True) == -torch.inf
        return torch.where(is_stuck, mask_tokens(raw, rows, self._masks), logits)

    def draft(
        self, logits: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, needs: SamplingNeeds
    ) -> torch.Tensor:
        """A guess at the token of ``index`` ``[R]`` from a drafter's ``logits`` ``[R, V]``: ``[R]`` int64.

        Random rows draw by the noise that the target will use, so a drafter that is near the target
        mostly draws the target's token. Penalties and biases are left to the target.
        """
        token_ids = logits.argmax(dim=-1)
        if needs.random:
            columns = self._table.gather(rows)
            drawn = _draw(logits[:, None], columns, index[:, None], filtered=needs.filtered)[:, 0]
            token_ids = torch.where(columns.temperature > 0, drawn, token_ids)
        return token_ids

    def commit(
        self,
        rows: torch.Tensor,
        results: torch.Tensor,
        accepted: torch.Tensor,
        needs: SamplingNeeds,
        *,
        forced: torch.Tensor,
    ) -> None:
        """Counts the tokens that a step gained, ``results[r, 3 : 3 + accepted[r]]``, for later penalties.

        ``rows``, ``accepted`` and ``forced`` are ``[R]``, ``results`` is ``[R, T + 3]``. A forced token
        (0 or more) is the prompt's, counted when its row was filled, and no part of the answer.
        """
        if not needs.processed:
            return
        gained = results[:, 3:]
        order = torch.arange(gained.shape[1], device=gained.device)
        is_gained = (order < accepted[:, None]) & (forced < 0)[:, None]
        count_tokens(self._table.tokens.counts, rows, gained, is_gained)


def _draw(
    logits: torch.Tensor, columns: SamplingColumns, index: torch.Tensor, *, filtered: bool
) -> torch.Tensor:
    """One token a position, ``[R, T]``, from ``logits`` ``[R, T, V]``; nonsense where the row is greedy."""
    temperature = torch.where(columns.temperature > 0, columns.temperature, 1.0)
    weights = torch.softmax(logits / temperature[:, None, None], dim=-1)
    # Tokens are left by two numbers a position: the least weight, and the last of the tokens that have it.
    least = columns.min_p[:, None] * weights.amax(dim=-1)
    last_token = torch.full_like(index, weights.shape[-1])
    if filtered:
        # A row without a filter keeps all of them, even what its own sum would round away: a seed must not
        # give other tokens in other company.
        is_filtered = ((columns.top_k > 0) | (columns.top_p < 1.0))[:, None]
        head_least, head_last = _end_of_head(weights, least, columns.top_k, columns.top_p)
        least = torch.where(is_filtered, head_least, least)
        last_token = torch.where(is_filtered, head_last, last_token)
    return exponential_race(weights, least, last_token, columns.seed, index)


def _end_of_head(
    weights: torch.Tensor, least: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and token ``[R, T]`` of the worst one left of ``weights`` ``[R, T, V]``, best first.

    Of those that weigh ``least`` ``[R, T]`` the ``top_k`` best, and of these the shortest head with
    ``top_p`` of their mass. Each is a head of the order; a head of the running sum is its own running sum.
    """
    vocab_size = weights.shape[-1]
    ordered, order = _sort_descending(weights)
    running = ordered.cumsum(dim=-1, dtype=torch.float64)
    most = torch.where(top_k > 0, top_k, vocab_size)[:, None, None]
    num_heavy = torch.searchsorted(-ordered, -least[..., None], right=True)
    last = torch.minimum(most, num_heavy).clamp_(min=1) - 1
    goal = top_p[:, None, None] * running.gather(2, last)
    last = torch.minimum(last, torch.searchsorted(running, goal))
    return ordered.gather(2, last)[..., 0], order.gather(2, last)[..., 0]


def _sort_descending(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and their tokens along the last axis, best first, the lower token first among equals."""
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True, stable=True)
    # NumPy sorts integers in vector registers, ten times as fast as PyTorch. Bits of floats that are not
    # negative are ordered as the floats are; the token in the low half makes every key different.
    bits = probs.view(torch.int32).to(torch.int64)
    keys = ((_LARGEST_INT32 - bits) << 32) | torch.arange(probs.shape[-1])
    keys.numpy().sort(axis=-1)
    order = keys & _LARGEST_INT32
    return probs.gather(-1, order), order
