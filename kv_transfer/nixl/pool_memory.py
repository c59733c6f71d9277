"""Refuses memory that NIXL can read only slowly."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from wire.errors import ConfigError

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SETTING = re.compile(r"expandable_segments\s*:\s*(\w+)")


def refuse_expandable_segments(device: torch.device, environment: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` if torch is told to allocate GPU memory that no other process can open.

    Expandable segments are virtual memory without a handle for CUDA IPC. NIXL registers them all the same,
    and UCX then reads them over TCP: 0.3 instead of 200 GB/s, without a warning
    (https://github.com/ai-dynamo/nixl/issues/1754).
    """
    if device.type != "cuda":
        return
    for name in _VARIABLES:
        value = environment.get(name, "")
        if _SETTING.findall(value)[-1:] == ["True"]:  # of settings that are given twice, torch takes the last
            raise ConfigError(
                f"{name}={value}: other processes can't open GPU memory in expandable segments, so UCX would "
                f"read blocks and states over TCP, some 600 times as slowly; take expandable_segments:True "
                f"out of {name}"
            )
