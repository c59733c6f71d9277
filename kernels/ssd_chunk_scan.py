"""Prefill of a Mamba-2 layer: the SSM recurrence over ragged rows, by chunks.

    dt' = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt') h_{t-1} + dt' x_t B_t^T                    [P, N] a head
    y_t = h_t C_t + D x_t

Head h uses B and C of group ``h // (H // G)``.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from kernels.cpu_jit import as_array, as_flat_array
from kernels.ssm_recurrence import scan_heads
from kernels.staged_slots import StagedSlots


def ssd_chunk_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """:func:`ssd_chunk_scan` as the plain recurrence, one token after the other."""
    acc = torch.promote_types(x.dtype, torch.float32)
    heads_per_group = x.shape[1] // B.shape[1]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    bounds = cu_seqlens.tolist()
    for start, end, slot, initial in zip(
        bounds, bounds[1:], slots.tolist(), has_initial.tolist(), strict=False
    ):
        if slot == 0 or start == end:
            continue
        h = ssm_state[slot].to(acc) if initial else torch.zeros_like(ssm_state[slot], dtype=acc)
        step = F.softplus(dt[start:end].to(acc) + dt_bias.to(acc)).clamp(*dt_limit)
        decay = torch.exp(A.to(acc) * step)
        B_row, C_row = (t[start:end].to(acc).repeat_interleave(heads_per_group, dim=1) for t in (B, C))
        x_row = x[start:end].to(acc)
        for i in range(end - start):
            h = decay[i, :, None, None] * h + (step[i, :, None] * x_row[i])[:, :, None] * B_row[i, :, None, :]
            y[start + i] = (h * C_row[i, :, None, :]).sum(dim=-1) + D.to(acc)[:, None] * x_row[i]
        ssm_state[slot] = h
    return y


def _ssd_chunk_scan_cpu(
    x, dt, A, B, C, D, dt_bias, ssm_state, cu_seqlens, read_slots, write_slots, has_initial, dt_limit
):
    if ssm_state.dtype != torch.float32:
        staged = StagedSlots.gather(ssm_state, read_slots, write_slots[:, None])
        slots = staged.read_slots, staged.write_slots[:, 0]
        y = _ssd_chunk_scan_cpu(
            x, dt, A, B, C, D, dt_bias, staged.pool, cu_seqlens, *slots, has_initial, dt_limit
        )
        staged.scatter(ssm_state, write_slots[:, None])
        return y
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[1:]
    step = F.softplus(dt.float() + dt_bias.float()).clamp_(*dt_limit)
    y = torch.zeros(x.shape)
    strided = [(as_flat_array(t), *t.stride()[:2]) for t in (x.float(), B.float(), C.float())]
    scan_heads.parallel_for(
        num_heads,
        1 + _GRAIN_ELEMENTS // (1 + num_tokens * head_dim * state_dim),
        *itertools.chain.from_iterable(strided),
        as_array(step),
        as_array(torch.exp(step * A.float())),
        as_array(D.float()),
        num_groups,
        head_dim,
        state_dim,
        as_flat_array(ssm_state),
        *ssm_state.stride()[:3],
        as_array(cu_seqlens.contiguous()),
        as_array(read_slots.contiguous()),
        as_array(write_slots.contiguous()),
        as_array(has_initial.contiguous()),
        as_array(y.view(-1)),
    )
    return y.to(x.dtype)


_GRAIN_ELEMENTS = 2**21  # tokens times elements of state, about 100 µs


def ssd_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    slots: torch.Tensor,
    has_initial: torch.Tensor,
    *,
    chunk_size: int,
    dt_limit: tuple[float, float],
    max_seq_len: int,
) -> torch.Tensor:
    """Scan the ragged rows of a prefill batch and leave each row's last state in its slot.

    x ``[num_tokens, H, P]``, dt ``[num_tokens, H]``, A, D and dt_bias ``[H]``, B and C
    ``[num_tokens, G, N]``, ssm_state ``[num_slots, H, P, N]``, cu_seqlens ``[S + 1]``, slots ``[S]``,
    has_initial ``[S]``. Row s starts from its slot where ``has_initial[s]``, else from zeros. Returns
    y ``[num_tokens, H, P]``; zero in padding rows (slot 0).
    """
    if x.dtype == torch.float64:
        return ssd_chunk_scan_reference(
            x, dt, A, B, C, D, dt_bias, ssm_state, cu_seqlens, slots, has_initial, dt_limit=dt_limit
        )
    return _ssd_chunk_scan_cpu(
        x, dt, A, B, C, D, dt_bias, ssm_state, cu_seqlens, slots, slots, has_initial, dt_limit
    )
