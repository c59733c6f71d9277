"""Causal convolution and silu over the ragged rows of a prefill batch on CPU.

Threads share the channels, in blocks. A vector of channels is convolved, passes silu and is written once:
four tokens at a time with the usual four taps, since their windows share inputs and taps, and since four
exponentials at a time don't wait for one another. A row's first tokens and other filters take token after
token, with the same operations in the same order. Channels after the last whole vector are computed one by
one.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous. The
carried state is float32; states of another dtype are copied to float32 and back (staged_slots.py).
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import aligned, clear_columns, lanes, load, multiply_add, prefetch, silu, store
from kernels.ssm.staged_slots import StagedSlots

_BLOCK_CHANNELS = 16  # a multiple of any vector's width, so that threads' shares don't change the arithmetic
_GRAIN_ELEMENTS = 2**16  # outputs, 35 to 90 µs

_ZERO, _ONE = np.float32(0), np.float32(1)


@cpu_jit
def _transpose(source, offset, channel_stride, num_channels, num_rows, out):
    """Copy ``source[c, k]`` to ``out[k, c]``."""
    for k in range(num_rows):
        for c in range(num_channels):
            out[k * num_channels + c] = source[offset + c * channel_stride + k]


@cpu_jit
def _convolve_token(x, first, token_stride, past, taps, bias, t, num_taps, num_channels, y, target):
    """Convolve token t. Input j is ``x[first + j * token_stride :]``; inputs before the row are ``past``."""
    w, num_past = lanes(), num_taps - 1
    whole = num_channels - num_channels % w
    inputs, from_past = first + (t - num_past) * token_stride, max(0, num_past - t)
    for c in range(0, whole, w):
        total = load(bias, c)
        for k in range(from_past):
            total = multiply_add(
                load(taps, k * num_channels + c), load(past, (t + k) * num_channels + c), total
            )
        for k in range(from_past, num_taps):
            total = multiply_add(
                load(taps, k * num_channels + c), load(x, inputs + k * token_stride + c), total
            )
        store(y, target + c, silu(total))
    for c in range(whole, num_channels):
        one = bias[c]
        for k in range(from_past):
            one += taps[k * num_channels + c] * past[(t + k) * num_channels + c]
        for k in range(from_past, num_taps):
            one += taps[k * num_channels + c] * x[inputs + k * token_stride + c]
        y[target + c] = np.divide(one, _ONE + exp_f32(-one))


@cpu_jit
def _convolve_four_tokens(x, inputs, token_stride, taps, bias, num_channels, y, target, y_stride):
    """Convolve four tokens, whose inputs are all in the row, with four taps; channels in whole vectors.

    ``inputs`` is the place of the first token's oldest input, ``target`` of its output.
    """
    s = token_stride
    for c in range(0, num_channels, lanes()):
        w0, w1 = load(taps, c), load(taps, num_channels + c)
        w2, w3 = load(taps, 2 * num_channels + c), load(taps, 3 * num_channels + c)
        offset, i, o = load(bias, c), inputs + c, target + c
        for k in range(4):  # what the next four tokens read and write
            prefetch(x, i + (7 + k) * s)
            prefetch(y, o + (4 + k) * y_stride)
        x0, x1, x2, x3 = load(x, i), load(x, i + s), load(x, i + 2 * s), load(x, i + 3 * s)
        x4, x5, x6 = load(x, i + 4 * s), load(x, i + 5 * s), load(x, i + 6 * s)
        y0, y1 = multiply_add(w0, x0, offset), multiply_add(w0, x1, offset)
        y2, y3 = multiply_add(w0, x2, offset), multiply_add(w0, x3, offset)
        y0, y1, y2, y3 = (
            multiply_add(w1, x1, y0), multiply_add(w1, x2, y1),
            multiply_add(w1, x3, y2), multiply_add(w1, x4, y3),
        )  # fmt: skip
        y0, y1, y2, y3 = (
            multiply_add(w2, x2, y0), multiply_add(w2, x3, y1),
            multiply_add(w2, x4, y2), multiply_add(w2, x5, y3),
        )  # fmt: skip
        y0, y1, y2, y3 = (
            multiply_add(w3, x3, y0), multiply_add(w3, x4, y1),
            multiply_add(w3, x5, y2), multiply_add(w3, x6, y3),
        )  # fmt: skip
        store(y, o, silu(y0))
        store(y, o + y_stride, silu(y1))
        store(y, o + 2 * y_stride, silu(y2))
        store(y, o + 3 * y_stride, silu(y3))


@cpu_jit
def _convolve_row(
    x, first, token_stride, past, taps, bias, num_tokens, num_taps, num_channels, y, target, y_stride
):
    t = 0
    while t < num_tokens:
        if num_taps == 4 and num_channels % lanes() == 0 and t >= 3 and t + 4 <= num_tokens:
            inputs, outputs = first + (t - 3) * token_stride, target + t * y_stride
            _convolve_four_tokens(x, inputs, token_stride, taps, bias, num_channels, y, outputs, y_stride)
            t += 4
        else:
            outputs = target + t * y_stride
            _convolve_token(x, first, token_stride, past, taps, bias, t, num_taps, num_channels, y, outputs)
            t += 1


@cpu_jit
def _store_state(
    x, first, token_stride, past, num_tokens, num_past, num_channels, state, offset, channel_stride
):
    """Store the newest inputs after ``num_tokens`` tokens."""
    for k in range(num_past):
        j = num_tokens - num_past + k
        for c in range(num_channels):
            value = past[(num_past + j) * num_channels + c] if j < 0 else x[first + j * token_stride + c]
            state[offset + c * channel_stride + k] = value


@cpu_jit
def _convolve_blocks(
    x, token_stride, weight, num_taps, bias, state, slot_stride, channel_stride,
    bounds, read_slots, write_slots, has_initial, y, begin, end,
):  # fmt: skip
    """Convolve. Items are blocks of channels. Rows go in order, as a row may read an earlier row's slot."""
    all_channels, num_past = bias.shape[0], num_taps - 1
    channel = begin * _BLOCK_CHANNELS
    num_channels = min(end * _BLOCK_CHANNELS, all_channels) - channel
    taps, past = aligned(num_taps * num_channels), aligned(num_past * num_channels)
    _transpose(weight, channel * num_taps, num_taps, num_channels, num_taps, taps)
    own_bias = bias[channel : channel + num_channels]
    num_rows = read_slots.shape[0]
    clear_columns(y, bounds[num_rows], y.shape[0] // all_channels, all_channels, channel, num_channels)
    for s in range(num_rows):
        if write_slots[s] == 0:
            clear_columns(y, bounds[s], bounds[s + 1], all_channels, channel, num_channels)
            continue
        if bounds[s] == bounds[s + 1]:
            continue
        offset = channel * channel_stride
        if has_initial[s]:
            source = read_slots[s] * slot_stride + offset
            _transpose(state, source, channel_stride, num_channels, num_past, past)
        else:
            past[:] = _ZERO
        first, num_tokens = bounds[s] * token_stride + channel, bounds[s + 1] - bounds[s]
        _convolve_row(
            x, first, token_stride, past, taps, own_bias, num_tokens, num_taps, num_channels,
            y, bounds[s] * all_channels + channel, all_channels,
        )  # fmt: skip
        _store_state(
            x, first, token_stride, past, num_tokens, num_past, num_channels,
            state, write_slots[s] * slot_stride + offset, channel_stride,
        )  # fmt: skip


def causal_conv1d_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    has_initial: torch.Tensor,
) -> torch.Tensor:
    """Compute :func:`kernels.ssm.causal_conv1d.causal_conv1d`; boundaries are passed as ends of rows."""
    if conv_state.dtype != torch.float32:
        write_slots = torch.where(cu_seqlens.diff() > 0, write_slots, 0)
        read_slots = torch.where(has_initial & (write_slots != 0), read_slots, 0)
        staged = StagedSlots.gather(conv_state, read_slots, write_slots)
        slots = staged.read_slots, staged.write_slots
        y = causal_conv1d_cpu(x, weight, bias, staged.pool, cu_seqlens, *slots, has_initial)
        staged.scatter(conv_state, write_slots)
        return y
    inputs = x.float()
    num_channels, num_taps = weight.shape
    y = torch.empty(x.shape)
    offset = torch.zeros(num_channels) if bias is None else bias.float()
    _convolve_blocks.parallel_for(
        -(-num_channels // _BLOCK_CHANNELS),
        1 + _GRAIN_ELEMENTS // (_BLOCK_CHANNELS * (1 + x.shape[0])),
        FlatArray(inputs),
        inputs.stride(0),
        FlatArray(weight.float().contiguous()),
        num_taps,
        offset,
        FlatArray(conv_state),
        *conv_state.stride()[:2],
        cu_seqlens.contiguous(),
        read_slots.contiguous(),
        write_slots.contiguous(),
        has_initial.contiguous(),
        FlatArray(y),
    )
    return y.to(x.dtype)
