"""Causal convolution of decode rows on CPU. Prefill is in causal_conv1d_prefill_cpu.py.

Threads share the rows; inner loops run over adjacent channels. Input j of a row is
``x[first + j * token_stride :]``; the inputs before the row are ``past``.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous. The
carried state is float32; states of another dtype are copied to float32 and back (staged_slots.py).
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import as_array, as_flat_array, cpu_jit
from kernels.ssm.staged_slots import StagedSlots

_GRAIN_ELEMENTS = 2**18  # outputs, about 100 µs


@cpu_jit
def _transpose(source, channel_stride, begin, end, num_rows):
    """Copy ``source[c, k]`` to a new array ``[k, c - begin]``."""
    out = np.empty((num_rows, end - begin), np.float32)
    if num_rows == 3 and channel_stride == 3:
        # The common shape, with constants: the compiler turns it into vector instructions.
        for c in range(end - begin):
            o = 3 * (begin + c)
            out[0, c], out[1, c], out[2, c] = source[o], source[o + 1], source[o + 2]
        return out
    for k in range(num_rows):
        for c in range(begin, end):
            out[k, c - begin] = source[c * channel_stride + k]
    return out


@cpu_jit
def _newest_input(x, first, token_stride, past, j):
    """Return input j of a row; inputs with negative j are in the past."""
    num_past, num_channels = past.shape
    o = first + j * token_stride
    return past[num_past + j] if j < 0 else x[o : o + num_channels]


@cpu_jit
def _convolve_token(x, first, token_stride, past, taps, bias, t, out):
    num_past, num_channels = past.shape
    for c in range(num_channels):
        out[c] = bias[c]
    for k in range(num_past + 1):
        source = _newest_input(x, first, token_stride, past, t - num_past + k)
        tap = taps[k]
        for c in range(num_channels):
            out[c] += tap[c] * source[c]


@cpu_jit
def _store_state(x, first, token_stride, past, num_tokens, slot, channel_stride, begin):
    """Store the newest inputs after ``num_tokens`` tokens in a slot."""
    num_past, num_channels = past.shape
    if num_past == 3 and channel_stride == 3:
        a = _newest_input(x, first, token_stride, past, num_tokens - 3)
        b = _newest_input(x, first, token_stride, past, num_tokens - 2)
        d = _newest_input(x, first, token_stride, past, num_tokens - 1)
        for c in range(num_channels):
            o = 3 * (begin + c)
            slot[o], slot[o + 1], slot[o + 2] = a[c], b[c], d[c]
        return
    for k in range(num_past):
        source = _newest_input(x, first, token_stride, past, num_tokens - num_past + k)
        for c in range(num_channels):
            slot[(begin + c) * channel_stride + k] = source[c]


@cpu_jit
def _convolve_rows(
    x, row_stride, token_stride, weight, bias, state, slot_stride, channel_stride,
    read_slots, write_slots, y, begin, end,
):  # fmt: skip
    """Convolve rows. Items are decode rows, with all their channels."""
    _, num_positions, num_channels = y.shape
    num_taps = weight.shape[0] // num_channels
    taps = _transpose(weight, num_taps, 0, num_channels, num_taps)
    for r in range(begin, end):
        if read_slots[r] == 0:
            y[r] = np.float32(0)
            continue
        past = _transpose(state[read_slots[r] * slot_stride :], channel_stride, 0, num_channels, num_taps - 1)
        for i in range(num_positions):
            _convolve_token(x, r * row_stride, token_stride, past, taps, bias, i, y[r, i])
            out = y[r, i]
            for c in range(num_channels):
                # np.divide, since numba's check of "/" for a zero divisor would keep the loop scalar.
                out[c] = np.divide(out[c], np.float32(1) + exp_f32(-out[c]))
            if write_slots[r, i] != 0:
                slot = state[write_slots[r, i] * slot_stride :]
                _store_state(x, r * row_stride, token_stride, past, i + 1, slot, channel_stride, 0)


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
    y = torch.empty(x.shape)
    _convolve_rows.parallel_for(
        x.shape[0],
        1 + _GRAIN_ELEMENTS // (x.shape[1] * x.shape[2]),
        as_flat_array(inputs),
        *inputs.stride()[:2],
        *_filter(weight, bias),
        as_flat_array(conv_state),
        *conv_state.stride()[:2],
        as_array(read_slots.contiguous()),
        as_array(write_slots.contiguous()),
        as_array(y),
    )
    return y.to(x.dtype)


def _filter(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    offset = _no_bias(weight.shape[0]) if bias is None else as_array(bias.float())
    return as_array(weight.float().reshape(-1)), offset


@functools.cache
def _no_bias(num_channels: int) -> np.ndarray:
    return np.zeros(num_channels, np.float32)
