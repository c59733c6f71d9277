"""The replay form of :func:`kernels.ssm.causal_conv1d.causal_conv1d_update`: the convolution of decode rows
with one slot per row. :mod:`kernels.replay.kept_inputs` explains the form, and says what all replays have in
common.

The convolution's inputs are kept as they are, in the pool's dtype: ``[N, P, C]``, contiguous. So nothing is
computed again: pending inputs move into the state.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba: the pending inputs move, then the slots form's function runs without storing |
| any, in float64 | reference |
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import as_array, as_flat_array
from kernels.gpu.tiles import choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.replay.kept_inputs import PendingRows, flushed_slots, reference_keep, reference_pending
from kernels.ssm.causal_conv1d import (
    causal_conv1d_update_reference,
    convolved,
    decode_tile_request,
    shifted,
)
from kernels.ssm.causal_conv1d_cpu import advance_windows, convolve_rows, keep_inputs, row_grain
from kernels.ssm.scan_row import fill_padding_positions
from kernels.ssm.staged_slots import StagedSlots

_ROWS_A_SHARE = 64
"""Rows whose inputs are moved in about 100 µs."""


def causal_conv1d_flush_reference(
    conv_state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: Tensor, pending: PendingRows
) -> None:
    """Reference of :func:`causal_conv1d_flush`: one row after the other."""
    num_past = conv_state.shape[2]
    for row in reference_pending(read_slots, write_slots, pending, kept.shape[1]):
        inputs = kept[row.kept_row, row.places].to(conv_state.dtype).T
        conv_state[row.write_slot] = torch.cat([conv_state[row.read_slot], inputs], dim=1)[:, -num_past:]


def causal_conv1d_replay_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: Tensor,
    pending: PendingRows,
) -> Tensor:
    """Reference of :func:`causal_conv1d_replay`: a flush, then an update that stores no state."""
    num_positions = x.shape[1]
    causal_conv1d_flush_reference(
        conv_state, read_slots, write_slots, kept, pending.without_new(num_positions)
    )
    slots = flushed_slots(read_slots, write_slots, pending)
    unstored = torch.zeros_like(slots)[:, None].repeat(1, num_positions)
    y = causal_conv1d_update_reference(x, weight, bias, conv_state, slots, unstored)
    reference_keep(kept, x, read_slots, pending)
    return y


@triton_jit
def _window_after(
    state_tile, slot_stride, slot, kept, place_stride, live, taps, first, count, DTYPE: tl.constexpr,
    NUM_TAPS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Return the window ``[BLOCK_C, TAPS]`` after ``count`` kept inputs, the first of them with the index
    ``first``. ``state_tile`` points to the null slot; ``kept`` ``[BLOCK_C]`` to a row's place 0. A kept input
    has the value that a pool of ``DTYPE`` would have stored."""
    newest = count - NUM_TAPS + taps  # negative: an input that the state had before
    is_old = (newest < 0)[None, :]
    old = tl.load(state_tile + slot * slot_stride + count, mask=live & is_old, other=0.0)
    place = (first + newest) % PLACES
    new = tl.load(
        kept[:, None] + (place * place_stride)[None, :], mask=live & (newest >= 0)[None, :], other=0.0
    )
    return tl.where(is_old, old.to(tl.float32), new.to(DTYPE).to(tl.float32))


