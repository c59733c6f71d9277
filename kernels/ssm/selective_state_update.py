"""One decode step of a Mamba-2 layer: the SSM recurrence over the ``T`` positions of each row.

    dt' = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt') h_{t-1} + dt' x_t B_t^T                    [P, N] per head
    y_t = h_t C_t + D x_t

There are R rows; H heads of P channels; G groups; N state columns per channel. Head h uses B and C of group
``h // (H // G)``. With k drafts, a row has ``T = 1 + k`` positions. The state after each position
goes to its own slot, so that the next step may start after any accepted prefix. A state of 16 bits
is rounded after every position (kernels/formats/stochastic_round.py), and the next position starts from the
rounded state. So the stored state does not depend on how positions were divided among steps.
kernels/replay/selective_state_replay.py has another form of this step, with one slot per row.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba, in place (kernels/ssm/selective_state_update_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.ssm.reference_row import reference_decode_rows
from kernels.ssm.scan_row import fill_padding_positions, leave_position, time_step
from kernels.ssm.selective_state_update_cpu import update_heads
from kernels.ssm.state_arguments import decode_states, flat_rows


def selective_state_update_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    *,
    dt_limit: tuple[float, float],
    seq_lens: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Reference of :func:`selective_state_update`: one row and one position after the other."""
    inputs = [t.flatten(0, 1) for t in (x, dt, B, C)]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for row in reference_decode_rows(read_slots, write_slots, seq_lens):
        # Position by position, since torch rounds a tensor's last elements in another way than its others.
        places = (slice(i, i + 1) for i in range(row.tokens.start, row.tokens.stop))
        each = (reference_tokens((t[place] for t in inputs), A, D, dt_bias, dt_limit) for place in places)
        tokens = itertools.chain.from_iterable(each)
        row.scan(reference_step, tokens, ssm_state, y.flatten(0, 1), rounding)
    return y


def reference_tokens(
    inputs: Iterable[Tensor], A: Tensor, D: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]
) -> Iterator[tuple[Tensor, ...]]:
    """Return ``(dt' x, exp(A dt'), B, C, D x)`` of each token, from x, dt, B and C of ``n`` tokens."""
    inputs = list(inputs)
    acc = torch.promote_types(inputs[0].dtype, torch.float32)
    x, dt, B, C = (t.to(acc) for t in inputs)
    decay, step = reference_gates(dt, A, dt_bias, dt_limit)
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], dim=1) for t in (B, C))
    return zip(step[..., None] * x, decay, B, C, D.to(acc)[:, None] * x, strict=True)


