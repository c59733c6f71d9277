"""Copies of checkpoints with other weights in their linear layers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from testing.checkpoints.quantized import NEVER_QUANTIZED

OTHERS = tuple(part for part in NEVER_QUANTIZED if part != "lm_head")
"""Parts of the names of tensors that no linear layer, expert or output head has."""


def with_changed_weights(source: Path, target: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """Copies a checkpoint of one file. ``change`` maps each weight ``[out, in]`` of a linear layer, an expert
    or the output head to a new one."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim >= 2 and not any(part in name for part in OTHERS):
            whole = change(tensor) if tensor.ndim == 2 else torch.stack([change(one) for one in tensor])
            tensors[name] = whole.contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
