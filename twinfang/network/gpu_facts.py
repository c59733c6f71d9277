"""The GPU whose memory a check uses, as torch and CUDA's driver describe it."""

from __future__ import annotations

import ctypes

import torch

from wire.codec import message

_WRITES_ORDERING = 118
"""``CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`` of CUDA's driver. torch does not report it."""
_ORDERED_FOR: dict[int | None, str] = {0: "no GPU", 100: "itself", 200: "all GPUs"}
"""The values of ``CUGPUDirectRDMAWritesOrdering``."""


@message
class GpuFacts:
    """One side's GPU, and the GPUs that its process can see."""

    name: str
    uuid: str
    visible: tuple[str, ...]
    """UUIDs, the GPU's own among them."""
    writes_ordering: int | None
    """For whom a network card's writes to the GPU's memory are in order; None: the driver did not say."""

    def __str__(self) -> str:
        ordered = _ORDERED_FOR.get(self.writes_ordering, "unknown")
        return f"{self.name}, {len(self.visible)} visible, orders a network card's writes for: {ordered}"


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """Returns the facts of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    all_gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    index = device.index or 0
    return GpuFacts(
        name=all_gpus[index].name,
        uuid=str(all_gpus[index].uuid),
        visible=tuple(str(gpu.uuid) for gpu in all_gpus),
        writes_ordering=_driver_attribute(index, _WRITES_ORDERING),
    )


def _driver_attribute(index: int, attribute: int) -> int | None:
    """Returns an attribute of a GPU from CUDA's driver, which torch has initialised; None if the driver does
    not know it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
        return None
    return value.value
