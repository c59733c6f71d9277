"""The norm at the end of a Mamba-2 mixer: gate first, then RMS norm over groups of channels.

    u   = y * silu(z)
    out = u / sqrt(mean over its group of u^2 + eps) * weight
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_group_rms_norm_reference(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """:func:`gated_group_rms_norm`, term by term."""
    acc = torch.promote_types(y.dtype, torch.float32)
    gated = (y.to(acc) * F.silu(z.to(acc))).unflatten(-1, (-1, group_size))
    variance = gated.square().mean(dim=-1, keepdim=True)
    return ((gated * torch.rsqrt(variance + eps)).flatten(-2) * weight.to(acc)).to(y.dtype)


def gated_group_rms_norm(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """Gate y by silu(z), both ``[tokens, d]``, normalize each ``group_size`` channels, scale by weight.

    weight ``[d]``. z may be a column slice of a wider projection. Returns ``[tokens, d]`` in y's dtype.
    """
    return gated_group_rms_norm_reference(y, z, weight, group_size=group_size, eps=eps)
