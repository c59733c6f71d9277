"""The flush of a Mamba-2 layer's states: each row's state is advanced by the row's pending tokens and stored.
:mod:`kernels.replay.kept_inputs` explains it; :mod:`kernels.replay.selective_state_replay` is the step that
keeps the inputs.

Kept of each token: x, B, and the two numbers of each head that follow from dt, ``exp(A dt')`` and ``dt'``. C
and D only matter for outputs. With the shapes of an 8 B model these are 19 KB a token, beside a state of
4 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding, round_state, rounding_key
from kernels.gpu.tiles import choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.replay.kept_inputs import NOTHING, PendingRows, kept_tensor, reference_pending
from kernels.replay.selective_state_replay_cpu import replay_heads
from kernels.ssm.reference_row import ReferenceRow
from kernels.ssm.selective_state_update import advance_tile, reference_step, replay_tile_request
from kernels.ssm.state_arguments import decode_states

_GRAIN_ELEMENTS = 2**18  # as in the slots form


@dataclass(frozen=True)
class KeptSsmInputs:
    """One layer's kept inputs: ``N`` rows of ``P`` places, contiguous."""

    x: Tensor
    """``[N, P, H, head_dim]`` in the model's dtype"""
    gates: Tensor
    """``[N, P, H, 2]`` float32: decay ``exp(A dt')``, step ``dt'``"""
    B: Tensor
    """``[N, P, G, state_dim]`` in the model's dtype"""

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_positions: int,
        heads: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KeptSsmInputs:
        """Make room for steps of ``num_positions``. ``heads`` are H, head_dim, G, state_dim."""
        num_heads, head_dim, num_groups, state_dim = heads
        wide = torch.promote_types(dtype, torch.float32)
        size = num_rows, num_positions
        return cls(
            kept_tensor(*size, (num_heads, head_dim), dtype, device),
            kept_tensor(*size, (num_heads, 2), wide, device),
            kept_tensor(*size, (num_groups, state_dim), dtype, device),
        )

    @property
    def places(self) -> int:
        return self.x.shape[1]


