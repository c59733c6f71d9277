"""Slots of recurrent layers' states, as the cases of such layers take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.kernels.cases.case import Bind, int32
from benchmarks.kernels.cases.models import Model


def own_slots(device: torch.device, rows: int, positions: int) -> dict[str, torch.Tensor]:
    """Returns ``read_slots`` and ``write_slots`` of rows with their own slots, one for every position."""
    write_slots = torch.arange(1, rows * positions + 1, dtype=torch.int32, device=device)
    write_slots = write_slots.view(rows, positions)
    return {"read_slots": write_slots[:, 0].contiguous(), "write_slots": write_slots}


def one_prompt(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns cu_seqlens, the slots read and written, and that there is no earlier state."""
    slot = int32(x.device, 1)
    return int32(x.device, 0, len(x)), slot, slot, torch.tensor([False], device=x.device)


def peers_on(model: Model, torch_eager: Bind, gpu: Mapping[str, Bind]) -> Mapping[str, Bind]:
    """Returns the peers for the model's device: libraries on GPUs, only torch elsewhere."""
    return gpu if model.device == "cuda" else {"eager": torch_eager}
