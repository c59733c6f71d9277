"""Recognises a GPU's faults among the exceptions of torch, Triton, cuBLAS and NCCL. Names each in one line.

| fault | how it shows | the process |
|---|---|---|
| out of memory while the engine is made | torch or CUDA: "out of memory" | refuses to start, with a remedy |
| out of memory later | the same | ends |
| a lost context: a kernel failed, memory is damaged, the GPU fell off the bus | "CUDA error: …" | ends |
| a step that does not end | nothing is raised; see :mod:`engine.watchdog` | ends |

Every later call to a lost context fails too, and only a new process gets a new context. After an
out-of-memory error the context is good. But a step that stopped halfway has written the new states of some
layers only, so no request of the step could continue from its state here; on another server it can.

Other errors of CUDA, such as an invalid argument, are bugs. They keep their traceback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from wire.errors import CapacityError, ConfigError, DeviceFaultError

log = logging.getLogger(__name__)

_SOURCE = re.compile(r"^(?:CUDA(?: driver| runtime)? error|Triton Error \[CUDA\]|NCCL error\b[^:]*): *", re.I)
"""How the errors of torch, Triton and NCCL begin."""
_LOST = (
    # cudaGetErrorString of the errors after which CUDA's documentation asks for a new process
    *("illegal memory access", "illegal instruction", "misaligned address", "invalid program counter"),
    *("operation not supported on global/shared address space", "hardware stack error"),
    *("unspecified launch failure", "launch timed out", "device-side assert triggered"),
    *("uncorrectable ecc error", "uncorrectable nvlink error", "invalid access of peer gpu memory"),
    *("context is destroyed", "invalid device context", "unknown error", "initialization error"),
    # the GPU fell off the bus, or its driver takes no more work
    *("no cuda-capable device is detected", "device(s) is/are busy or unavailable"),
    # what libraries report if the context is lost
    *("cublas_status_execution_failed", "cublas_status_internal_error", "cublas_status_mapping_error"),
    "unhandled cuda error",
)
_NO_GPU = ("no cuda gpus are available", "cuda driver initialization failed", "error from cudagetdevicecount")
"""What torch says when it finds no GPU that works."""
_OUT_OF_MEMORY = re.compile("out of memory|cublas_status_alloc_failed", re.I)
_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"of which ([\d.]+ \w+) is free")
_REMEDY = "lower `cache_memory_bytes`, `max_num_seqs` or `max_batch_tokens`"
_NO_DEVICE = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU."""


def device_fault(error: BaseException) -> DeviceFaultError | None:
    """Return the GPU's fault that ``error`` reports. None if ``error`` reports anything else."""
    if isinstance(error, DeviceFaultError):
        return error
    shortage = _shortage(error)
    if shortage is not None:
        return DeviceFaultError(f"the GPU ran out of memory while serving: {shortage}; {_REMEDY}")
    line = str(error).partition("\n")[0].strip()
    message = str(error).lower()
    is_lost = _SOURCE.match(line) is not None and any(text in message for text in _LOST)
    if not is_lost and not any(text in message for text in _NO_GPU):
        return None
    return DeviceFaultError(f"the GPU failed: {_SOURCE.sub('', line)}; the kernel's log may say why (Xid)")


def _shortage(error: BaseException) -> str | None:
    """Return what an out-of-memory error says about bytes; None for any other error."""
    message = str(error)
    is_device_error = isinstance(error, torch.OutOfMemoryError) or _SOURCE.match(message) is not None
    if not (is_device_error and _OUT_OF_MEMORY.search(message)):
        return None
    asked, free = _ASKED.search(message), _FREE.search(message)
    if asked is None or free is None:  # the driver or a library ran out of memory, and they name no bytes
        return message.partition("\n")[0].strip()
    return f"{asked[1]} were asked for and {free[1]} are free"


@contextlib.contextmanager
def start_faults() -> Iterator[None]:
    """Raise a GPU's fault that happens inside the block as an error of one line.

    Raises :class:`CapacityError` if the memory is too small: the same configuration would fail again. Raises
    :class:`DeviceFaultError`, which is logged here, if the GPU failed.
    """
    try:
        yield
    except RuntimeError as error:
        shortage = _shortage(error)
        if shortage is not None:
            log.debug("the engine could not be made", exc_info=True)
            raise CapacityError(
                f"the GPU's memory is too small to start: {shortage}; {_REMEDY}, divide the model with "
                "`tensor_parallel`, or end other processes on this GPU"
            ) from error
        if device_fault(error) is None:
            raise
        raise reported(error, "the engine's start") from error


def reported(error: BaseException, what: str) -> BaseException:
    """Log the error that ended ``what``, and return the error with which the process has to end.

    A fault of the GPU is one line, and its traceback is for level debug. Any other error is a bug.
    """
    fault = device_fault(error)
    if fault is None:
        log.error("%s failed", what, exc_info=error)
        return error
    log.critical("%s", fault.message)
    log.debug("%s failed", what, exc_info=error)
    if fault is not error:
        # The cause holds the frames of the failed step. Without it their tensors would be freed now, and that
        # calls the GPU.
        fault.__cause__ = error
    return fault


def check_device(device: torch.device) -> None:
    """Raise :class:`DeviceFaultError` if the GPU's context is lost. Waits for nothing; passes on a CPU.

    For failures that are usually somebody else's, such as a read that fails because its peer is gone.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as error:
        fault = device_fault(error)
        if fault is not None:
            raise fault from error


def default_device() -> str:
    """Return ``cuda`` if there is a GPU, else ``cpu``.

    Raises :class:`ConfigError` if there is a GPU that CUDA can't use. A server whose GPU has failed must not
    come back on the CPU, where it would be a thousand times slower.
    """
    if torch.cuda.is_available():
        return "cuda"
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if torch.version.cuda is None or not gpus or os.environ.get("CUDA_VISIBLE_DEVICES") in _NO_DEVICE:
        return "cpu"
    raise ConfigError(
        f"`device` auto: this machine has the GPU {gpus[0]}, and CUDA can't use it: the kernel's log may say "
        "why (Xid); repair it, or choose `device` cpu"
    )
