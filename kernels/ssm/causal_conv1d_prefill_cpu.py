"""Causal convolution and silu over the ragged rows of a prefill batch on CPU.

Threads share the channels, in blocks. Token after token, a vector of channels is convolved, passes silu and
is written once. Channels after the last whole vector are computed one by one.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous. The
carried state is float32; states of another dtype are copied to float32 and back (staged_slots.py).
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import as_array, as_flat_array, cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
    divide,
    exponential,
    lanes,
    load,
    multiply_add,
    splat,
    store,
    subtract,
)
from kernels.ssm.staged_slots import StagedSlots

_BLOCK_CHANNELS = 16  # a multiple of any vector's width, so that threads' shares don't change the arithmetic
_GRAIN_ELEMENTS = 2**18  # outputs, about 100 µs

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
        decayed = exponential(subtract(splat(_ZERO), total))
        store(y, target + c, divide(total, add(splat(_ONE), decayed)))
    for c in range(whole, num_channels):
        one = bias[c]
        for k in range(from_past):
            one += taps[k * num_channels + c] * past[(t + k) * num_channels + c]
        for k in range(from_past, num_taps):
            one += taps[k * num_channels + c] * x[inputs + k * token_stride + c]
        y[target + c] = np.divide(one, _ONE + exp_f32(-one))


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
    for s in range(read_slots.shape[0]):
        if write_slots[s] == 0 or bounds[s] == bounds[s + 1]:
            continue
        offset = channel * channel_stride
        if has_initial[s]:
            source = read_slots[s] * slot_stride + offset
            _transpose(state, source, channel_stride, num_channels, num_past, past)
        else:
            past[:] = _ZERO
        first, num_tokens = bounds[s] * token_stride + channel, bounds[s + 1] - bounds[s]
        for t in range(num_tokens):
            target = (bounds[s] + t) * all_channels + channel
            _convolve_token(
                x, first, token_stride, past, taps, own_bias, t, num_taps, num_channels, y, target
            )
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
    y = torch.zeros(x.shape)
    offset = torch.zeros(num_channels) if bias is None else bias.float()
    _convolve_blocks.parallel_for(
        -(-num_channels // _BLOCK_CHANNELS),
        1 + _GRAIN_ELEMENTS // (_BLOCK_CHANNELS * (1 + x.shape[0])),
        as_flat_array(inputs),
        inputs.stride(0),
        as_array(weight.float().reshape(-1)),
        num_taps,
        as_array(offset),
        as_flat_array(conv_state),
        *conv_state.stride()[:2],
        as_array(cu_seqlens.contiguous()),
        as_array(read_slots.contiguous()),
        as_array(write_slots.contiguous()),
        as_array(has_initial.contiguous()),
        as_array(y.view(-1)),
    )
    return y.to(x.dtype)
