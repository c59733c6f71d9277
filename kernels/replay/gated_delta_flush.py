"""The flush of a Gated DeltaNet layer's states: each row's state is advanced by the row's pending tokens and
stored. :mod:`kernels.replay.kept_inputs` explains it; :mod:`kernels.replay.gated_delta_replay` is the step
that keeps the inputs.

Kept of each token: the normalized k, v, and the two numbers of each head that follow from a and b, ``exp(g)``
and ``beta``. q only matters for outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding, round_state, rounding_key
from kernels.gated_delta.gated_delta_update import advance_tile, reference_step, replay_tile_request
from kernels.gpu.tiles import choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.replay.gated_delta_replay_cpu import replay_heads
from kernels.replay.kept_inputs import NOTHING, PendingRows, kept_tensor, reference_pending
from kernels.ssm.reference_row import ReferenceRow
from kernels.ssm.state_arguments import decode_states

_GRAIN_ELEMENTS = 2**18  # as in the slots form


@dataclass(frozen=True)
class KeptDeltaInputs:
    """One layer's kept inputs: ``N`` rows of ``P`` places, contiguous."""

    k: Tensor
    """``[N, P, Hk, key_dim]`` float32, normalized"""
    v: Tensor
    """``[N, P, Hv, value_dim]`` in the model's dtype"""
    gates: Tensor
    """``[N, P, Hv, 2]`` float32: decay ``exp(g)``, ``beta``"""

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_positions: int,
        heads: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KeptDeltaInputs:
        """Make room for steps of ``num_positions``. ``heads`` are Hk, key_dim, Hv, value_dim."""
        num_key_heads, key_dim, num_heads, value_dim = heads
        wide = torch.promote_types(dtype, torch.float32)
        size = num_rows, num_positions
        return cls(
            kept_tensor(*size, (num_key_heads, key_dim), wide, device),
            kept_tensor(*size, (num_heads, value_dim), dtype, device),
            kept_tensor(*size, (num_heads, 2), wide, device),
        )

    @property
    def places(self) -> int:
        return self.v.shape[1]


