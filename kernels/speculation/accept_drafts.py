"""Keep the drafts that equal the target's own choice, and advance each row's tables to the next step.

The step has R rows with T positions each. The tables have N rows for requests and one row for padding.
Row r of the step is row ``q = rows[r]`` of the tables, with ``L = num_computed[q]`` and nd = num_drafts[q].
``sampled[r, i]`` is the target model's choice of the token after position i, and ``tokens[q, i + 1]`` is the
draft of the same token:

    matches     = number of leading i in 1 … nd with tokens[q, i] == sampled[r, i - 1]
    gained      = sampled[r, 0 … matches], cut after the first token in stop_ids[q]
    a           = number of gained tokens
    known       = L + a + 1
    finite      = all is_finite[r, 0 … a-1]
    done        = the last gained token is in stop_ids[q], or known >= limit[q], or not finite

A forced row (``forced[r] >= 0``: its prompt continues, nothing was sampled) gains only ``forced[r]``. It
counts as finite, and this token can't stop the row. Then

    num_computed[q] = L + a
    state_slot[q]   = write_slots[r, a - 1]
    tokens[q]       = last gained token, then zeros: room for the drafter
    num_drafts[q]   = 0 if forced or done, else min(max_drafts[q], limit[q] - known - 1, T - 1), at least 0
    active[q]       = active[q] and not done
    results[r]      = a, finite, nd (0 if forced), gained tokens, zeros

In a row that isn't active, ``accepted`` and ``results`` are zero, and its tables don't change.

The token at an index is the target's own sample for that index, whether it was drafted or not. So the answer
can't depend on the drafter. The probability that a deterministic draft d is accepted is the target's
probability of d, as in rejection sampling (Leviathan et al. 2023, section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.jit import cpu_jit
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.speculation.bound_tensors import BoundTensors

_ROWS_A_GRAIN = 512  # about 100 µs


@dataclass(frozen=True, kw_only=True)
class AcceptDrafts(BoundTensors):
    """:func:`accept_drafts` bound to persistent tensors; a call only passes this step's samples.

    The tables have ``N + 1`` rows, the other tensors at least as many rows as a call has. All tensors are
    contiguous. A call does not wait for the device.
    """

    rows: Tensor
    """``[R]`` int64 rows of the tables; active rows are distinct"""
    write_slots: Tensor
    """``[R, T]`` int32: where the state after each position went"""
    forced: Tensor
    """``[R]`` int64: the next token of the prompt; negative if the row samples"""
    tokens: Tensor
    """table ``[N + 1, T]`` int64"""
    num_drafts: Tensor
    """table ``[N + 1]`` int32"""
    num_computed: Tensor
    """table ``[N + 1]`` int32"""
    state_slot: Tensor
    """table ``[N + 1]`` int32"""
    active: Tensor
    """table ``[N + 1]`` int32: 1 if the row is active, else 0"""
    limit: Tensor
    """table ``[N + 1]`` int32: maximum number of tokens that may be known; not written"""
    max_drafts: Tensor
    """table ``[N + 1]`` int32; not written"""
    stop_ids: Tensor
    """table ``[N + 1, S]`` int64: up to S stop ids of a row, padded with -1; not written"""
    accepted: Tensor
    """written: ``[R]`` int32"""
    results: Tensor
    """written: ``[R, T + 3]`` int64"""

    def __call__(self, num_rows: int, *, sampled: Tensor, is_finite: Tensor) -> None:
        """Accept or reject. ``sampled`` is ``[num_rows, T]`` int64, ``is_finite`` ``[num_rows, T]`` bool.

        Both are only read.
        """
        if self.rows.is_cuda:
            _launch(self, num_rows, sampled, is_finite)
        else:
            samples = sampled.contiguous(), is_finite.contiguous()
            _accept_drafts_cpu.parallel_for(num_rows, _ROWS_A_GRAIN, *samples, *self._arrays)


def accept_drafts(rows: Tensor, *, sampled: Tensor, is_finite: Tensor, **tensors: Tensor) -> None:
    """Accept or reject in place. ``tensors`` are the other fields of :class:`AcceptDrafts`, by name.

    A caller that does this every step creates :class:`AcceptDrafts` once instead: on a CPU, inspecting 15
    tensors takes longer than computing the rows.
    """
    AcceptDrafts(rows=rows, **tensors)(len(rows), sampled=sampled, is_finite=is_finite)


def accept_drafts_reference(
    rows: Tensor,
    *,
    sampled: Tensor,
    is_finite: Tensor,
    write_slots: Tensor,
    forced: Tensor,
    tokens: Tensor,
    num_drafts: Tensor,
    num_computed: Tensor,
    state_slot: Tensor,
    active: Tensor,
    limit: Tensor,
    max_drafts: Tensor,
    stop_ids: Tensor,
    accepted: Tensor,
    results: Tensor,
) -> None:
    """Reference of :func:`accept_drafts`. Computes one row after the other, and waits for the device."""
    num_drafted = tokens.shape[1] - 1
    for r, q in enumerate(rows.tolist()):
        accepted[r] = 0
        results[r] = 0
        if not active[q]:
            continue
        is_forced = int(forced[r]) >= 0
        tried = 0 if is_forced else int(num_drafts[q])
        chosen, guessed = sampled[r].tolist(), tokens[q].tolist()
        a = 1
        while a <= tried and guessed[a] == chosen[a - 1]:
            a += 1
        gained = [int(forced[r])] if is_forced else chosen[:a]
        stops = [] if is_forced else [i for i, token in enumerate(gained) if token in stop_ids[q].tolist()]
        gained = gained[: stops[0] + 1] if stops else gained
        a = len(gained)
        finite = is_forced or bool(is_finite[r, :a].all())
        known = int(num_computed[q]) + a + 1
        done = bool(stops) or known >= int(limit[q]) or not finite
        budget = min(int(max_drafts[q]), int(limit[q]) - known - 1, num_drafted)
        num_computed[q] += a
        state_slot[q] = write_slots[r, a - 1]
        tokens[q] = 0
        tokens[q, 0] = gained[-1]
        num_drafts[q] = 0 if is_forced or done else max(0, budget)
        active[q] = not done
        accepted[r] = a
        results[r, : 3 + a] = torch.tensor([a, finite, tried, *gained])


# One program per row, with one warp: thread i holds position i and the draft for the next position, so that
# matches, stops and finiteness are reductions over threads. All reads come before the barrier and all writes
# after it, since threads write table entries that other threads read.
@triton_jit
def _accept_drafts_kernel(
    sampled_ptr,
    is_finite_ptr,
    rows_ptr,
    write_slots_ptr,
    forced_ptr,
    tokens_ptr,
    num_drafts_ptr,
    num_computed_ptr,
    state_slot_ptr,
    active_ptr,
    limit_ptr,
    max_drafts_ptr,
    stop_ids_ptr,
    accepted_ptr,
    results_ptr,
    num_positions,
    num_stop_ids,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    q = tl.load(rows_ptr + r)
    i = tl.arange(0, BLOCK_T)
    here = i < num_positions
    result = results_ptr + r * (num_positions + 3)
    if tl.load(active_ptr + q) == 0:
        tl.store(accepted_ptr + r, 0)
        tl.store(result + tl.arange(0, 4), 0, mask=tl.arange(0, 4) < 3)
        tl.store(result + 3 + i, 0, mask=here)
        return
    forced = tl.load(forced_ptr + r)
    is_forced = forced >= 0
    tried = tl.where(is_forced, 0, tl.load(num_drafts_ptr + q))
    chosen = tl.load(sampled_ptr + r * num_positions + i, mask=here, other=0)
    gained = tl.where(is_forced, forced, chosen)
    guessed = tl.load(tokens_ptr + q * num_positions + 1 + i, mask=i + 1 < num_positions, other=0)
    is_match = (guessed == gained) & (i < tried) & (i + 1 < num_positions)
    last = tl.min(tl.where(is_match, BLOCK_T, i))  # position of the last gained token
    s = tl.arange(0, BLOCK_S)
    stop_ids = tl.load(stop_ids_ptr + q * num_stop_ids + s, mask=s < num_stop_ids, other=-1)
    stop_ids = tl.where(is_forced, -1, stop_ids)
    is_stop = tl.max((gained[:, None] == stop_ids[None, :]).to(tl.int32), axis=1) != 0
    first_stop = tl.min(tl.where(is_stop, i, BLOCK_T))
    stopped = first_stop <= last
    last = tl.minimum(first_stop, last)
    is_finite = tl.load(is_finite_ptr + r * num_positions + i, mask=i <= last, other=1)
    finite = is_forced | (tl.min(is_finite.to(tl.int32)) != 0)
    computed = tl.load(num_computed_ptr + q) + last + 1
    budget = tl.load(limit_ptr + q) - computed - 2
    done = stopped | (budget < 0) | (finite == 0)
    budget = tl.minimum(tl.minimum(tl.load(max_drafts_ptr + q), budget), num_positions - 1)
    budget = tl.where(is_forced | done, 0, tl.maximum(budget, 0))
    slot = tl.load(write_slots_ptr + r * num_positions + last)
    newest = tl.sum(tl.where(i == last, gained, 0))
    tl.debug_barrier()
    tl.store(num_computed_ptr + q, computed)
    tl.store(state_slot_ptr + q, slot)
    tl.store(tokens_ptr + q * num_positions + i, tl.where(i == 0, newest, 0), mask=here)
    tl.store(num_drafts_ptr + q, budget)
    tl.store(active_ptr + q, tl.where(done, 0, 1).to(active_ptr.dtype.element_ty))
    tl.store(accepted_ptr + r, last + 1)
    tl.store(result, (last + 1).to(tl.int64))
    tl.store(result + 1, finite.to(tl.int64))
    tl.store(result + 2, tried.to(tl.int64))
    tl.store(result + 3 + i, tl.where(i <= last, gained, 0), mask=here)


def _launch(op: AcceptDrafts, num_rows: int, sampled: Tensor, is_finite: Tensor) -> None:
    if num_rows == 0:
        return
    num_positions, num_stop_ids = op.tokens.shape[1], op.stop_ids.shape[1]
    _accept_drafts_kernel[(num_rows,)](
        sampled.contiguous(),
        is_finite.contiguous().view(torch.uint8),
        *op._tensors,
        num_positions,
        num_stop_ids,
        BLOCK_T=triton.next_power_of_2(num_positions),
        BLOCK_S=triton.next_power_of_2(max(1, num_stop_ids)),
        num_warps=1,
    )


@cpu_jit
def _accept_drafts_cpu(
    sampled,
    is_finite,
    rows,
    write_slots,
    forced,
    tokens,
    num_drafts,
    num_computed,
    state_slot,
    active,
    limit,
    max_drafts,
    stop_ids,
    accepted,
    results,
    begin,
    end,
):
    num_positions = tokens.shape[1]
    for r in range(begin, end):
        q = rows[r]
        accepted[r] = 0
        for i in range(num_positions + 3):
            results[r, i] = 0
        if not active[q]:
            continue
        is_forced = forced[r] >= 0
        tried = 0 if is_forced else min(num_drafts[q], num_positions - 1)
        finite, stopped, a = True, False, 0
        newest = forced[r]
        while True:
            if not is_forced:
                newest = sampled[r, a]
                finite &= is_finite[r, a]
                for s in range(stop_ids.shape[1]):
                    stopped |= stop_ids[q, s] == newest
            results[r, 3 + a] = newest
            a += 1
            if stopped or a > tried or tokens[q, a] != newest:
                break
        known = num_computed[q] + a + 1
        done = stopped or known >= limit[q] or not finite
        budget = max(0, min(max_drafts[q], limit[q] - known - 1, num_positions - 1))
        num_computed[q] += a
        state_slot[q] = write_slots[r, a - 1]
        tokens[q, 0] = newest
        for i in range(1, num_positions):
            tokens[q, i] = 0
        num_drafts[q] = 0 if is_forced or done else budget
        active[q] = not done
        accepted[r] = results[r, 0] = a
        results[r, 1] = finite
        results[r, 2] = tried
