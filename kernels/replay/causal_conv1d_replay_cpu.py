"""The replay form of the convolution on CPU: pending inputs move into the state, then the slots form's
function runs without storing a state, then the new inputs are kept.

Arrays are flat, with explicit strides if they may be views of wider ones. The carried state is float32;
states of another dtype are copied to float32 and back (kernels/ssm/staged_slots.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray, as_array, cpu_jit
from kernels.cpu.vector import lanes, load, load_3, store_3
from kernels.replay.kept_inputs import PendingRows
from kernels.ssm.causal_conv1d_cpu import causal_conv1d_update_cpu
from kernels.ssm.staged_slots import StagedSlots

_ROWS_A_SHARE = 64
"""Rows whose inputs are moved in about 100 µs."""


@cpu_jit
def _advance_window(state, old, new, channel_stride, num_past, kept, tokens, count, num_channels):
    """Store the state from ``state[old]`` on after ``count`` kept inputs, from ``state[new]`` on.

    Input j of all channels begins at ``kept[tokens[j]]``.
    """
    done = 0
    if num_past == 3 and channel_stride == 3:
        done = num_channels - num_channels % lanes()
        for c in range(0, done, lanes()):
            a, b, d = load_3(state, old + 3 * c)
            for j in range(count):
                a, b, d = b, d, load(kept, tokens[j] + c)
            store_3(state, new + 3 * c, a, b, d)
    for c in range(done, num_channels):
        for k in range(num_past):
            n = k + count
            if n < num_past:
                state[new + c * channel_stride + k] = state[old + c * channel_stride + n]
            else:
                state[new + c * channel_stride + k] = kept[tokens[n - num_past] + c]


@cpu_jit
def _advance_windows(
    state, slot_stride, channel_stride, num_channels, num_past, num_positions, read_slots, write_slots,
    seq_lens, kept, pending, slots, begin, end,
):  # fmt: skip
    """Store rows' states after their pending inputs. Items are rows; ``slots`` receives each state's slot."""
    kept_rows, counts, places = pending
    tokens = np.empty(places, np.int64)
    for r in range(begin, end):
        slots[r] = read_slots[r]
        if read_slots[r] == 0 or counts[r] == 0:
            continue
        slots[r] = write_slots[r]
        num_before = seq_lens[r] - num_positions - counts[r]
        for j in range(counts[r]):
            tokens[j] = (kept_rows[r] * places + (num_before + j) % places) * num_channels
        _advance_window(
            state, read_slots[r] * slot_stride, write_slots[r] * slot_stride, channel_stride, num_past, kept,
            tokens, counts[r], num_channels,
        )  # fmt: skip


@cpu_jit
def _keep_inputs(
    x, row_stride, token_stride, num_positions, num_channels, read_slots, seq_lens, kept, pending, begin, end
):  # fmt: skip
    """Keep the inputs of rows' new positions. Items are rows."""
    kept_rows, _, places = pending
    for r in range(begin, end):
        if read_slots[r] == 0:
            continue
        for i in range(num_positions):
            place = kept_rows[r] * places + (seq_lens[r] - num_positions + i) % places
            o, at = r * row_stride + i * token_stride, place * num_channels
            for c in range(num_channels):
                kept[at + c] = x[o + c]


def causal_conv1d_replay_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: Tensor,
    pending: PendingRows,
) -> Tensor:
    """Compute :func:`kernels.replay.causal_conv1d_replay.causal_conv1d_replay` on CPU."""
    if conv_state.dtype == torch.float32:
        return _replay(x, weight, bias, conv_state, read_slots, write_slots, kept, pending)
    staged, targets = _staged(conv_state, read_slots, write_slots, pending)
    slots = staged.read_slots, staged.write_slots
    y = _replay(x, weight, bias, staged.pool, *slots, kept, pending)
    staged.scatter(conv_state, targets)
    kept.copy_(kept.to(conv_state.dtype))  # as the pool would have stored them
    return y


def causal_conv1d_flush_cpu(
    conv_state: Tensor, read_slots: Tensor, write_slots: Tensor, kept: Tensor, pending: PendingRows
) -> None:
    """Compute :func:`kernels.replay.causal_conv1d_replay.causal_conv1d_flush` on CPU."""
    if conv_state.dtype == torch.float32:
        _flush(conv_state, read_slots, write_slots, kept, pending)
        return
    staged, targets = _staged(conv_state, read_slots, write_slots, pending)
    _flush(staged.pool, staged.read_slots, staged.write_slots, kept, pending)
    staged.scatter(conv_state, targets)


def _flush(
    conv_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: Tensor,
    pending: PendingRows,
    num_positions: int = 0,
) -> Tensor:
    """Flush a float32 pool. ``pending.seq_lens`` includes num_positions later tokens.

    Return each row's slot afterwards. Another kernel reads it, so a recorded call (kernels/cpu/graph.py) must
    write it again at each replay.
    """
    slots = torch.empty_like(read_slots)
    _advance_windows.parallel_for(
        len(read_slots),
        _ROWS_A_SHARE,
        FlatArray(conv_state),
        *conv_state.stride()[:2],
        *conv_state.shape[1:],
        num_positions,
        read_slots,
        write_slots,
        pending.seq_lens,
        FlatArray(kept),
        pending.arrays(kept.shape[1]),
        slots,
    )
    return slots


def _replay(
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
    slots = _flush(conv_state, read_slots, write_slots, kept, pending, num_positions)
    unstored = torch.empty((num_rows, num_positions), dtype=torch.int32)
    as_array(unstored).fill(0)  # torch.zeros would be refused while a graph records
    y = causal_conv1d_update_cpu(x, weight, bias, conv_state, slots, unstored)
    inputs = x.float()
    _keep_inputs.parallel_for(
        num_rows,
        _ROWS_A_SHARE,
        FlatArray(inputs),
        *inputs.stride()[:2],
        num_positions,
        num_channels,
        read_slots,
        pending.seq_lens,
        FlatArray(kept),
        pending.arrays(kept.shape[1]),
    )
    return y


def _staged(
    conv_state: Tensor, read_slots: Tensor, write_slots: Tensor, pending: PendingRows
) -> tuple[StagedSlots, Tensor]:
    """Return a float32 copy of the rows' slots, and the slots that are stored: 0 where nothing is pending."""
    targets = torch.where((read_slots != 0) & (pending.counts > 0), write_slots, 0)
    return StagedSlots.gather(conv_state, read_slots, targets), targets
