"""Chooses each row's next tokens from its logits.

The order is vLLM's: bias, forbidden stop tokens, penalties, grammar, temperature, min-p, top-k, top-p, draw.
Where a row's thinking has used up its budget, the end mark's token is taken instead of all this.
A draw is a race among the remaining tokens (:mod:`kernels.sampling.sample_tokens`). Its noise depends only
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
from engine.sampling.sampling_table import SamplingNeeds, SamplingTable
from engine.sampling.thinking_budgets import ThinkingBudgets
from kernels.sampling.sample_tokens import SampleTokens
from kernels.sampling.token_mask import mask_tokens


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
        self._choose = SampleTokens(table.fields.device["numbers"], table.fields.device["integers"])

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
        infinity, their token is meaningless. On a CPU, the next call of this shape overwrites the results.
        """
        raw = logits
        if needs.processed:
            logits = process_logits(
                logits,
                rows=rows,
                index=positions + 1,
                input_ids=input_ids,
                columns=self._table.gather(rows),
                stop_ids=self._table.stop_ids[rows],
                tokens=self._table.tokens,
            )
        if needs.constrained:
            logits = self._constrain(raw, logits, rows)
        token_ids, is_finite = self._choose(
            logits, rows, positions, shift=1, random=needs.random, filtered=needs.filtered
        )
        if needs.budgeted:
            assert self._budgets is not None
            token_ids = self._budgets.force(token_ids, rows, positions + 1, input_ids[:, 1:])
        return token_ids, is_finite

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
        token_ids, _ = self._choose(
            logits[:, None], rows, index[:, None], shift=0, random=needs.random, filtered=needs.filtered
        )
        return token_ids[:, 0]

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
        num_gained = torch.where(forced < 0, accepted.to(torch.int64), 0)
        if needs.processed:
            order = torch.arange(gained.shape[1], device=gained.device)
            count_tokens(self._table.tokens.counts, rows, gained, order < num_gained[:, None])
        if needs.budgeted:
            assert self._budgets is not None
            self._budgets.commit(rows, gained, num_gained)