def reference_gates(
    dt: Tensor, A: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return ``exp(A dt')`` and ``dt'``."""
    step = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
    return torch.exp(A.to(dt.dtype) * step), step


def reference_step(
    h: Tensor, u: Tensor, decay: Tensor, B: Tensor, C: Tensor, skipped: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next state ``[H, P, N]`` and the output ``[H, P]``."""
    h = decay[:, None, None] * h + u[:, :, None] * B[:, None, :]
    return h, (h * C[:, None, :]).sum(dim=-1) + skipped


@triton_jit
def advance_tile(h, x, decay, step, B):
    """Return the state's tile ``[BLOCK_P, BLOCK_N]`` after a token, in every form of the decode step.

    One product is fused into the sum, which compilers are not allowed to choose by themselves.
    """
    return tl.fma(h, decay, (step * x)[:, None] * B[None, :])


# One program per (row, head, BLOCK_P rows of the state): its [BLOCK_P, N] tile stays in registers over all
# positions, so that the state is read once, and written once per position. This traffic limits the speed of
# the step. Therefore neighbouring programs on axis 0 take neighbouring tiles of a slot. A position's small
# operands are loaded before the previous position is computed, and those of the first position before the
# slot is known.
@triton_jit
def _update_tiles_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    dt_bias_ptr,
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    seq_lens_ptr,
    y_ptr,
    x_row_stride,
    x_position_stride,
    x_head_stride,
    dt_row_stride,
    dt_position_stride,
    B_row_stride,
    B_position_stride,
    B_group_stride,
    C_row_stride,
    C_position_stride,
    C_group_stride,
    slot_stride,
    head_stride,
    state_row_stride,
    dt_min,
    dt_max,
    layer_seed,
    first_head,
    num_heads,
    head_dim,
    state_dim,
    HEADS_PER_GROUP: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, blocks_p = tl.program_id(1).to(tl.int64), tl.cdiv(head_dim, BLOCK_P)
    head = tl.program_id(0) // blocks_p
    slot = tl.load(read_slots_ptr + row).to(tl.int64)
    p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    live_p, live_n = p < head_dim, n < state_dim
    live = live_p[:, None] & live_n[None, :]
    x_row = x_ptr + row * x_row_stride + head * x_head_stride + p
    dt_row = dt_ptr + row * dt_row_stride + head
    B_row = B_ptr + row * B_row_stride + head // HEADS_PER_GROUP * B_group_stride + n
    C_row = C_ptr + row * C_row_stride + head // HEADS_PER_GROUP * C_group_stride + n
    y_row = y_ptr + (row * NUM_POSITIONS * num_heads + head) * head_dim + p
    dt = tl.load(dt_row)
    x = tl.load(x_row, mask=live_p, other=0.0)
    B = tl.load(B_row, mask=live_n, other=0.0)
    C = tl.load(C_row, mask=live_n, other=0.0)
    A = tl.load(A_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if slot == 0:  # padding: y is zero
        fill_padding_positions(y_row, num_heads * head_dim, live_p, NUM_POSITIONS, BLOCK_P)
        return
    state_tile = state_ptr + head * head_stride + p[:, None] * state_row_stride + n[None, :]
    h = tl.load(state_tile + slot * slot_stride, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(NUM_POSITIONS):
        dt_i, x_i, B_i, C_i = dt.to(tl.float32), x.to(tl.float32), B.to(tl.float32), C.to(tl.float32)
        if i + 1 < NUM_POSITIONS:
            dt = tl.load(dt_row + (i + 1) * dt_position_stride)
            x = tl.load(x_row + (i + 1) * x_position_stride, mask=live_p, other=0.0)
            B = tl.load(B_row + (i + 1) * B_position_stride, mask=live_n, other=0.0)
            C = tl.load(C_row + (i + 1) * C_position_stride, mask=live_n, other=0.0)
        step = time_step(dt_i + dt_bias, dt_min, dt_max)
        h = advance_tile(h, x_i, tl.exp(A * step), step, B_i)
        y = tl.sum(h * C_i[None, :], axis=1) + D * x_i
        tl.store(y_row + i * num_heads * head_dim, y.to(y_ptr.dtype.element_ty), mask=live_p)
        elements = p[:, None] * state_dim + n[None, :]
        h = leave_position(
            h, state_tile, slot_stride, live, elements, write_slots_ptr, seq_lens_ptr, row, i, layer_seed,
            head + first_head, NUM_POSITIONS, STOCHASTIC,
        )  # fmt: skip


@functools.cache
def tile_request(dtype: torch.dtype, state_dtype: torch.dtype, head_dim: int, state_dim: int) -> TileRequest:
    """Request tiles of 2,048 state elements, so that a thread has 16 elements in flight, and a batch of one
    row has 4 programs per SM."""
    block_p = min(triton.next_power_of_2(head_dim), max(1, 2048 // triton.next_power_of_2(state_dim)))
    return TileRequest.of(
        "selective_state_update",
        {"BLOCK_P": block_p, "num_warps": 4},
        dtype=dtype,
        state_dtype=state_dtype,
        head_dim=head_dim,
        state_dim=state_dim,
    )


_WARP_BYTES = 32 * 16
"""What the lanes of a warp load at a time."""


@functools.cache
def replay_tile_request(
    dtype: torch.dtype, state_dtype: torch.dtype, head_dim: int, state_dim: int
) -> TileRequest:
    """Request tiles of 1,024 state elements for one warp.

    A replay takes as long as its instructions do: a thread has 32 elements for each scalar that it computes,
    and waits for no other warp. Where one warp would add up a row in another order than the programs of
    :func:`tile_request`, the tiles are theirs: if two of their warps share a row, or if a thread has less
    than 16 bytes of it.
    """
    tiles = dict(tile_request(dtype, state_dtype, head_dim, state_dim).default)
    row_bytes = triton.next_power_of_2(state_dim) * state_dtype.itemsize
    if row_bytes <= _WARP_BYTES and tiles["BLOCK_P"] * row_bytes >= tiles["num_warps"] * _WARP_BYTES:
        rows = max(1, 1024 // triton.next_power_of_2(state_dim))
        tiles = {"BLOCK_P": min(triton.next_power_of_2(head_dim), rows), "num_warps": 1}
    return TileRequest.of(
        "selective_state_replay",
        tiles,
        dtype=dtype,
        state_dtype=state_dtype,
        head_dim=head_dim,
        state_dim=state_dim,
    )


def _launch(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    read_slots: Tensor, write_slots: Tensor, dt_limit: tuple[float, float], seq_lens: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    tiles = choose(tile_request(x.dtype, ssm_state.dtype, head_dim, state_dim), x.device)
    _update_tiles_kernel[(num_heads * triton.cdiv(head_dim, tiles["BLOCK_P"]), num_rows)](
        x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots.contiguous(), seq_lens, y,
        *x.stride()[:3], *dt.stride()[:2], *B.stride()[:3], *C.stride()[:3], *ssm_state.stride()[:3],
        *dt_limit, rounding.signed_seed, rounding.first_head, num_heads, head_dim, state_dim,
        HEADS_PER_GROUP=num_heads // num_groups, NUM_POSITIONS=num_positions,
        STOCHASTIC=rounding.is_stochastic, BLOCK_N=triton.next_power_of_2(state_dim), **tiles,
    )  # fmt: skip
    return y


def _update_on_cpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    read_slots: Tensor, write_slots: Tensor, dt_limit: tuple[float, float], seq_lens: Tensor | None,
    rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, head_dim = x.shape
    num_groups, width = B.shape[2:]
    y = torch.empty(x.shape, dtype=torch.float32)
    update_heads.parallel_for(
        num_rows * num_heads,
        max(1, _GRAIN_ELEMENTS // (num_positions * head_dim * width)),
        *flat_rows(x, dt, B, C),
        *(t.float() for t in (A, D, dt_bias)),
        *decode_states(ssm_state, read_slots, write_slots, seq_lens, rounding),
        (np.float32(dt_limit[0]), np.float32(dt_limit[1])),
        (num_positions, num_heads, head_dim, num_groups, width),
        FlatArray(y),
    )
    return y if x.dtype == torch.float32 else y.to(x.dtype)


_GRAIN_ELEMENTS = 2**18  # elements of state, which are read and written: about 100 µs if they are not cached


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    *,
    dt_limit: tuple[float, float],
    seq_lens: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Advance each row's state by its ``T`` positions, in place in the pool.

    x ``[R, T, H, P]``, dt ``[R, T, H]``, A, D and dt_bias ``[H]``, B and C ``[R, T, G, N]``, ssm_state
    ``[num_slots, H, P, N]``, read_slots ``[R]``, write_slots ``[R, T]``. Row r starts from
    ``read_slots[r]``, which may be one of its own write slots; the state after position i goes to
    ``write_slots[r, i]`` unless this slot is 0. The pool is float32, or bfloat16 rounded by ``rounding``.
    seq_lens ``[R]``, tokens including the new ones, is needed if rounding is stochastic. Returns y
    ``[R, T, H, P]``, zero in padding rows (read slot 0).
    """
    assert seq_lens is not None or not rounding.is_stochastic
    operands = (x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots)
    if x.dtype == torch.float64:
        return selective_state_update_reference(
            *operands, dt_limit=dt_limit, seq_lens=seq_lens, rounding=rounding
        )
    run = _launch if x.is_cuda else _update_on_cpu
    return run(*operands, dt_limit, seq_lens, rounding)
