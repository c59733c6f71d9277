"""Causal depthwise convolution over time, with a carried state.

    y_t = silu(bias + sum_k weight[:, k] * x_{t - (K - 1) + k})

The state of a row is its last ``K - 1`` inputs, ``conv_state[slot, :, -1]`` being the newest. Inputs
before the first token of a prompt are zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
    return causal_conv1d_reference(x, weight, bias, conv_state, cu_seqlens, slots, has_initial)


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
    return causal_conv1d_update_reference(x, weight, bias, conv_state, read_slots, write_slots)
