"""Causal convolution of decode rows on CPU. Prefill is in causal_conv1d_prefill_cpu.py.

Threads share the rows. A vector of adjacent channels goes through all positions in registers: its taps, the
inputs before the row, and each position's output. A slot has a channel's inputs side by side, so they are
sorted by age when they are loaded, and put side by side again when they are stored.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous. The
carried state is float32; states of another dtype are copied to float32 and back (staged_slots.py).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import (
    aligned,
    lanes,
    load,
    load_3,
    load_4,
    multiply_add,
    multiply_add_number,
    prefetch,
    silu,
    store,
    store_3,
)
from kernels.ssm.staged_slots import StagedSlots

_GRAIN_ELEMENTS = 2**17  # outputs, 100 to 170 µs: each share has to turn the taps


@cpu_jit
def _by_tap(weight, num_taps, num_channels, taps):
    """Copy ``weight[c, k]`` to ``taps[k, c]``."""
    whole = 0
    if num_taps == 4:
        whole = num_channels - num_channels % lanes()
        for c in range(0, whole, lanes()):
            a, b, d, e = load_4(weight, 4 * c)
            store(taps, c, a)
            store(taps, num_channels + c, b)
            store(taps, 2 * num_channels + c, d)
            store(taps, 3 * num_channels + c, e)
    for c in range(whole, num_channels):
        for k in range(num_taps):
            taps[k * num_channels + c] = weight[c * num_taps + k]


@cpu_jit
def _convolve_4(
    x, first, token_stride, taps, bias, state, old, new, ahead, num_channels, num_positions, y, out
):  # fmt: skip
    """Convolve a row with 4 taps; return how many channels, whole vectors, are done.

    The 3 inputs before the row are adjacent for each channel, from ``state[old]`` on. They are stored from
    ``new[i]`` on after position i, unless this is negative.
    """
    whole = num_channels - num_channels % lanes()
    for c in range(0, whole, lanes()):
        prefetch(state, ahead + 3 * c)
        prefetch(state, ahead + 3 * c + lanes())
        prefetch(state, ahead + 3 * c + 2 * lanes())
        a, b, d = load_3(state, old + 3 * c)
        tap_0, tap_1 = load(taps, c), load(taps, num_channels + c)
        tap_2, tap_3 = load(taps, 2 * num_channels + c), load(taps, 3 * num_channels + c)
        offset = load(bias, c)
        for i in range(num_positions):
            e = load(x, first + i * token_stride + c)
            total = multiply_add(tap_1, b, multiply_add(tap_0, a, offset))
            total = multiply_add(tap_3, e, multiply_add(tap_2, d, total))
            store(y, out + i * num_channels + c, silu(total))
            a, b, d = b, d, e
            if new[i] >= 0:
                store_3(state, new[i] + 3 * c, a, b, d)
    return whole


@cpu_jit
def _convolve_channels(
    x, first, token_stride, taps, bias, state, old, channel_stride, new, past, begin, num_channels,
    num_positions, y, out,
):  # fmt: skip
    """Like :func:`_convolve_4`, for channels from ``begin`` on, one by one, with any number of taps."""
    num_past = past.shape[0]
    for c in range(begin, num_channels):
        for k in range(num_past):
            past[k] = state[old + c * channel_stride + k]
        for i in range(num_positions):
            newest, total = x[first + i * token_stride + c], bias[c]
            for k in range(num_past):
                total = multiply_add_number(taps[k * num_channels + c], past[k], total)
            total = multiply_add_number(taps[num_past * num_channels + c], newest, total)
            # np.divide, since numba's "/" checks for a zero divisor.
            y[out + i * num_channels + c] = np.divide(total, np.float32(1) + exp_f32(-total))
            for k in range(num_past - 1):
                past[k] = past[k + 1]
            past[num_past - 1] = newest
            if new[i] >= 0:
                for k in range(num_past):
                    state[new[i] + c * channel_stride + k] = past[k]


@cpu_jit
def _convolve_rows(
    x, row_stride, token_stride, weight, bias, state, slot_stride, channel_stride,
    read_slots, write_slots, y, begin, end,
):  # fmt: skip
    """Convolve rows. Items are decode rows, with all their channels."""
    num_positions, num_channels = write_slots.shape[1], bias.shape[0]
    num_taps = weight.shape[0] // num_channels
    taps, past = aligned(num_taps * num_channels), np.empty(num_taps - 1, np.float32)
    new = np.empty(num_positions, np.int64)
    _by_tap(weight, num_taps, num_channels, taps)
    for r in range(begin, end):
        out = r * num_positions * num_channels
        if read_slots[r] == 0:
            y[out : out + num_positions * num_channels] = np.float32(0)
            continue
        old = read_slots[r] * slot_stride
        for i in range(num_positions):
            new[i] = write_slots[r, i] * slot_stride if write_slots[r, i] != 0 else -1
        done = 0
        if num_taps == 4 and channel_stride == 3:
            done = _convolve_4(
                x, r * row_stride, token_stride, taps, bias, state, old, new,
                read_slots[min(r + 1, end - 1)] * slot_stride, num_channels, num_positions, y, out,
            )  # fmt: skip
        _convolve_channels(
            x, r * row_stride, token_stride, taps, bias, state, old, channel_stride, new, past, done,
            num_channels, num_positions, y, out,
        )  # fmt: skip


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """Compute :func:`kernels.ssm.causal_conv1d.causal_conv1d_update` on CPU."""
    if conv_state.dtype != torch.float32:
        write_slots = torch.where(read_slots[:, None] != 0, write_slots, 0)
        staged = StagedSlots.gather(conv_state, read_slots, write_slots)
        y = causal_conv1d_update_cpu(x, weight, bias, staged.pool, staged.read_slots, staged.write_slots)
        staged.scatter(conv_state, write_slots)
        return y
    inputs = x.float()
    y = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    _convolve_rows.parallel_for(
        x.shape[0],
        1 + _GRAIN_ELEMENTS // (x.shape[1] * x.shape[2]),
        FlatArray(inputs),
        *inputs.stride()[:2],
        *_filter(weight, bias),
        FlatArray(conv_state),
        *conv_state.stride()[:2],
        read_slots.contiguous(),
        write_slots.contiguous(),
        FlatArray(y),
    )
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def _filter(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[FlatArray, FlatArray | NDArray[np.float32]]:
    offset = _no_bias(weight.shape[0]) if bias is None else FlatArray(bias.float())
    return FlatArray(weight.float().contiguous()), offset


@functools.cache
def _no_bias(num_channels: int) -> NDArray[np.float32]:
    # Not a tensor: the first step of a model may be a recorded one, in which torch must not compute.
    return np.zeros(num_channels, np.float32)
