"""Which exceptions are faults of a GPU, and what is said of them. The messages are those of torch, Triton and
NCCL."""

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch

from engine import device_faults
from engine.device_faults import check_device, default_device, device_fault, reported, start_faults
from testing.fleets.injected import LOST_CONTEXT, NO_MEMORY
from wire.errors import CapacityError, ConfigError, DeviceFaultError, GroupLostError

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed."
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.AcceleratorError(LOST_CONTEXT), "the GPU failed: an illegal memory access was encountered; "),
        (RuntimeError("CUDA error: unspecified launch failure\nmore"), "unspecified launch failure;"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "uncorrectable ECC error"),
        (RuntimeError("CUDA error: unknown error"), "the GPU failed: unknown error;"),
        (
            RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
            "CUDA-capable device(s) is/are busy or unavailable",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
            "CUBLAS_STATUS_EXECUTION_FAILED when calling",
        ),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), "the GPU failed: misaligned address;"),
        (torch.distributed.DistBackendError(NCCL), "unhandled cuda error"),
        (RuntimeError("No CUDA GPUs are available"), "No CUDA GPUs are available"),
        (
            torch.OutOfMemoryError(NO_MEMORY),
            "memory while serving: 2.00 GiB were asked for and 1.50 GiB are free; lower `cache_memory_bytes`",
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "ran out of memory while serving: Triton Error"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "ran out of memory while serving",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_faults_of_a_gpu_are_named_in_one_line(error, said):
    fault = device_fault(error)
    assert said in fault.message
    assert "\n" not in fault.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: invalid argument"),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
        RuntimeError("shape '[2]' is invalid for input of size 3"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("an unknown error"),
        MemoryError("out of memory"),
        GroupLostError("rank 1 is gone"),
        KeyError("CUDA"),
    ],
    ids=str,
)
def test_bugs_and_other_errors_are_not_taken_for_faults_of_a_gpu(error, caplog):
    assert device_fault(error) is None
    assert reported(error, "the engine") is error
    assert caplog.records[-1].exc_info[1] is error


def test_a_fault_is_one_line_and_its_traceback_is_for_level_debug(caplog):
    caplog.set_level(logging.DEBUG)
    fault = reported(torch.AcceleratorError(LOST_CONTEXT), "the engine")
    assert isinstance(fault, DeviceFaultError)
    shown = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert [record.getMessage() for record in shown] == [fault.message]
    assert shown[0].exc_info is None
    assert any(record.exc_info for record in caplog.records)


def test_tensors_of_the_failed_step_live_as_long_as_the_fault():
    """To free them would call the GPU, which aborts the process or never answers."""

    def fail():
        tensor = torch.zeros(1)
        alive.append(weakref.ref(tensor))
        raise torch.AcceleratorError(LOST_CONTEXT)

    alive: list[weakref.ref[torch.Tensor]] = []
    try:
        fail()
    except RuntimeError as error:
        fault = reported(error, "the engine")
    gc.collect()
    assert alive[0]() is not None
    del fault
    gc.collect()
    assert alive[0]() is None


def test_a_start_that_lacks_memory_is_refused_with_the_settings_to_lower():
    with (
        pytest.raises(
            CapacityError, match=r"2.00 GiB were asked for and 1.50 GiB are free; lower.*`max_num"
        ) as why,
        start_faults(),
    ):
        raise torch.OutOfMemoryError(NO_MEMORY)
    assert "`tensor_parallel`" in why.value.message


def test_other_errors_of_a_start_pass_through():
    with pytest.raises(DeviceFaultError), start_faults():
        raise torch.AcceleratorError(LOST_CONTEXT)
    for error in (RuntimeError("a bug"), CapacityError("too small")):
        with pytest.raises(type(error)) as passed, start_faults():
            raise error
        assert passed.value is error


class Stream:
    """Answers a query as the stream of a GPU does."""

    def __init__(self, error=None):
        self.error = error

    def query(self):
        if self.error is not None:
            raise self.error
        return False


def test_a_gpu_is_asked_whether_its_context_is_lost(monkeypatch):
    gpu = torch.device("cuda", 0)
    streams = [Stream(), Stream(torch.AcceleratorError(LOST_CONTEXT))]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.pop(0))
    check_device(gpu)
    with pytest.raises(DeviceFaultError):
        check_device(gpu)
    check_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("gpus", "works", "built_with", "visible", "device"),
    [
        (["nvidia0"], True, "12.8", None, "cuda"),
        ([], False, "12.8", None, "cpu"),
        (["nvidiactl"], False, "12.8", None, "cpu"),
        (["nvidia0"], False, None, None, "cpu"),
        (["nvidia0"], False, "12.8", "", "cpu"),
        (["nvidia0"], False, "12.8", None, None),
        (["nvidia0"], False, "12.8", "0", None),
    ],
)
def test_a_gpu_that_does_not_work_is_not_replaced_by_the_cpu(
    gpus, works, built_with, visible, device, monkeypatch, tmp_path
):
    for name in gpus:
        (tmp_path / name).touch()
    monkeypatch.setattr(device_faults, "Path", lambda _folder: Path(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if device is not None:
        assert default_device() == device
        return
    with pytest.raises(ConfigError, match=r"`device` auto: this machine has the GPU .*nvidia0.*`device` cpu"):
        default_device()
