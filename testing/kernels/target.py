"""The device that a kernel test runs on, and tensors on this device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """The implementation of an op that a test runs, and the device of its tensors."""

    name: str  # "cpu" or "triton"
    device: str

    def int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def flags(self, values: list[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.bool, device=self.device)
