"""Causal depthwise convolution over time, with a carried state.

    y_t = silu(bias + sum_k weight[:, k] * x_{t - (K - 1) + k})

The state of a row is its last ``K - 1`` inputs, ``conv_state[slot, :, -1]`` being the newest. Inputs
before the first token of a prompt are zero.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu_jit import as_array, as_flat_array, cpu_jit
from kernels.staged_slots import StagedSlots


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor,
) -> torch.Tensor:
    """:func:`causal_conv1d`, one row after the other."""
    acc = torch.promote_types(x.dtype, torch.float32)
    num_taps = weight.shape[1]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    bounds = cu_seqlens.tolist()
    for start, end, slot, initial in zip(
        bounds, bounds[1:], slots.tolist(), has_initial.tolist(), strict=False
    ):
        if slot == 0 or start == end:
            continue
        past = conv_state[slot].to(acc) if initial else torch.zeros_like(conv_state[slot], dtype=acc)
        window = torch.cat([past, x[start:end].to(acc).T], dim=1)
        out = sum(window[:, k : k + end - start] * weight[:, k, None].to(acc) for k in range(num_taps))
        if bias is not None:
            out = out + bias[:, None].to(acc)
        y[start:end] = F.silu(out).T
        conv_state[slot] = window[:, end - start :]
    return y


def causal_conv1d_update_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """:func:`causal_conv1d_update`, one row and position after the other."""
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


# CPU path. numba convolves a range of channels token by token, its inner loops over adjacent channels; torch
# then applies silu. Input j of a row is ``x[first + j * token_stride :]``; the inputs before it are ``past``.


@cpu_jit
def _transpose(source, channel_stride, begin, end, num_rows):
    """``source[c, k]`` as ``[k, c - begin]``."""
    out = np.empty((num_rows, end - begin), np.float32)
    for k in range(num_rows):
        for c in range(begin, end):
            out[k, c - begin] = source[c * channel_stride + k]
    return out


@cpu_jit
def _convolve_token(x, first, token_stride, past, taps, bias, t, out):
    num_past, num_channels = past.shape
    for c in range(num_channels):
        out[c] = bias[c]
    for k in range(num_past + 1):
        j = t - num_past + k
        o = first + j * token_stride
        source = past[num_past + j] if j < 0 else x[o : o + num_channels]
        tap = taps[k]
        for c in range(num_channels):
            out[c] += tap[c] * source[c]


@cpu_jit
def _store_state(x, first, token_stride, past, num_tokens, slot, channel_stride, begin):
    """Leave the newest inputs after ``num_tokens`` tokens in a slot."""
    num_past, num_channels = past.shape
    for k in range(num_past):
        j = num_tokens - num_past + k
        o = first + j * token_stride
        source = past[num_past + j] if j < 0 else x[o : o + num_channels]
        for c in range(num_channels):
            slot[(begin + c) * channel_stride + k] = source[c]


@cpu_jit
def _convolve_channels(
    x, token_stride, weight, bias, state, slot_stride, channel_stride,
    bounds, read_slots, write_slots, has_initial, y, begin, end,
):  # fmt: skip
    """Items are channels: a whole prefill batch of them."""
    num_taps = weight.shape[0] // y.shape[1]
    taps = _transpose(weight, num_taps, begin, end, num_taps)
    for s in range(read_slots.shape[0]):
        if read_slots[s] == 0 or bounds[s] == bounds[s + 1]:
            continue
        past = np.zeros((num_taps - 1, end - begin), np.float32)
        if has_initial[s]:
            past = _transpose(state[read_slots[s] * slot_stride :], channel_stride, begin, end, num_taps - 1)
        first, num_tokens = bounds[s] * token_stride + begin, bounds[s + 1] - bounds[s]
        for t in range(num_tokens):
            out = y[bounds[s] + t, begin:end]
            _convolve_token(x, first, token_stride, past, taps, bias[begin:end], t, out)
        slot = state[write_slots[s] * slot_stride :]
        _store_state(x, first, token_stride, past, num_tokens, slot, channel_stride, begin)


@cpu_jit
def _convolve_rows(
    x, row_stride, token_stride, weight, bias, state, slot_stride, channel_stride,
    read_slots, write_slots, y, begin, end,
):  # fmt: skip
    """Items are decode rows: all channels of them."""
    _, num_positions, num_channels = y.shape
    num_taps = weight.shape[0] // num_channels
    taps = _transpose(weight, num_taps, 0, num_channels, num_taps)
    for r in range(begin, end):
        if read_slots[r] == 0:
            continue
        past = _transpose(state[read_slots[r] * slot_stride :], channel_stride, 0, num_channels, num_taps - 1)
        for i in range(num_positions):
            _convolve_token(x, r * row_stride, token_stride, past, taps, bias, i, y[r, i])
            if write_slots[r, i] != 0:
                slot = state[write_slots[r, i] * slot_stride :]
                _store_state(x, r * row_stride, token_stride, past, i + 1, slot, channel_stride, 0)


def _causal_conv1d_cpu(x, weight, bias, conv_state, cu_seqlens, read_slots, write_slots, has_initial):
    if conv_state.dtype != torch.float32:
        staged = StagedSlots.gather(conv_state, read_slots, write_slots[:, None])
        slots = staged.read_slots, staged.write_slots[:, 0]
        y = _causal_conv1d_cpu(x, weight, bias, staged.pool, cu_seqlens, *slots, has_initial)
        staged.scatter(conv_state, write_slots[:, None])
        return y
    inputs = x.float()
    y = torch.zeros(x.shape)
    _convolve_channels.parallel_for(
        x.shape[1],
        1 + _GRAIN_ELEMENTS // (1 + x.shape[0]),
        as_flat_array(inputs),
        inputs.stride(0),
        *_filter(weight, bias),
        as_flat_array(conv_state),
        *conv_state.stride()[:2],
        as_array(cu_seqlens.contiguous()),
        as_array(read_slots.contiguous()),
        as_array(write_slots.contiguous()),
        as_array(has_initial.contiguous()),
        as_array(y),
    )
    return F.silu(y, inplace=True).to(x.dtype)


def _causal_conv1d_update_cpu(x, weight, bias, conv_state, read_slots, write_slots):
    if conv_state.dtype != torch.float32:
        staged = StagedSlots.gather(conv_state, read_slots, write_slots)
        y = _causal_conv1d_update_cpu(x, weight, bias, staged.pool, staged.read_slots, staged.write_slots)
        staged.scatter(conv_state, write_slots)
        return y
    inputs = x.float()
    y = torch.zeros(x.shape)
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
    return F.silu(y, inplace=True).to(x.dtype)


def _filter(weight, bias):
    bias = torch.zeros(weight.shape[0]) if bias is None else bias
    return as_array(weight.float().reshape(-1)), as_array(bias.float())


_GRAIN_ELEMENTS = 2**18  # outputs, about 100 µs


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor,
    *,
    max_seq_len: int,
) -> torch.Tensor:
    """Convolve the ragged rows of a prefill batch and leave each row's last inputs in its slot.

    x ``[num_tokens, C]``, weight ``[C, K]``, bias ``[C]``, conv_state ``[num_slots, C, K - 1]`` of any
    float dtype, cu_seqlens ``[S + 1]``, slots ``[S]``, has_initial ``[S]``. Row s starts from its slot
    where ``has_initial[s]``, else from zeros. Returns y ``[num_tokens, C]``; zero in padding rows (slot 0).
    """
    if x.dtype == torch.float64:
        return causal_conv1d_reference(x, weight, bias, conv_state, cu_seqlens, slots, has_initial)
    return _causal_conv1d_cpu(x, weight, bias, conv_state, cu_seqlens, slots, slots, has_initial)


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
) -> torch.Tensor:
    """Convolve the ``T`` positions of each decode row, keeping the state after every position.

    x ``[R, T, C]`` (a column slice of a wider projection will do), read_slots ``[R]``, write_slots
    ``[R, T]``. Row r starts from ``read_slots[r]``, which may be one of its own write slots; the state
    after position i goes to ``write_slots[r, i]`` unless that is 0. Returns y ``[R, T, C]``; zero in
    padding rows (read slot 0).
    """
    if x.dtype == torch.float64:
        return causal_conv1d_update_reference(x, weight, bias, conv_state, read_slots, write_slots)
    return _causal_conv1d_update_cpu(x, weight, bias, conv_state, read_slots, write_slots)
