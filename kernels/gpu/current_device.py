"""The GPU that is current on a thread. CUDA keeps it, and the context of that GPU, for each thread."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Make a GPU current on the calling thread, with its context. Does nothing for a CPU.

    Call it first on every thread that launches kernels, captures graphs or calls NIXL. A new thread has GPU 0
    and no context. Its Triton kernels would be launched on GPU 0, wherever their tensors are, and UCX would
    not offer ``cuda_ipc`` to a peer that it meets on such a thread. ``torch.cuda.set_device`` binds the GPU's
    primary context to the thread, also if the GPU is number 0 (https://github.com/pytorch/pytorch/pull/155900).
    A device guard does not (https://github.com/pytorch/pytorch/issues/195256).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
