"""One decode step of a Mamba-2 layer: the SSM recurrence over the ``T`` positions of each row.

    dt' = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt') h_{t-1} + dt' x_t B_t^T                    [P, N] a head
    y_t = h_t C_t + D x_t

Head h uses B and C of group ``h // (H // G)``. ``T = 1 + k``: with speculation, the state after each
position goes to a slot of its own, so that the next step may start after any accepted prefix.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu_jit import as_array, as_flat_array
from kernels.ssm_recurrence import update_heads
from kernels.staged_slots import StagedSlots


def selective_state_update_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """:func:`selective_state_update`, one row and position after the other."""
    acc = torch.promote_types(x.dtype, torch.float32)
    heads_per_group = x.shape[2] // B.shape[2]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for r, (source, targets) in enumerate(zip(read_slots.tolist(), write_slots.tolist(), strict=True)):
        if source == 0:
            continue
        h = ssm_state[source].to(acc)
        for i, target in enumerate(targets):
            step = F.softplus(dt[r, i].to(acc) + dt_bias.to(acc)).clamp(*dt_limit)
            B_i, C_i = (t[r, i].to(acc).repeat_interleave(heads_per_group, dim=0) for t in (B, C))
            x_i = x[r, i].to(acc)
            decay = torch.exp(A.to(acc) * step)
            h = decay[:, None, None] * h + (step[:, None] * x_i)[:, :, None] * B_i[:, None, :]
            y[r, i] = (h * C_i[:, None, :]).sum(dim=-1) + D.to(acc)[:, None] * x_i
            if target != 0:
                ssm_state[target] = h
    return y


def _selective_state_update_cpu(x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit):
    if ssm_state.dtype != torch.float32:
        staged = StagedSlots.gather(ssm_state, read_slots, write_slots)
        y = _selective_state_update_cpu(
            x, dt, A, B, C, D, dt_bias, staged.pool, staged.read_slots, staged.write_slots, dt_limit
        )
        staged.scatter(ssm_state, write_slots)
        return y
    num_rows, num_positions, num_heads, head_dim = x.shape
    y = torch.zeros(x.shape)
    operands = (as_array(t.float().contiguous()) for t in (x, dt, A, B, C, D, dt_bias))
    update_heads.parallel_for(
        num_rows * num_heads,
        max(1, _GRAIN_ELEMENTS // (num_positions * head_dim * B.shape[-1])),
        *operands,
        as_flat_array(ssm_state),
        *ssm_state.stride()[:3],
        as_array(read_slots.contiguous()),
        as_array(write_slots.contiguous()),
        *map(np.float32, dt_limit),
        as_array(y),
    )
    return y.to(x.dtype)


_GRAIN_ELEMENTS = 2**20  # of state, about 100 µs


def selective_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """Advance each row's state by its ``T`` positions, in place in the pool.

    x ``[R, T, H, P]``, dt ``[R, T, H]``, A, D and dt_bias ``[H]``, B and C ``[R, T, G, N]``, ssm_state
    ``[num_slots, H, P, N]``, read_slots ``[R]``, write_slots ``[R, T]``. Row r starts from
    ``read_slots[r]``, which may be one of its own write slots; the state after position i goes to
    ``write_slots[r, i]`` unless that is 0. Returns y ``[R, T, H, P]``; zero in padding rows (read slot 0).
    """
    if x.dtype == torch.float64:
        return selective_state_update_reference(
            x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit=dt_limit
        )
    return _selective_state_update_cpu(
        x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit
    )
