"""Causal depthwise convolution over time, with a carried state.

    y_t = silu(bias + sum_k weight[:, k] * x_{t - (K - 1) + k})

K is the number of taps, C of channels, S of prefill rows, R of decode rows, T of positions per decode row.
The state of a row is its last ``K - 1`` inputs; ``conv_state[slot, :, -1]`` is the newest of them. Inputs
before the first token of a prompt are zero.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba (kernels/ssm/causal_conv1d_prefill_cpu.py, kernels/ssm/causal_conv1d_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.ssm.boundaries import Boundaries
from kernels.ssm.causal_conv1d_cpu import causal_conv1d_update_cpu
from kernels.ssm.causal_conv1d_prefill_cpu import causal_conv1d_cpu
from kernels.ssm.reference_row import reference_rows
from kernels.ssm.scan_row import fill_padding_positions


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    boundaries: Boundaries | None = None,
) -> Tensor:
    """Reference of :func:`causal_conv1d`: one row after the other."""
    acc = torch.promote_types(x.dtype, torch.float32)
    num_taps = weight.shape[1]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for row in reference_rows(cu_seqlens, read_slots, write_slots, has_initial, boundaries):
        inputs = x[row.tokens].to(acc).T
        window = torch.cat([row.initial(conv_state, acc), inputs], dim=1)
        taps = (window[:, k : k + inputs.shape[1]] * weight[:, k, None].to(acc) for k in range(num_taps))
        out = sum(taps, inputs.new_zeros(()))
        if bias is not None:
            out = out + bias[:, None].to(acc)
        y[row.tokens] = F.silu(out).T
        for offset, slot in row.stores.items():
            conv_state[slot] = window[:, offset : offset + num_taps - 1]
    return y


def causal_conv1d_update_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """Reference of :func:`causal_conv1d_update`: one row and one position after the other."""
    acc = torch.promote_types(x.dtype, torch.float32)
    num_taps = weight.shape[1]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for r, (source, targets) in enumerate(zip(read_slots.tolist(), write_slots.tolist(), strict=True)):
        if source == 0:
            continue
        window = torch.cat([conv_state[source].to(acc), x[r].to(acc).T], dim=1)
        for i, target in enumerate(targets):
            out = (window[:, i : i + num_taps] * weight.to(acc)).sum(dim=1)
            if bias is not None:
                out = out + bias.to(acc)
            y[r, i] = F.silu(out)
            if target != 0:
                conv_state[target] = window[:, i + 1 : i + num_taps]
    return y


@triton_jit
def _last_inputs(
    x_row, x_stride, state_row, from_state, length, columns, live_channels, NUM_TAPS: tl.constexpr
):
    """Return the state ``[BLOCK_C, TAPS]`` after ``length`` tokens of a row, and the mask of its elements."""
    newest = length - (NUM_TAPS - 1) + columns
    live = (columns < NUM_TAPS - 1)[None, :] & live_channels[:, None]
    new_tile = x_row[:, None] + newest[None, :] * x_stride
    state = tl.load(new_tile, mask=live & (newest >= 0)[None, :], other=0.0).to(tl.float32)
    if from_state:
        old_tile = state_row[:, None] + (NUM_TAPS - 1 + newest)[None, :]
        state += tl.load(old_tile, mask=live & (newest < 0)[None, :], other=0.0).to(tl.float32)
    return state, live


# Prefill: one program per (row, BLOCK_T tokens, BLOCK_C channels) tile; neighbouring programs have
# neighbouring channels of a token. A program reads its tile once for each tap, K - 1 times from cache. It
# does not load the tile once and shift it, since then threads would have to exchange elements. The first tile
# of a row also stores the row's state, since only this tile has read the old state.
@triton_jit
def _convolve_tokens_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    cu_seqlens_ptr,
    read_slots_ptr,
    write_slots_ptr,
    has_initial_ptr,
    y_ptr,
    x_stride,
    slot_stride,
    channel_stride,
    num_channels,
    HAS_BIAS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(2)
    target = tl.load(write_slots_ptr + row).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + row + 1).to(tl.int64) - start
    first = tl.program_id(1).to(tl.int64) * BLOCK_T
    if first >= length:
        return
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live_channels = channels < num_channels
    tokens = first + tl.arange(0, BLOCK_T)
    y_tile = y_ptr + (start + tokens)[:, None] * num_channels + channels[None, :]
    live_y = (tokens < length)[:, None] & live_channels[None, :]
    if target == 0:  # padding: y is zero
        tl.store(y_tile, tl.zeros((BLOCK_T, BLOCK_C), y_ptr.dtype.element_ty), mask=live_y)
        return
    from_state = (first == 0) & (tl.load(has_initial_ptr + row) != 0)
    x_row = x_ptr + start * x_stride + channels
    source = tl.load(read_slots_ptr + row).to(tl.int64)
    state_row = state_ptr + source * slot_stride + channels * channel_stride

    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channels, mask=live_channels, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(NUM_TAPS):
        inputs = tokens - (NUM_TAPS - 1) + k
        tap = tl.load(weight_ptr + channels * NUM_TAPS + k, mask=live_channels, other=0.0).to(tl.float32)
        live = ((inputs >= 0) & (inputs < length))[:, None] & live_channels[None, :]
        x = tl.load(x_row[None, :] + inputs[:, None] * x_stride, mask=live, other=0.0).to(tl.float32)
        if from_state:
            live = (inputs < 0)[:, None] & live_channels[None, :]
            past = state_row[None, :] + (NUM_TAPS - 1 + inputs)[:, None]
            x += tl.load(past, mask=live, other=0.0).to(tl.float32)
        y += tap[None, :] * x
    y = y * tl.sigmoid(y)
    tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=live_y)

    if first == 0:
        columns = tl.arange(0, TAPS)
        state, live_state = _last_inputs(
            x_row, x_stride, state_row, from_state, length, columns, live_channels, NUM_TAPS
        )
        tl.debug_barrier()  # all threads have read before any thread writes
        state_tile = state_ptr + target * slot_stride + channels[:, None] * channel_stride + columns[None, :]
        tl.store(state_tile, state.to(state_ptr.dtype.element_ty), mask=live_state)


# The states at boundaries: one program per (boundary, BLOCK_C channels) tile. This launch comes before the
# launch above, which may overwrite the old state that a boundary at one of a row's first K - 2 offsets needs.
@triton_jit
def _store_boundaries_kernel(
    x_ptr,
    state_ptr,
    cu_seqlens_ptr,
    read_slots_ptr,
    has_initial_ptr,
    boundary_rows_ptr,
    boundary_offsets_ptr,
    boundary_slots_ptr,
    x_stride,
    slot_stride,
    channel_stride,
    num_channels,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.load(boundary_rows_ptr + tl.program_id(0))
    length = tl.load(boundary_offsets_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(boundary_slots_ptr + tl.program_id(0)).to(tl.int64)
    source = tl.load(read_slots_ptr + row).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    from_state = (length < NUM_TAPS - 1) & (tl.load(has_initial_ptr + row) != 0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    columns = tl.arange(0, TAPS)
    x_row = x_ptr + start * x_stride + channels
    state_row = state_ptr + source * slot_stride + channels * channel_stride
    state, live = _last_inputs(
        x_row, x_stride, state_row, from_state, length, columns, channels < num_channels, NUM_TAPS
    )
    state_tile = state_ptr + target * slot_stride + channels[:, None] * channel_stride + columns[None, :]
    is_kept = columns < tl.where(target == 0, 0, TAPS)  # not in the null slot
    tl.store(state_tile, state.to(state_ptr.dtype.element_ty), mask=live & is_kept[None, :])


# Decode: one program per (row, BLOCK_C channels) tile computes all positions of the row. A thread has whole
# channels: the state's inputs and the new ones, one tensor of channels each. So no threads have to exchange
# elements. All is loaded before anything is stored: loads overlap, and a write slot may be the read slot.
@triton_jit
def _convolve_positions_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    y_ptr,
    x_row_stride,
    x_position_stride,
    slot_stride,
    channel_stride,
    num_channels,
    HAS_BIAS: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
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
    inputs, taps, targets = (), (), ()
    for k in tl.static_range(NUM_TAPS - 1):
        past = tl.load(state_row + slot * slot_stride + k, mask=live, other=0.0)
        inputs += (past.to(tl.float32),)
    for i in tl.static_range(NUM_POSITIONS):
        newest = tl.load(x_row + i * x_position_stride, mask=live, other=0.0)
        inputs += (newest.to(tl.float32),)
        targets += (tl.load(write_slots_ptr + row * NUM_POSITIONS + i).to(tl.int64),)
    for k in tl.static_range(NUM_TAPS):
        tap = tl.load(weight_ptr + channels * NUM_TAPS + k, mask=live, other=0.0)
        taps += (tap.to(tl.float32),)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + channels, mask=live, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read before any thread writes

    for i in tl.static_range(NUM_POSITIONS):
        y = bias
        for k in tl.static_range(NUM_TAPS):
            y += taps[k] * inputs[i + k]
        y = y * tl.sigmoid(y)
        tl.store(y_row + i * num_channels, y.to(y_ptr.dtype.element_ty), mask=live)
        if targets[i] != 0:
            state_tile = state_row + targets[i] * slot_stride
            for k in tl.static_range(NUM_TAPS - 1):
                stored = inputs[i + 1 + k].to(state_ptr.dtype.element_ty)
                tl.store(state_tile + k, stored, mask=live)


@functools.cache
def prefill_tile_request(dtype: torch.dtype, taps: int) -> TileRequest:
    """Request tiles that give each program at least one line of 128 bytes per token."""
    return TileRequest.of(
        "causal_conv1d", {"BLOCK_T": 32, "BLOCK_C": 64, "num_warps": 4}, dtype=dtype, taps=taps
    )


@functools.cache
def decode_tile_request(dtype: torch.dtype, taps: int, positions: int) -> TileRequest:
    """Request one channel per thread, since only latency matters for a batch of one row."""
    tiles = {"BLOCK_C": 128, "num_warps": 4}
    return TileRequest.of("causal_conv1d_update", tiles, dtype=dtype, taps=taps, positions=positions)


def _launch_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, cu_seqlens: Tensor,
    read_slots: Tensor, write_slots: Tensor, has_initial: Tensor, max_seq_len: int,
    boundaries: Boundaries | None,
) -> Tensor:  # fmt: skip
    num_channels, num_taps = weight.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = choose(prefill_tile_request(x.dtype, num_taps), x.device)
    blocks_c, blocks_t = (
        triton.cdiv(num_channels, tiles["BLOCK_C"]),
        triton.cdiv(max_seq_len, tiles["BLOCK_T"]),
    )
    grid = (blocks_c, blocks_t, len(write_slots))
    if 0 in grid:
        return y
    taps = {"NUM_TAPS": num_taps, "TAPS": triton.next_power_of_2(num_taps)}
    strides = x.stride(0), conv_state.stride(0), conv_state.stride(1)
    if boundaries is not None:
        _store_boundaries_kernel[(len(boundaries.rows), blocks_c)](
            x, conv_state, cu_seqlens, read_slots, has_initial.view(torch.uint8),
            boundaries.rows, boundaries.offsets, boundaries.slots, *strides, num_channels,
            BLOCK_C=tiles["BLOCK_C"], **taps,
        )  # fmt: skip
    _convolve_tokens_kernel[grid](
        x,
        weight.contiguous(),
        bias,
        conv_state,
        cu_seqlens,
        read_slots,
        write_slots,
        has_initial.view(torch.uint8),
        y,
        *strides,
        num_channels,
        HAS_BIAS=bias is not None,
        **taps,
        **tiles,
    )
    return y


def _launch_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
) -> Tensor:
    num_rows, num_positions, num_channels = x.shape
    num_taps = weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = choose(decode_tile_request(x.dtype, num_taps, num_positions), x.device)
    grid = (triton.cdiv(num_channels, tiles["BLOCK_C"]), num_rows)
    if num_rows == 0:
        return y
    _convolve_positions_kernel[grid](
        x,
        weight.contiguous(),
        bias,
        conv_state,
        read_slots,
        write_slots.contiguous(),
        y,
        x.stride(0),
        x.stride(1),
        conv_state.stride(0),
        conv_state.stride(1),
        num_channels,
        HAS_BIAS=bias is not None,
        NUM_POSITIONS=num_positions,
        NUM_TAPS=num_taps,
        **tiles,
    )
    return y


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    *,
    max_seq_len: int,
    boundaries: Boundaries | None = None,
) -> Tensor:
    """Convolve the ragged rows of a prefill batch and store each row's last inputs in its write slot.

    x ``[num_tokens, C]``, weight ``[C, K]``, bias ``[C]``, conv_state ``[num_slots, C, K - 1]`` of any
    float dtype, cu_seqlens ``[S + 1]``, read_slots, write_slots and has_initial ``[S]``. Row s starts from
    ``read_slots[s]`` if ``has_initial[s]``, else from zeros. A row may write the slot that it reads, but no
    slot that another row reads. The states at ``boundaries`` are stored as well. Returns y
    ``[num_tokens, C]``, zero in padding rows (write slot 0).
    """
    operands, rows = (x, weight, bias, conv_state), (cu_seqlens, read_slots, write_slots, has_initial)
    if x.dtype == torch.float64:
        return causal_conv1d_reference(*operands, *rows, boundaries)
    if x.is_cuda:
        return _launch_prefill(*operands, *rows, max_seq_len, boundaries)
    if boundaries is not None:
        rows = boundaries.segments.as_rows()
    return causal_conv1d_cpu(*operands, *rows)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """Convolve the ``T`` positions of each decode row, storing the state after every position.

    x ``[R, T, C]`` (may be a column slice of a wider projection), read_slots ``[R]``, write_slots
    ``[R, T]``. Row r starts from ``read_slots[r]``, which may be one of its own write slots; the state
    after position i goes to ``write_slots[r, i]`` unless this slot is 0. Returns y ``[R, T, C]``, zero in
    padding rows (read slot 0).
    """
    if x.dtype == torch.float64:
        return causal_conv1d_update_reference(x, weight, bias, conv_state, read_slots, write_slots)
    if x.is_cuda:
        return _launch_decode(x, weight, bias, conv_state, read_slots, write_slots)
    return causal_conv1d_update_cpu(x, weight, bias, conv_state, read_slots, write_slots)
