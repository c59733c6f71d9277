"""Copies between host and device that never wait for the device's queue.

A plain copy from pageable memory, and every ``.tolist()`` of a device tensor, waits until all steps
launched so far have run. The copies in this module use pinned memory and are put into the queue instead.
PyTorch's allocator reuses a pinned buffer only after the copies that use it have run.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.host_memory import host_empty
from wire.errors import CapacityError


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy the values to the device. The caller may change its array as soon as the function returns."""
    tensor = torch.from_numpy(np.array(values, order="C"))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """The copy of a tensor to the host; :meth:`wait` returns the copy.

    Kernels that are launched later may overwrite the tensor: on a GPU the queue runs the copy before them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self.host: torch.Tensor
        """The copy, which the host may read only after :meth:`wait`. Later work on the device may read it."""
        if tensor.device.type != "cuda":
            self.host = tensor.clone()
        else:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Return the tensor in host memory. Waits only for the copy and for everything launched before it."""
        if self._event is not None:
            self._event.synchronize()
        return self.host


def check_host_has(num_bytes: int, setting: str) -> None:
    """Raise :class:`CapacityError`, which names ``setting``, if the machine has less memory than that."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > installed:
        raise CapacityError(
            f"`{setting}` {num_bytes}: this machine has {installed / 2**30:.1f} GiB of memory; lower it"
        )


def pinned_memory(num_bytes: int, device: torch.device, setting: str) -> torch.Tensor:
    """Return bytes of host memory, pinned for copies if ``device`` is a GPU.

    They are pinned as long as somebody keeps this very tensor; views of it are not enough.

    PyTorch's own pinned buffers would round the size up to a power of 2. Raises :class:`CapacityError`, which
    names ``setting``, if the machine does not have the memory.
    """
    try:
        memory = host_empty(num_bytes, torch.uint8)
        if device.type == "cuda" and num_bytes:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
            # CUDA refuses to pin the address again, which the next engine's memory may have.
            weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
    except (MemoryError, RuntimeError) as error:
        refusal = f"`{setting}` {num_bytes}: the host can't give so much memory; lower it"
        raise CapacityError(refusal) from error
    return memory