# One program per (row, BLOCK_C channels), as in the slots form.
@triton_jit
def _replay_positions_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    kept_ptr,
    rows_ptr,
    counts_ptr,
    seq_lens_ptr,
    y_ptr,
    x_row_stride,
    x_position_stride,
    slot_stride,
    channel_stride,
    num_channels,
    HAS_BIAS: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(read_slots_ptr + row).to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live_channels = channels < num_channels
    y_row = y_ptr + row * NUM_POSITIONS * num_channels + channels
    if slot == 0:  # padding: y is zero
        fill_padding_positions(y_row, num_channels, live_channels, NUM_POSITIONS, BLOCK_C)
        return
    taps = tl.arange(0, TAPS)
    live = live_channels[:, None] & (taps < NUM_TAPS)[None, :]
    weight_tile = weight_ptr + channels[:, None] * NUM_TAPS + taps[None, :]
    weight = tl.load(weight_tile, mask=live, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + channels, mask=live_channels, other=0.0).to(tl.float32)

    live_state = live & (taps > 0)[None, :]
    state_tile = state_ptr + channels[:, None] * channel_stride + (taps - 1)[None, :]
    kept = kept_ptr + tl.load(rows_ptr + row).to(tl.int64) * PLACES * num_channels + channels
    count = tl.load(counts_ptr + row)
    known = tl.load(seq_lens_ptr + row) - NUM_POSITIONS
    window = _window_after(
        state_tile, slot_stride, slot, kept, num_channels, live_state, taps, known - count, count,
        state_ptr.dtype.element_ty, NUM_TAPS, PLACES,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read before any thread writes
    if count > 0:
        target = tl.load(write_slots_ptr + row).to(tl.int64)
        stored = window.to(state_ptr.dtype.element_ty)
        tl.store(state_tile + target * slot_stride, stored, mask=live_state)
    for i in tl.static_range(NUM_POSITIONS):
        x_i = x_ptr + row * x_row_stride + i * x_position_stride + channels
        newest = tl.load(x_i, mask=live_channels, other=0.0).to(tl.float32)
        place = (known + i) % PLACES
        tl.store(kept + place * num_channels, newest.to(kept_ptr.dtype.element_ty), mask=live_channels)
        window = shifted(window, newest, taps, NUM_TAPS)
        y = convolved(window, weight, bias, taps, NUM_TAPS)
        tl.store(y_row + i * num_channels, y.to(y_ptr.dtype.element_ty), mask=live_channels)


@triton_jit
def _flush_windows_kernel(
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    kept_ptr,
    rows_ptr,
    counts_ptr,
    seq_lens_ptr,
    slot_stride,
    channel_stride,
    num_channels,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    slot, count = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(counts_ptr + row)
    if (slot == 0) | (count == 0):
        return
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    taps = tl.arange(0, TAPS)
    live = (channels < num_channels)[:, None] & ((taps > 0) & (taps < NUM_TAPS))[None, :]
    state_tile = state_ptr + channels[:, None] * channel_stride + (taps - 1)[None, :]
    kept = kept_ptr + tl.load(rows_ptr + row).to(tl.int64) * PLACES * num_channels + channels
    first = tl.load(seq_lens_ptr + row) - count
    window = _window_after(
        state_tile, slot_stride, slot, kept, num_channels, live, taps, first, count,
        state_ptr.dtype.element_ty, NUM_TAPS, PLACES,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have read before any thread writes
    target = tl.load(write_slots_ptr + row).to(tl.int64)
    tl.store(state_tile + target * slot_stride, window.to(state_ptr.dtype.element_ty), mask=live)


def _launch_replay(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, read_slots: Tensor,
    write_slots: Tensor, kept: Tensor, pending: PendingRows,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_channels = x.shape
    num_taps = weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    tiles = choose(decode_tile_request(x.dtype, num_taps, num_positions), x.device)
    _replay_positions_kernel[(triton.cdiv(num_channels, tiles["BLOCK_C"]), num_rows)](
        x, weight.contiguous(), bias, conv_state, read_slots, write_slots, kept, pending.rows,
        pending.counts, pending.seq_lens, y, *x.stride()[:2], *conv_state.stride()[:2], num_channels,
        HAS_BIAS=bias is not None, NUM_POSITIONS=num_positions, NUM_TAPS=num_taps,
        TAPS=triton.next_power_of_2(num_taps), PLACES=kept.shape[1], **tiles, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _launch_flush(
    conv_state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: Tensor, pending: PendingRows
) -> None:
    num_channels, num_taps = conv_state.shape[1], conv_state.shape[2] + 1
    if len(read_slots) == 0:
        return
    tiles = choose(decode_tile_request(kept.dtype, num_taps, 1), kept.device)
    _flush_windows_kernel[(triton.cdiv(num_channels, tiles["BLOCK_C"]), len(read_slots))](
        conv_state, read_slots, write_slots, kept, pending.rows, pending.counts, pending.seq_lens,
        *conv_state.stride()[:2], num_channels, NUM_TAPS=num_taps, TAPS=triton.next_power_of_2(num_taps),
        PLACES=kept.shape[1], **tiles,
    )  # fmt: skip


def _flush_on_cpu(
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: Tensor,
    pending: PendingRows,
    num_positions: int = 0,
) -> np.ndarray:
    """Flush a float32 pool. ``pending.seq_lens`` includes num_positions later tokens.

    Return each row's slot afterwards. Another kernel reads it, so a recorded call (kernels/cpu/graph.py) must
    write it again at each replay.
    """
    slots = as_array(torch.empty_like(read_slots))
    advance_windows.parallel_for(
        len(read_slots),
        _ROWS_A_SHARE,
        as_flat_array(conv_state),
        *conv_state.stride()[:2],
        *conv_state.shape[1:],
        num_positions,
        as_array(read_slots),
        as_array(write_slots),
        as_array(pending.seq_lens),
        as_flat_array(kept),
        pending.arrays(kept.shape[1]),
        slots,
    )
    return slots


def _replay_on_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: Tensor,
    pending: PendingRows,
) -> Tensor:
    num_rows, num_positions, num_channels = x.shape
    slots = _flush_on_cpu(conv_state, read_slots, write_slots, kept, pending, num_positions)
    unstored = np.zeros((num_rows, num_positions), np.int32)
    y = convolve_rows(x, weight, bias, conv_state, slots, unstored)
    inputs = x.float()
    keep_inputs.parallel_for(
        num_rows,
        row_grain(x),
        as_flat_array(inputs),
        *inputs.stride()[:2],
        num_positions,
        num_channels,
        as_array(read_slots),
        as_array(pending.seq_lens),
        as_flat_array(kept),
        pending.arrays(kept.shape[1]),
    )
    return y


def causal_conv1d_replay(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: Tensor,
    pending: PendingRows,
) -> Tensor:
    """Move each row's pending inputs into its state, and convolve its ``T`` new positions.

    Operands are those of :func:`kernels.ssm.causal_conv1d.causal_conv1d_update`, except that write_slots is
    ``[R]``. The inputs of the new positions are kept in ``kept`` ``[N, P, C]``. Returns y ``[R, T, C]``, zero
    in padding rows.
    """
    assert kept.shape[1] >= 2 * x.shape[1]
    operands = x, weight, bias, conv_state
    if x.dtype == torch.float64:
        return causal_conv1d_replay_reference(*operands, read_slots, write_slots, kept, pending)
    if x.is_cuda:
        return _launch_replay(*operands, read_slots, write_slots, kept, pending)
    if conv_state.dtype == torch.float32:
        return _replay_on_cpu(*operands, read_slots, write_slots, kept, pending)
    staged, targets = _staged(conv_state, read_slots, write_slots, pending)
    slots = staged.read_slots, staged.write_slots
    y = _replay_on_cpu(x, weight, bias, staged.pool, *slots, kept, pending)
    staged.scatter(conv_state, targets)
    kept.copy_(kept.to(conv_state.dtype))  # as the pool would have stored them
    return y


def causal_conv1d_flush(
    conv_state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: Tensor, pending: PendingRows
) -> None:
    """Move each row's pending inputs into its state; ``pending.seq_lens`` counts no later ones."""
    if kept.dtype == torch.float64:
        causal_conv1d_flush_reference(conv_state, read_slots, write_slots, kept, pending)
    elif conv_state.is_cuda:
        _launch_flush(conv_state, read_slots, write_slots, kept, pending)
    elif conv_state.dtype == torch.float32:
        _flush_on_cpu(conv_state, read_slots, write_slots, kept, pending)
    else:
        staged, targets = _staged(conv_state, read_slots, write_slots, pending)
        _flush_on_cpu(staged.pool, staged.read_slots, staged.write_slots, kept, pending)
        staged.scatter(conv_state, targets)


def _staged(
    conv_state: Tensor, read_slots: Tensor, write_slots: Tensor, pending: PendingRows
) -> tuple[StagedSlots, Tensor]:
    """Return a float32 copy of the rows' slots, and the slots that are stored: 0 where nothing is pending."""
    targets = torch.where((read_slots != 0) & (pending.counts > 0), write_slots, 0)
    return StagedSlots.gather(conv_state, read_slots, targets), targets
