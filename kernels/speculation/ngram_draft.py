"""Find where a row's newest tokens occurred before, in its prompt and answer; draft what followed there.

The step has R rows with T positions each. The tables have N rows for requests and one row for padding; the
history has M columns. Row r of the step is row ``q = rows[r]`` of the tables; ``a = accepted[r]`` tokens were
just gained, and ``n = num_computed[q] + 1`` tokens of the row are known. First the gained tokens are added to
the history:

    history[q, n - a … n - 1] = results[r, 3 … 3 + a - 1]

Then each place e < n is rated by how many tokens just before it equal the newest tokens:

    length(e) = the largest j <= max_n with history[q, e - j … e - 1] == history[q, n - j … n - 1]

The place e with the greatest length is chosen, if that length is at least min_n. If several places have the
greatest length, the latest of them is chosen. The tokens from e on are copied as drafts, as many as the
budget ``num_drafts[q]`` allows. The copy may reach into the newest tokens, and from there into the drafts
themselves, as in LZ77: text that repeats with a short period is drafted again and again.

    m                   = num_drafts[q], 0 without such an e
    tokens[q, 1 + i]    = history[q, e + i % (n - e)]    i = 0 … m - 1
    num_drafts[q]       = m

Rows with ``a = 0`` don't change. In rows that aren't active, or have no budget, only the history changes.
Tokens for which the history has no column are dropped; no sequence may be that long.

Prompt lookup decoding: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding. LZ77: Ziv, Lempel, A
Universal Algorithm for Sequential Data Compression, 1977.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import cpu_jit
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.speculation.bound_tensors import BoundTensors

_ROWS_A_GRAIN = 32  # about 100 µs in histories of some thousand tokens


@dataclass(frozen=True, kw_only=True)
class NgramDraft(BoundTensors):
    """The search for drafts, bound to persistent tensors, so that a call only passes the number of rows.

    Inspecting the tensors in every step would take longer than the look-up in a short history.

    The tables have ``N + 1`` rows, the other tensors at least as many rows as a call has. All tensors are
    contiguous. A call does not wait for the device.
    """

    rows: Tensor
    """``[R]`` int64 rows of the tables; those with accepted tokens are distinct"""
    accepted: Tensor
    """``[R]`` int32: tokens gained by the step"""
    results: Tensor
    """``[R, T + 3]`` int64: the gained tokens, from column 3 on"""
    history: Tensor
    """table ``[N + 1, M]`` int32: all known tokens except those just gained, which a call adds"""
    tokens: Tensor
    """table ``[N + 1, T]`` int64: drafts are written after the first token"""
    num_drafts: Tensor
    """table ``[N + 1]`` int32: the budget before a call, the number of drafts after it"""
    num_computed: Tensor
    """table ``[N + 1]`` int32; includes the tokens just gained, except the last one"""
    active: Tensor
    """table ``[N + 1]`` int32: 1 if the row is active, else 0"""
    min_n: int
    """minimum number of newest tokens that an earlier occurrence must match"""
    max_n: int
    """maximum number of newest tokens that are compared"""

    def __post_init__(self) -> None:
        assert 1 <= self.min_n <= self.max_n
        super().__post_init__()

    def __call__(self, num_rows: int) -> None:
        if self.rows.is_cuda:
            _launch(self, num_rows)
        else:
            _ngram_draft_cpu.parallel_for(num_rows, _ROWS_A_GRAIN, *self._arrays, self.min_n, self.max_n)


def ngram_draft_reference(
    rows: Tensor,
    *,
    accepted: Tensor,
    results: Tensor,
    history: Tensor,
    tokens: Tensor,
    num_drafts: Tensor,
    num_computed: Tensor,
    active: Tensor,
    min_n: int,
    max_n: int,
) -> None:
    """Reference of :class:`NgramDraft`. Tries one match length after the other, and waits for the device."""
    for r, q in enumerate(rows.tolist()):
        gained = results[r, 3 : 3 + int(accepted[r])].tolist()
        if not gained:
            continue
        n = int(num_computed[q]) + 1
        for index, token in enumerate(gained, start=n - len(gained)):
            if index < history.shape[1]:
                history[q, index] = token
        budget = int(num_drafts[q])
        if not active[q] or budget == 0:
            continue
        known = history[q, :n].tolist() if n <= history.shape[1] else []
        drafts = _look_up(known, min_n, max_n, budget)
        num_drafts[q] = len(drafts)
        tokens[q, 1 : 1 + len(drafts)] = torch.tensor(drafts)


def _look_up(known: list[int], min_n: int, max_n: int, budget: int) -> list[int]:
    """Return the tokens after the latest earlier occurrence of the longest suffix that occurred before."""
    for length in range(max_n, min_n - 1, -1):
        suffix = known[-length:]
        for end in range(len(known) - 1, length - 1, -1):
            if known[end - length : end] == suffix:
                text = list(known)
                for i in range(budget):
                    text.append(text[end + i])
                return text[len(known) :]
    return []


# One program per row. It goes through the history backwards, BLOCK places e at a time. Each place is
# compared with the MAX_N newest tokens in MAX_N shifted loads; all loads after the first hit the L1 cache.
# The program stops at the first block with a full match. Length and place are compared as one key, with the
# length in the higher bits. Barriers are needed where threads of the program read what other threads wrote
# (the gained tokens), or write what other threads read (the budget).
@triton_jit
def _ngram_draft_kernel(
    rows_ptr,
    accepted_ptr,
    results_ptr,
    history_ptr,
    tokens_ptr,
    num_drafts_ptr,
    num_computed_ptr,
    active_ptr,
    num_positions,
    max_len,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    accepted = tl.load(accepted_ptr + r)
    if accepted == 0:
        return
    q = tl.load(rows_ptr + r)
    history = history_ptr + q * max_len
    n = tl.load(num_computed_ptr + q) + 1
    i = tl.arange(0, BLOCK_T)
    index = n - accepted + i
    gained = tl.load(results_ptr + r * (num_positions + 3) + 3 + i, mask=i < accepted, other=0)
    tl.store(history + index, gained.to(tl.int32), mask=(i < accepted) & (index < max_len))
    budget = tl.load(num_drafts_ptr + q)
    if (tl.load(active_ptr + q) == 0) | (budget == 0):
        return
    tl.debug_barrier()
    best = tl.full((), 0, tl.int64)
    stop = tl.where(n <= max_len, n, 0)
    while (stop > 1) & (best < (MAX_N << 32)):
        end = stop - 1 - tl.arange(0, BLOCK)
        alive = end >= 1
        length = tl.zeros((BLOCK,), tl.int32)
        for j in tl.static_range(1, MAX_N + 1):
            newest = tl.load(history + n - j, mask=n >= j, other=-1)
            earlier = tl.load(history + end - j, mask=end >= j, other=-2)
            alive = alive & (earlier == newest)
            length += alive.to(tl.int32)
        key = (length.to(tl.int64) << 32) + end
        best = tl.maximum(best, tl.max(tl.where(length >= MIN_N, key, 0)))
        stop -= BLOCK
    end = (best & 0xFFFFFFFF).to(tl.int32)
    num_drafts = tl.where(best > 0, budget, 0)
    drafts = tl.load(history + end + i % (n - end), mask=i < num_drafts, other=0).to(tl.int64)
    tl.store(tokens_ptr + q * num_positions + 1 + i, drafts, mask=i < num_drafts)
    tl.debug_barrier()
    tl.store(num_drafts_ptr + q, num_drafts)


def _launch(op: NgramDraft, num_rows: int) -> None:
    if num_rows == 0:
        return
    num_positions, max_len = op.tokens.shape[1], op.history.shape[1]
    _ngram_draft_kernel[(num_rows,)](
        *op._tensors,
        num_positions,
        max_len,
        MIN_N=op.min_n,
        MAX_N=op.max_n,
        BLOCK_T=triton.next_power_of_2(num_positions),
        BLOCK=min(2048, triton.next_power_of_2(max_len)),
        num_warps=8,
    )


@cpu_jit
def _match_length(history, n, end, max_n):
    """Return how many tokens before ``end`` equal the newest tokens, at most ``max_n``."""
    length = 0
    while length < max_n and length < end and history[end - 1 - length] == history[n - 1 - length]:
        length += 1
    return length


@cpu_jit
def _occurs(token, stretch):
    """Return whether the stretch has the token. The loop has no early exit, so that it is vectorized."""
    count = np.int32(0)
    for i in range(stretch.shape[0]):
        count += np.int32(stretch[i] == token)
    return count > 0


@cpu_jit
def _find_end(history, n, min_n, max_n):
    """Return the place after the occurrence from which drafts are copied; 0 if there is none."""
    best_end, best_length, stop = 0, min_n - 1, n - 1
    while stop > 0 and best_length < max_n:
        start = max(0, stop - 256)
        if _occurs(history[n - 1], history[start:stop]):  # most stretches lack the newest token
            for end in range(stop, start, -1):
                length = _match_length(history, n, end, max_n)
                if length > best_length:
                    best_end, best_length = end, length
        stop = start
    return best_end


@cpu_jit
def _ngram_draft_cpu(
    rows,
    accepted,
    results,
    history,
    tokens,
    num_drafts,
    num_computed,
    active,
    min_n,
    max_n,
    begin,
    end,
):
    max_len = history.shape[1]
    for r in range(begin, end):
        q = rows[r]
        if accepted[r] == 0:
            continue
        n = num_computed[q] + 1
        first = n - accepted[r]
        for i in range(min(accepted[r], max_len - first)):
            history[q, first + i] = results[r, 3 + i]
        if not active[q] or num_drafts[q] == 0:
            continue
        found = _find_end(history[q], n, min_n, max_n) if n <= max_len else 0
        if found == 0:
            num_drafts[q] = 0
        for i in range(num_drafts[q]):
            tokens[q, 1 + i] = history[q, found + i] if found + i < n else tokens[q, 1 + found + i - n]
