"""RMS norm over the last axis, alone or fused with the residual addition before it.

    rms_norm(x)        = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm(x, r) = rms_norm(r + x), r + x

Inside in float32 (float64 for float64 inputs), rounded once to x's dtype.
"""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`rms_norm`, term by term."""
    acc = torch.promote_types(x.dtype, torch.float32)
    x_acc = x.to(acc)
    variance = x_acc.square().mean(dim=-1, keepdim=True)
    return (x_acc * torch.rsqrt(variance + eps) * weight.to(acc)).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm`: the sum is rounded to the residual's dtype, then normalized."""
    total = residual + x
    return rms_norm_reference(total, weight, eps).to(x.dtype), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize x ``[..., H]`` and scale by weight ``[H]``."""
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rms_norm(residual + x)`` and the sum itself, all ``[..., H]``.

    The residual stream may be wider (float32) than x; the sum has the wider dtype.
    """
    return add_rms_norm_reference(x, residual, weight, eps)
