"""Random weights of one byte for tests of kernels."""

from __future__ import annotations

import torch

from kernels.linear.quantized_weight import FP8, QuantizedWeight

BLOCKS = {"tensor": (None, None), "channel": (1, None), "group": (1, 32), "block": (64, 32), "odd": (3, 5)}
"""Rows and columns that share a scale; None means all."""


def random_weight(
    stored: torch.dtype,
    num_outputs: int,
    num_inputs: int,
    block: tuple[int | None, int | None],
    *,
    seed: int = 0,
    device: str = "cpu",
) -> QuantizedWeight:
    """Returns weights with all codes of the dtype except NaN, FP8 subnormals included. Outputs are about as
    large as inputs."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_outputs, num_inputs), generator=generator).to(torch.uint8)
    if stored == FP8:
        codes[codes & 0x7F == 0x7F] = 1
    values = codes.view(stored)
    rows, columns = block[0] or num_outputs, block[1] or num_inputs
    grid = -(-num_outputs // rows), -(-num_inputs // columns)
    scales = (0.5 + torch.rand(grid, generator=generator)) / (100 * num_inputs**0.5)
    return QuantizedWeight(values.to(device), scales.to(device), rows, columns)
