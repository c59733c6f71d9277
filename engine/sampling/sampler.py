"""Chooses each row's next tokens from its logits.

The order is vLLM's: bias, forbidden stop tokens, penalties, grammar, temperature, min-p, top-k, top-p, draw.
Where a row's thinking has used up its budget, the end mark's token is taken instead of all this.
A draw is a race among the remaining tokens (:mod:`kernels.sampling.exponential_race`). Its noise depends only
on the request's seed, the token's index and the token, and every operation treats each row by itself. So a
request's tokens depend neither on the other requests of the batch nor on drafts. At every index the *target*,
which is the served model, chooses its own token. A draft is right if and only if it equals that token.

Shapes depend only on the arguments' shapes, and the host reads nothing back. So sampling can be part of a
CUDA graph, with one graph for each kind of :class:`~engine.sampling.sampling_table.SamplingNeeds`. In shapes,
``R`` is the number of rows, ``T`` the number of positions in each row, ``V`` the size of the vocabulary, and
the tables have ``N + 1`` rows.
"""

from __future__ import annotations

import torch

from engine.sampling.logits_processors import count_tokens, process_logits
from engine.sampling.sampling_table import SamplingColumns, SamplingNeeds, SamplingTable
from engine.sampling.thinking_budgets import ThinkingBudgets
from kernels.sampling.exponential_race import exponential_race
from kernels.sampling.token_mask import mask_tokens

_LARGEST_INT32 = (1 << 31) - 1
_UNITS = 2.0**40
"""Top-p counts a weight of 1 as this many units. A weight below one unit counts as nothing."""


class Sampler:
    """Samples for rows whose parameters are in ``table``.

    ``masks`` ``[N + 1, T, W]`` int32 has one bit for each token, in ``W`` words. The bit is 1 if the row's
    grammar allows the token (:mod:`engine.step.grammar_masks`). ``masks`` is None if no row has a grammar,
    ``budgets`` if no row has a budget of thinking.
    """

    def __init__(
        self,
        table: SamplingTable,
        masks: torch.Tensor | None = None,
        budgets: ThinkingBudgets | None = None,
    ) -> None:
        self._table = table
        self._masks = masks
        self._budgets = budgets

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        needs: SamplingNeeds,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's token after every position, and whether its logits are finite; ``[R, T]`` each.

        ``logits`` ``[R, T, V]`` float32 stay unchanged. They belong to ``input_ids`` ``[R, T]`` int64 at
        ``positions`` ``[R, T]`` int64 of the requests in ``rows`` ``[R]`` int64. If logits hold NaN or
        infinity, their token is meaningless.
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
        if needs.budgeted:
            assert self._budgets is not None
            token_ids = self._budgets.force(token_ids, rows, input_ids[:, 1:])
        return token_ids, best.abs() < torch.inf  # the same as isfinite, with half the launches

    def _constrain(self, raw: torch.Tensor, processed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Remove the tokens that grammars forbid from ``processed``.

        If ``min_tokens`` forbids all tokens that a grammar allows, only the grammar is obeyed: the answer may
        end.
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
        """Guess the token at ``index`` ``[R]`` from a drafter's ``logits`` ``[R, V]``. Returns ``[R]`` int64.

        Random rows draw with the noise that the target will use. So a drafter whose probabilities are close
        to the target's usually draws the target's token. Only the target applies penalties and biases.
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
        """Note the tokens that a step gained, ``results[r, 3 : 3 + accepted[r]]``, for penalties and budgets.

        ``rows``, ``accepted`` and ``forced`` are ``[R]``, ``results`` is ``[R, T + 3]``. A forced token
        (0 or more) belongs to the prompt, not to the answer. It was counted when its row was filled.
        """
        if not (needs.processed or needs.budgeted):
            return
        gained = results[:, 3:]
        num_gained = torch.where(forced < 0, accepted, 0)
        if needs.processed:
            order = torch.arange(gained.shape[1], device=gained.device)
            count_tokens(self._table.tokens.counts, rows, gained, order < num_gained[:, None])
        if needs.budgeted:
            assert self._budgets is not None
            self._budgets.commit(rows, gained, num_gained)


def _draw(
    logits: torch.Tensor, columns: SamplingColumns, index: torch.Tensor, *, filtered: bool
) -> torch.Tensor:
    """Draw one token per position, ``[R, T]``, from ``logits`` ``[R, T, V]``.

    The tokens of greedy rows have no meaning.
    """
    temperature = torch.where(columns.temperature > 0, columns.temperature, 1.0)
    weights = torch.softmax(logits / temperature[:, None, None], dim=-1)
    # Two numbers per position say which tokens remain: the smallest weight that remains, and the last token
    # that remains among those of exactly this weight.
    least = columns.min_p[:, None] * weights.amax(dim=-1)
    last_token = torch.full_like(index, weights.shape[-1])
    if filtered:
        # A row without a filter keeps all tokens, even those that rounding in the running sum would drop: a
        # seed must give the same tokens in every batch.
        is_filtered = ((columns.top_k > 0) | (columns.top_p < 1.0))[:, None]
        head_least, head_last = _end_of_head(weights, least, columns.top_k, columns.top_p)
        least = torch.where(is_filtered, head_least, least)
        last_token = torch.where(is_filtered, head_last, last_token)
    return exponential_race(weights, least, last_token, columns.seed, index)


def _end_of_head(
    weights: torch.Tensor, least: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and id, each ``[R, T]``, of the worst remaining token of ``weights`` ``[R, T, V]``.

    Three filters follow each other. The first keeps the tokens whose weight is at least ``least`` ``[R, T]``.
    The second keeps the ``top_k`` best of these. The third keeps only as many of the best as are needed for
    the share ``top_p`` of the weight that is left. All filters use the same order, so one running sum serves
    all three. It is a sum of integers: a device may add them in any order, in any batch.
    """
    vocab_size = weights.shape[-1]
    ordered, order = _sort_descending(weights)
    running = (ordered * _UNITS).to(torch.int64).cumsum_(dim=-1)
    most = torch.where(top_k > 0, top_k, vocab_size)[:, None, None]
    num_heavy = torch.searchsorted(-ordered, -least[..., None], right=True)
    last = torch.minimum(most, num_heavy).clamp_(min=1) - 1
    goal = (top_p.to(torch.float64)[:, None, None] * running.gather(2, last)).ceil().to(torch.int64)
    enough = torch.searchsorted(running, goal)
    last = torch.where(top_p[:, None, None] < 1.0, torch.minimum(last, enough), last)
    return ordered.gather(2, last)[..., 0], order.gather(2, last)[..., 0]


def _sort_descending(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort probabilities and their tokens along the last axis: best first, and equal ones by token id."""
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True, stable=True)
    # NumPy sorts integers in vector registers, ten times as fast as PyTorch. The bits of non-negative floats
    # have the same order as the floats. The token id in the low half of a key makes all keys different.
    bits = probs.view(torch.int32).to(torch.int64)
    keys = ((_LARGEST_INT32 - bits) << 32) | torch.arange(probs.shape[-1])
    keys.numpy().sort(axis=-1)
    order = keys & _LARGEST_INT32
    return probs.gather(-1, order), order
