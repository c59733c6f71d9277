"""A pretended GPU. Ops are called with tensors that have no memory; launches are written down, not done.

The tensors are on torch's device "meta", and say that they are on a GPU. Triton itself specializes the
arguments, so a recorded program is the one that a launch on such a GPU would compile: types, constants, sizes
that are 1, sizes and addresses that are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ARCHITECTURES = {80: 108, 90: 132, 100: 148}
"""Compute capabilities, times ten, and the number of SMs of A100, H100 and B200."""


@dataclass(frozen=True)
class Program:
    """What Triton needs to compile one program, and the call that it was recorded from."""

    kernel: JITFunction
    target: GPUTarget
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    origin: str

    @property
    def name(self) -> str:
        """The kernel's name with its module's: ``ssd_chunk_scan._scan_rows_kernel``."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__}"

    @property
    def has_narrow_inputs(self) -> bool:
        """Whether products take 16 bits, for which tensor cores have instructions in every architecture."""
        return "*bf16" in self.signature.values()


@dataclass
class Recorder:
    """Stands for Triton's driver, and keeps each program once."""

    capability: int
    programs: dict[tuple[str, str], Program] = field(default_factory=dict)
    origin: str = ""
    """What the next programs are recorded from."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps its caches by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def keep(
        self, kernel: JITFunction, key: str, signature: Any, _device: Any, constants: Any, options: Any,
        attributes: Any, _warmup: Any,
    ) -> None:  # fmt: skip
        """Replaces Triton's ``_do_compile``. Returns None, which a launch takes as "nothing to run"."""
        program = Program(
            kernel,
            self.get_current_target(),
            signature,
            constants,
            attributes,
            dict(vars(options)),
            self.origin,
        )
        self.programs.setdefault((program.name, key), program)


class _Pointer:
    """A tensor as Triton's specialization sees it. Allocations of CUDA begin at multiples of 256 bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = 256 + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def pretended_gpu(capability: int) -> Iterator[Recorder]:
    """Records what is launched in the block, where tensors on the device "meta" count as a GPU's."""
    recorder = Recorder(capability)
    launch: Callable[..., Any] = JITFunction.run

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        pointers = [_Pointer(arg) if isinstance(arg, Tensor) else arg for arg in args]
        launch(kernel, *pointers, grid=grid, warmup=True, **kwargs)

    def keep(kernel: JITFunction, *args: Any) -> None:
        recorder.keep(kernel, *args)

    properties = SimpleNamespace(multi_processor_count=ARCHITECTURES[capability])
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (JITFunction, "run", record),
            (JITFunction, "_do_compile", keep),
            (torch.cuda, "get_device_capability", lambda _device=None: divmod(capability, 10)),
            (torch.cuda, "get_device_properties", lambda _device=None: properties),
            (driver, "_active", recorder),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        is_cuda = property(lambda tensor: tensor.is_meta)
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", is_cuda, create=True))
        yield recorder
