"""The replay form of :func:`kernels.ssm.causal_conv1d.causal_conv1d_update`: the convolution of decode rows
with one slot per row. :mod:`kernels.replay.kept_inputs` explains the form, and says what all replays have in
common.

The convolution's inputs are kept as they are, in the pool's dtype: ``[N, P, C]``, contiguous. So nothing is
computed again: pending inputs move into the state.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba (kernels/replay/causal_conv1d_replay_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.tiles import choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.replay.causal_conv1d_replay_cpu import causal_conv1d_flush_cpu, causal_conv1d_replay_cpu
from kernels.replay.kept_inputs import PendingRows, flushed_slots, reference_keep, reference_pending
from kernels.ssm.causal_conv1d import causal_conv1d_update_reference, decode_tile_request
from kernels.ssm.scan_row import fill_padding_positions


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
def _past_input(
    state_row, kept, channels, num_channels, first, count, k, DTYPE: tl.constexpr, NUM_TAPS: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Return the inputs ``[BLOCK_C]`` in column k of the state after ``count`` kept inputs, the first of them
    with the index ``first``. ``state_row`` points to the slot's column 0, and ``kept`` to the row's place 0.
    A kept input has the value that a pool of ``DTYPE`` would have stored."""
    newest = count - (NUM_TAPS - 1) + k  # negative: an input that the state had before
    num_old = tl.where(newest < 0, num_channels, 0)
    old = tl.load(state_row + count + k, mask=channels < num_old, other=0.0)
    place = (first + newest) % PLACES
    new = tl.load(kept + place * num_channels, mask=channels < num_channels - num_old, other=0.0)
    return tl.where(newest < 0, old.to(tl.float32), new.to(DTYPE).to(tl.float32))


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
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(read_slots_ptr + row).to(tl.int64)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = channels < num_channels
    y_row = y_ptr + row * NUM_POSITIONS * num_channels + channels
    if slot == 0:  # padding: y is zero
        fill_padding_positions(y_row, num_channels, live, NUM_POSITIONS, BLOCK_C)
        return
    state_row = state_ptr + channels * channel_stride
    x_row = x_ptr + row * x_row_stride + channels
    kept = kept_ptr + tl.load(rows_ptr + row).to(tl.int64) * PLACES * num_channels + channels
    count = tl.load(counts_ptr + row)
    known = tl.load(seq_lens_ptr + row) - NUM_POSITIONS
    inputs, taps = (), ()
    for k in tl.static_range(NUM_TAPS - 1):
        past = _past_input(
            state_row + slot * slot_stride, kept, channels, num_channels, known - count, count, k,
            state_ptr.dtype.element_ty, NUM_TAPS, PLACES,
        )  # fmt: skip
        inputs += (past,)
    for i in tl.static_range(NUM_POSITIONS):
        newest = tl.load(x_row + i * x_position_stride, mask=live, other=0.0)
        inputs += (newest.to(tl.float32),)
    for k in tl.static_range(NUM_TAPS):
        tap = tl.load(weight_ptr + channels * NUM_TAPS + k, mask=live, other=0.0)
        taps += (tap.to(tl.float32),)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + channels, mask=live, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read before any thread writes

    if count > 0:
        target = tl.load(write_slots_ptr + row).to(tl.int64)
        for k in tl.static_range(NUM_TAPS - 1):
            stored = inputs[k].to(state_ptr.dtype.element_ty)
            tl.store(state_row + target * slot_stride + k, stored, mask=live)
    for i in tl.static_range(NUM_POSITIONS):
        place = (known + i) % PLACES
        newest = inputs[NUM_TAPS - 1 + i].to(kept_ptr.dtype.element_ty)
        tl.store(kept + place * num_channels, newest, mask=live)
        y = bias
        for k in tl.static_range(NUM_TAPS):
            y += taps[k] * inputs[i + k]
        y = y * tl.sigmoid(y)
        tl.store(y_row + i * num_channels, y.to(y_ptr.dtype.element_ty), mask=live)


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
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    slot, count = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(counts_ptr + row)
    if (slot == 0) | (count == 0):
        return
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = channels < num_channels
    state_row = state_ptr + channels * channel_stride
    kept = kept_ptr + tl.load(rows_ptr + row).to(tl.int64) * PLACES * num_channels + channels
    first = tl.load(seq_lens_ptr + row) - count
    inputs = ()
    for k in tl.static_range(NUM_TAPS - 1):
        past = _past_input(
            state_row + slot * slot_stride, kept, channels, num_channels, first, count, k,
            state_ptr.dtype.element_ty, NUM_TAPS, PLACES,
        )  # fmt: skip
        inputs += (past,)
    tl.debug_barrier()  # all threads have read before any thread writes
    target = tl.load(write_slots_ptr + row).to(tl.int64)
    for k in tl.static_range(NUM_TAPS - 1):
        tl.store(state_row + target * slot_stride + k, inputs[k].to(state_ptr.dtype.element_ty), mask=live)


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
        HAS_BIAS=bias is not None, NUM_POSITIONS=num_positions, NUM_TAPS=num_taps, PLACES=kept.shape[1],
        **tiles,
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
        *conv_state.stride()[:2], num_channels, NUM_TAPS=num_taps, PLACES=kept.shape[1], **tiles,
    )  # fmt: skip


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
    return causal_conv1d_replay_cpu(*operands, read_slots, write_slots, kept, pending)


def causal_conv1d_flush(
    conv_state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: Tensor, pending: PendingRows
) -> None:
    """Move each row's pending inputs into its state; ``pending.seq_lens`` counts no later ones."""
    if kept.dtype == torch.float64:
        causal_conv1d_flush_reference(conv_state, read_slots, write_slots, kept, pending)
    elif conv_state.is_cuda:
        _launch_flush(conv_state, read_slots, write_slots, kept, pending)
    else:
        causal_conv1d_flush_cpu(conv_state, read_slots, write_slots, kept, pending)
