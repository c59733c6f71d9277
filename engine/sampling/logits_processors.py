"""Bias, forbidden stop tokens and penalties. They change a row's logits before its token is chosen.

Each of these processors is one tensor operation over all rows. In a row that doesn't use the processor, it
adds 0 or divides by 1, which keeps every bit. So one pass serves all rows, and a row's result doesn't depend
on the other rows.

Shapes: ``R`` rows with ``T`` positions each, ``V`` tokens in the vocabulary, up to ``S`` stop tokens per row,
``N + 1`` rows in the tables.
"""

from __future__ import annotations

import torch

from engine.sampling.sampling_table import SamplingColumns, TokenTables


def process_logits(
    logits: torch.Tensor,
    *,
    rows: torch.Tensor,
    index: torch.Tensor,
    input_ids: torch.Tensor,
    columns: SamplingColumns,
    stop_ids: torch.Tensor,
    tokens: TokenTables,
) -> torch.Tensor:
    """Return a changed copy of ``logits`` ``[R, T, V]`` float32.

    The order is vLLM's: bias, stop tokens, penalties. ``index`` ``[R, T]`` int64 is the index of the token
    that each position chooses. ``input_ids`` ``[R, T]`` are the positions' inputs. Penalties at position i
    count drafts 1 … i and the answer so far, which already includes input 0. ``stop_ids`` is ``[R, S]``;
    ``rows`` ``[R]`` int64 names rows of ``tokens``.
    """
    logits = logits + tokens.bias[rows][:, None]
    _forbid_stop_tokens(logits, index, columns.least_length, stop_ids)
    counts = tokens.counts[rows][:, None] + _counts_of_drafts(input_ids, logits.shape[2])
    _penalise(logits, counts, tokens.in_prompt[rows][:, None], columns)
    return logits


def count_tokens(
    counts: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, is_gained: torch.Tensor
) -> None:
    """Add the ``token_ids`` ``[R, T]`` where ``is_gained`` is True to ``rows`` of ``counts`` ``[N+1, V]``."""
    flat = rows[:, None] * counts.shape[1] + token_ids
    counts.view(-1).scatter_add_(0, flat.reshape(-1), is_gained.to(counts.dtype).reshape(-1))


def _counts_of_drafts(input_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Count how often each token is among the drafts up to position i: ``[R, T, V]`` int32.

    If T = 1, there are no drafts and the result is ``[R, 1, 1]``.
    """
    num_rows, num_positions = input_ids.shape
    if num_positions == 1:
        return input_ids.new_zeros(num_rows, 1, 1, dtype=torch.int32)
    is_draft = torch.ones_like(input_ids, dtype=torch.int32)
    is_draft[:, 0] = 0
    counts = input_ids.new_zeros(num_rows, num_positions, vocab_size, dtype=torch.int32)
    counts.scatter_(2, input_ids[:, :, None], is_draft[:, :, None])
    for i in range(1, num_positions):  # a cumsum along this axis would be slower and return int64
        counts[:, i] += counts[:, i - 1]
    return counts


def _forbid_stop_tokens(
    logits: torch.Tensor, index: torch.Tensor, least_length: torch.Tensor, stop_ids: torch.Tensor
) -> None:
    """Set the logits of stop tokens to minus infinity at every index below ``least_length``, in place."""
    is_forbidden = (index < least_length[:, None])[:, :, None] & (stop_ids >= 0)[:, None]
    # Added, not assigned: entries without a stop token add 0 to token 0.
    change = torch.zeros_like(is_forbidden, dtype=logits.dtype).masked_fill_(is_forbidden, -torch.inf)
    logits.scatter_add_(2, stop_ids.clamp(min=0)[:, None].expand(change.shape), change)


def _penalise(
    logits: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor, columns: SamplingColumns
) -> None:
    """Apply penalties in place.

    The repetition penalty applies to tokens of prompt and answer, the two others to tokens of the answer.
    """
    in_answer = counts > 0
    repetition = torch.where(in_prompt | in_answer, columns.repetition_penalty[:, None, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    presence, frequency = columns.presence_penalty[:, None, None], columns.frequency_penalty[:, None, None]
    logits -= presence * in_answer + frequency * counts
