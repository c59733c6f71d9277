"""Finds threads that use the GPU before they make it current. Needs no GPU: the CPU stands in for GPU 3.

A thread uses the GPU when it calls a torch operation or NIXL. It makes the GPU current by
:func:`kernels.gpu.current_device.use_device`, which is real; only CUDA's own function beneath it is replaced.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kv_transfer.nixl.agent
from kernels.gpu import current_device

GPU = torch.device("cuda", 3)


class DeviceAudit:
    """Watches the threads that are started from now on, and the calling thread within :meth:`operations`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: set[str] = set()
        """Names of the threads that used the GPU."""
        self.faults: dict[str, str] = {}
        """By thread name: the first use of the GPU while it was not current."""
        self._thread = threading.local()
        patch.setattr(torch.cuda, "set_device", self._set_device)
        _replace_everywhere(patch, lambda _: current_device.use_device(GPU))
        make_agent = kv_transfer.nixl.agent.nixl_agent
        patch.setattr(kv_transfer.nixl.agent, "nixl_agent", lambda *args: _Agent(self, make_agent(*args)))
        run = threading.Thread.run

        def run_watched(thread: threading.Thread) -> None:
            with self.operations():
                run(thread)

        patch.setattr(threading.Thread, "run", run_watched)

    def operations(self) -> TorchDispatchMode:
        return _Operations(self)

    def use(self, what: str) -> None:
        name = threading.current_thread().name
        self.seen.add(name)
        if getattr(self._thread, "device", None) != GPU:
            self.faults.setdefault(name, what)

    def _set_device(self, device: torch.device) -> None:
        self._thread.device = device


def forget_to_use_device(patch: pytest.MonkeyPatch) -> None:
    """Takes the calls of ``use_device`` out of all modules, so that an audit must find every thread."""
    _replace_everywhere(patch, lambda _: None)


def _replace_everywhere(patch: pytest.MonkeyPatch, use: Callable[[torch.device], None]) -> None:
    real = current_device.use_device
    for module in list(sys.modules.values()):
        if module is not current_device and vars(module).get("use_device") is real:
            patch.setattr(module, "use_device", use)


class _Operations(TorchDispatchMode):
    def __init__(self, audit: DeviceAudit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._audit.use(str(func))
        return func(*args, **(kwargs or {}))


class _Agent:
    """NIXL's agent. Each call of it is a use of the GPU."""

    def __init__(self, audit: DeviceAudit, agent: Any) -> None:
        self._audit = audit
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        self._audit.use(f"NIXL's {name}")
        return getattr(self._agent, name)