def gated_delta_flush_reference(
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: KeptDeltaInputs,
    pending: PendingRows,
    *,
    rounding: StateRounding = NEAREST,
) -> None:
    """Reference of :func:`gated_delta_flush`: one row and one token after the other."""
    for row in reference_pending(read_slots, write_slots, pending, kept.places):
        k, v, gates = (t[row.kept_row, row.places] for t in (kept.k, kept.v, kept.gates))
        k = k.repeat_interleave(v.shape[1] // k.shape[1], dim=1)
        tokens = zip(k, k, v, *gates.unbind(-1), strict=True)
        count = len(row.places)
        scanned = ReferenceRow(
            slice(0, count), row.num_before, row.read_slot, {count: row.write_slot}, grid=1
        )
        scanned.scan(reference_step, tokens, state, torch.empty_like(v), rounding)


@triton_jit
def advance_pending(
    S, k, k_stride, v, v_stride, gates, gates_stride, rows, value_dim, columns, key_dim, state_ptr, elements,
    first, count, layer_seed, head, PLACES: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Return the state's tile after ``count`` kept tokens. ``first`` is the index of the first of them.

    k, v and gates point to a row's place 0, and the strides lead to the next place. A token's operands are
    loaded before the previous token is computed.
    """
    place, more = first % PLACES, count > 0
    k_next = tl.load(k + place * k_stride, mask=columns < tl.where(more, key_dim, 0), other=0.0)
    v_next = tl.load(v + place * v_stride, mask=rows < tl.where(more, value_dim, 0), other=0.0)
    decay_next = tl.load(gates + place * gates_stride, mask=more, other=0.0)
    beta_next = tl.load(gates + place * gates_stride + 1, mask=more, other=0.0)
    for j in range(count):
        k_j, v_j, decay, beta = k_next, v_next.to(tl.float32), decay_next, beta_next
        place, more = (first + j + 1) % PLACES, j + 1 < count
        k_next = tl.load(k + place * k_stride, mask=columns < tl.where(more, key_dim, 0), other=0.0)
        v_next = tl.load(v + place * v_stride, mask=rows < tl.where(more, value_dim, 0), other=0.0)
        decay_next = tl.load(gates + place * gates_stride, mask=more, other=0.0)
        beta_next = tl.load(gates + place * gates_stride + 1, mask=more, other=0.0)
        S = advance_tile(S, k_j, v_j, decay, beta)
        key = rounding_key(layer_seed, head, first + j + 1)
        S = round_state(S, key, elements, state_ptr.dtype.element_ty, STOCHASTIC)
    return S


# One program per (row, head, rows of the state), as in the slots form.
@triton_jit
def _flush_tiles_kernel(
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    kept_k_ptr,
    kept_v_ptr,
    kept_gates_ptr,
    rows_ptr,
    counts_ptr,
    seq_lens_ptr,
    slot_stride,
    head_stride,
    state_row_stride,
    layer_seed,
    first_head,
    num_heads,
    value_dim,
    key_dim,
    HEADS_PER_KEY_HEAD: tl.constexpr,
    PLACES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, blocks_v = tl.program_id(1).to(tl.int64), tl.cdiv(value_dim, BLOCK_V)
    slot, count = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(counts_ptr + row)
    if (slot == 0) | (count == 0):
        return
    head = tl.program_id(0) // blocks_v
    key_head, num_key_heads = head // HEADS_PER_KEY_HEAD, num_heads // HEADS_PER_KEY_HEAD
    rows = tl.program_id(0) % blocks_v * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.arange(0, BLOCK_K)
    live_v, live_k = rows < value_dim, columns < key_dim
    live = live_v[:, None] & live_k[None, :]
    first_place = tl.load(rows_ptr + row).to(tl.int64) * PLACES
    kept_k = kept_k_ptr + (first_place * num_key_heads + key_head) * key_dim + columns
    kept_v = kept_v_ptr + (first_place * num_heads + head) * value_dim + rows
    kept_gates = kept_gates_ptr + (first_place * num_heads + head) * 2
    state_tile = state_ptr + head * head_stride + rows[:, None] * state_row_stride + columns[None, :]
    elements = rows[:, None] * key_dim + columns[None, :]
    S = tl.load(state_tile + slot * slot_stride, mask=live, other=0.0).to(tl.float32)
    S = advance_pending(
        S, kept_k, num_key_heads * key_dim, kept_v, num_heads * value_dim, kept_gates, num_heads * 2, rows,
        value_dim, columns, key_dim, state_ptr, elements, tl.load(seq_lens_ptr + row) - count, count,
        layer_seed, head + first_head, PLACES, STOCHASTIC,
    )  # fmt: skip
    target = tl.load(write_slots_ptr + row).to(tl.int64)
    tl.store(state_tile + target * slot_stride, S.to(state_ptr.dtype.element_ty), mask=live)


def _launch_flush(
    state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: KeptDeltaInputs, pending: PendingRows,
    rounding: StateRounding,
) -> None:  # fmt: skip
    num_heads, value_dim, key_dim = state.shape[1:]
    if len(read_slots) == 0:
        return
    tiles = choose(replay_tile_request(kept.v.dtype, state.dtype, value_dim, key_dim), state.device)
    _flush_tiles_kernel[(num_heads * triton.cdiv(value_dim, tiles["BLOCK_V"]), len(read_slots))](
        state, read_slots, write_slots, kept.k, kept.v, kept.gates, pending.rows, pending.counts,
        pending.seq_lens, *state.stride()[:3], rounding.signed_seed, rounding.first_head, num_heads,
        value_dim, key_dim, HEADS_PER_KEY_HEAD=num_heads // kept.k.shape[2], PLACES=kept.places,
        STOCHASTIC=rounding.is_stochastic, BLOCK_K=triton.next_power_of_2(key_dim), **tiles,
    )  # fmt: skip


def _flush_on_cpu(
    state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: KeptDeltaInputs, pending: PendingRows,
    rounding: StateRounding,
) -> None:  # fmt: skip
    num_heads, value_dim, key_dim = state.shape[1:]
    replay_heads.parallel_for(
        len(read_slots) * num_heads,
        max(1, _GRAIN_ELEMENTS // (value_dim * key_dim)),
        *(NOTHING, (0, 0, 0)) * 5,  # there are no new positions
        *(NOTHING,) * 2,
        *decode_states(state, read_slots, write_slots, pending.seq_lens, rounding),
        np.float32(0),
        (0, kept.k.shape[2], key_dim, num_heads, value_dim),
        *kept_arrays(kept, pending),
        NOTHING,
    )


def kept_arrays(
    kept: KeptDeltaInputs, pending: PendingRows
) -> tuple[tuple[FlatArray, ...], tuple[object, ...]]:
    """Return a CPU kernel's arguments for kept inputs and pending rows."""
    return tuple(map(FlatArray, (kept.k, kept.v, kept.gates))), pending.arrays(kept.places)


def gated_delta_flush(
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: KeptDeltaInputs,
    pending: PendingRows,
    *,
    rounding: StateRounding = NEAREST,
) -> None:
    """Advance each row's state by its pending tokens, of which ``pending.seq_lens`` counts no later ones."""
    operands = (state, read_slots, write_slots, kept, pending)
    if kept.v.dtype == torch.float64:
        gated_delta_flush_reference(*operands, rounding=rounding)
    elif state.is_cuda:
        _launch_flush(*operands, rounding)
    else:
        _flush_on_cpu(*operands, rounding)