def selective_state_flush_reference(
    ssm_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: KeptSsmInputs,
    pending: PendingRows,
    *,
    rounding: StateRounding = NEAREST,
) -> None:
    """Reference of :func:`selective_state_flush`: one row and one token after the other."""
    for row in reference_pending(read_slots, write_slots, pending, kept.places):
        x, gates, B = (t[row.kept_row, row.places] for t in (kept.x, kept.gates, kept.B))
        decay, step = gates.unbind(-1)
        B = B.repeat_interleave(x.shape[1] // B.shape[1], dim=1)
        tokens = zip(step[..., None] * x, decay, B, B, x, strict=True)
        count = len(row.places)
        scanned = ReferenceRow(
            slice(0, count), row.num_before, row.read_slot, {count: row.write_slot}, grid=1
        )
        scanned.scan(reference_step, tokens, ssm_state, torch.empty_like(x), rounding)


@triton_jit
def advance_pending(
    h, x, x_stride, gates, gates_stride, B, B_stride, p, head_dim, n, state_dim, state_ptr, elements, first,
    count, layer_seed, head, PLACES: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Return the state's tile after ``count`` kept tokens. ``first`` is the index of the first of them.

    x, gates and B point to a row's place 0, and the strides lead to the next place. A token's operands are
    loaded before the previous token is computed.
    """
    place, more = first % PLACES, count > 0
    x_next = tl.load(x + place * x_stride, mask=p < tl.where(more, head_dim, 0), other=0.0)
    B_next = tl.load(B + place * B_stride, mask=n < tl.where(more, state_dim, 0), other=0.0)
    decay_next = tl.load(gates + place * gates_stride, mask=more, other=0.0)
    step_next = tl.load(gates + place * gates_stride + 1, mask=more, other=0.0)
    for j in range(count):
        x_j, B_j, decay, step = x_next.to(tl.float32), B_next.to(tl.float32), decay_next, step_next
        place, more = (first + j + 1) % PLACES, j + 1 < count
        x_next = tl.load(x + place * x_stride, mask=p < tl.where(more, head_dim, 0), other=0.0)
        B_next = tl.load(B + place * B_stride, mask=n < tl.where(more, state_dim, 0), other=0.0)
        decay_next = tl.load(gates + place * gates_stride, mask=more, other=0.0)
        step_next = tl.load(gates + place * gates_stride + 1, mask=more, other=0.0)
        h = advance_tile(h, x_j, decay, step, B_j)
        key = rounding_key(layer_seed, head, first + j + 1)
        h = round_state(h, key, elements, state_ptr.dtype.element_ty, STOCHASTIC)
    return h


# One program per (row, head, rows of the state), as in the slots form.
@triton_jit
def _flush_tiles_kernel(
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    kept_x_ptr,
    kept_gates_ptr,
    kept_B_ptr,
    rows_ptr,
    counts_ptr,
    seq_lens_ptr,
    slot_stride,
    head_stride,
    state_row_stride,
    layer_seed,
    first_head,
    num_heads,
    head_dim,
    state_dim,
    HEADS_PER_GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, blocks_p = tl.program_id(1).to(tl.int64), tl.cdiv(head_dim, BLOCK_P)
    slot, count = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(counts_ptr + row)
    if (slot == 0) | (count == 0):
        return
    head = tl.program_id(0) // blocks_p
    group, num_groups = head // HEADS_PER_GROUP, num_heads // HEADS_PER_GROUP
    p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    live_p, live_n = p < head_dim, n < state_dim
    live = live_p[:, None] & live_n[None, :]
    first_place = tl.load(rows_ptr + row).to(tl.int64) * PLACES
    kept_x = kept_x_ptr + (first_place * num_heads + head) * head_dim + p
    kept_gates = kept_gates_ptr + (first_place * num_heads + head) * 2
    kept_B = kept_B_ptr + (first_place * num_groups + group) * state_dim + n
    state_tile = state_ptr + head * head_stride + p[:, None] * state_row_stride + n[None, :]
    elements = p[:, None] * state_dim + n[None, :]
    h = tl.load(state_tile + slot * slot_stride, mask=live, other=0.0).to(tl.float32)
    h = advance_pending(
        h, kept_x, num_heads * head_dim, kept_gates, num_heads * 2, kept_B, num_groups * state_dim, p,
        head_dim, n, state_dim, state_ptr, elements, tl.load(seq_lens_ptr + row) - count, count, layer_seed,
        head + first_head, PLACES, STOCHASTIC,
    )  # fmt: skip
    target = tl.load(write_slots_ptr + row).to(tl.int64)
    tl.store(state_tile + target * slot_stride, h.to(state_ptr.dtype.element_ty), mask=live)


def _launch_flush(
    ssm_state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: KeptSsmInputs, pending: PendingRows,
    rounding: StateRounding,
) -> None:  # fmt: skip
    num_heads, head_dim, state_dim = ssm_state.shape[1:]
    if len(read_slots) == 0:
        return
    tiles = choose(replay_tile_request(kept.x.dtype, ssm_state.dtype, head_dim, state_dim), ssm_state.device)
    _flush_tiles_kernel[(num_heads * triton.cdiv(head_dim, tiles["BLOCK_P"]), len(read_slots))](
        ssm_state, read_slots, write_slots, kept.x, kept.gates, kept.B, pending.rows, pending.counts,
        pending.seq_lens, *ssm_state.stride()[:3], rounding.signed_seed, rounding.first_head, num_heads,
        head_dim, state_dim, HEADS_PER_GROUP=num_heads // kept.B.shape[2], PLACES=kept.places,
        STOCHASTIC=rounding.is_stochastic, BLOCK_N=triton.next_power_of_2(state_dim), **tiles,
    )  # fmt: skip


def _flush_on_cpu(
    ssm_state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: KeptSsmInputs, pending: PendingRows,
    rounding: StateRounding,
) -> None:  # fmt: skip
    num_heads, head_dim, width = ssm_state.shape[1:]
    replay_heads.parallel_for(
        len(read_slots) * num_heads,
        max(1, _GRAIN_ELEMENTS // (head_dim * width)),
        *(NOTHING, (0, 0, 0)) * 4,  # there are no new positions
        *(NOTHING,) * 3,
        *decode_states(ssm_state, read_slots, write_slots, pending.seq_lens, rounding),
        (np.float32(0), np.float32(0)),
        (0, num_heads, head_dim, kept.B.shape[2], width),
        *kept_arrays(kept, pending),
        NOTHING,
    )


def kept_arrays(
    kept: KeptSsmInputs, pending: PendingRows
) -> tuple[tuple[FlatArray, ...], tuple[object, ...]]:
    """Return a CPU kernel's arguments for kept inputs and pending rows."""
    return tuple(map(FlatArray, (kept.x, kept.gates, kept.B))), pending.arrays(kept.places)


def selective_state_flush(
    ssm_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: KeptSsmInputs,
    pending: PendingRows,
    *,
    rounding: StateRounding = NEAREST,
) -> None:
    """Advance each row's state by its pending tokens, of which ``pending.seq_lens`` counts no later ones."""
    operands = (ssm_state, read_slots, write_slots, kept, pending)
    if kept.x.dtype == torch.float64:
        selective_state_flush_reference(*operands, rounding=rounding)
    elif ssm_state.is_cuda:
        _launch_flush(*operands, rounding)
    else:
        _flush_on_cpu(*operands, rounding)
