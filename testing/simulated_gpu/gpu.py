"""The simulated GPU, in the place of ``torch.cuda`` and of the functions that make tensors."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from testing.simulated_gpu.captured_operators import reason_to_refuse
from testing.simulated_gpu.device_tensor import DeviceTensor, arguments_of_to, leaves, mapped, plain
from testing.simulated_gpu.graphs import Graph, HeldMemory, poison
from testing.simulated_gpu.kernels import Launch, queued_kernels
from testing.simulated_gpu.shapes import Shapes, Spec
from testing.simulated_gpu.streams import AtOnce, Event, Pace, Stream, Streams
from testing.simulated_gpu.waits import reason_to_wait

MEMORY_BYTES = 80 << 30
MULTIPROCESSORS = 132
PACKAGES = ("engine", "kernels", "kv_transfer")
"""Packages whose waits are reported, by the place in their files."""


class SimulatedGpu:
    """One device. ``with`` puts it in the place of CUDA on this thread."""

    device = torch.device("cuda", 0)

    def __init__(self, pace: Pace | None = None, *, memory: str = "cpu") -> None:
        """Tensors lie in ``memory``: on the CPU, or on torch's meta device, which has none.

        On the meta device, operators are noted and never computed, so a model may have any size. The host
        then reads 1 from every result: each row gains one token, with id 1.
        """
        self.streams = Streams(pace or AtOnce())
        self.held = HeldMemory()
        """Memory of all tensors that were made."""
        self._memory = memory
        self.waits: Counter[str] = Counter()
        """Why and where the host waited for the device while it was watched, with the number of times."""
        self.launches: Counter[str] = Counter()
        """What was launched on the device: torch's operators and kernels, by name."""
        self.on_launch: Callable[[Launch], None] | None = None
        self.graphs: list[Graph] = []
        self._shapes = Shapes()
        self._pinned: list[torch.UntypedStorage] = []
        self._registered: list[range] = []
        """Addresses of memory that was pinned where it was."""
        self._capturing: Graph | None = None
        self._replayed: Graph | None = None
        self._watches = False
        self._state = threading.local()
        self._contexts = ExitStack()

    # --- the host's side -------------------------------------------------------------------------

    def __enter__(self) -> SimulatedGpu:
        for name, value in self._in_place_of_cuda().items():
            self._contexts.enter_context(patch.object(torch.cuda, name, value))
        self._contexts.enter_context(queued_kernels(self))
        self._contexts.enter_context(_Factories(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.close()

    def _in_place_of_cuda(self) -> dict[str, Any]:
        properties = SimpleNamespace(
            multi_processor_count=MULTIPROCESSORS, name="simulated", major=9, minor=0
        )
        return {
            "Stream": self.streams.make,
            "Event": lambda **options: Event(self.streams),
            "CUDAGraph": lambda: Graph(self._replay),
            "current_stream": lambda device=None: self.streams.current,
            "stream": self._use_stream,
            "graph": self._capture,
            "synchronize": lambda device=None: self._wait("synchronize"),
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
            "set_device": lambda device: None,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: "simulated",
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self._unregister
            ),
            "check_error": lambda code: None,
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the waits of what is called in this context in :attr:`waits`."""
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    def _wait(self, reason: str) -> None:
        """The host waits until the device has done everything."""
        if self._capturing is not None:
            raise RuntimeError(f"not permitted while a graph is captured: {reason}")
        if self._watches:
            self.waits[f"{_caller()}: {reason}"] += 1
        if not self.is_dry:
            self.streams.synchronize()

    @contextmanager
    def _use_stream(self, stream: Stream) -> Iterator[None]:
        before = self.streams.use(stream)
        try:
            yield
        finally:
            self.streams.use(before)

    @contextmanager
    def _capture(self, graph: Graph, pool: Any = None, **options: Any) -> Iterator[None]:
        self.streams.synchronize()
        self._capturing = graph
        self.graphs.append(graph)
        try:
            yield
        finally:
            self._capturing = None

    def _replay(self, graph: Graph) -> None:
        def run() -> None:
            if self._replayed is not None and self._replayed is not graph:
                self._replayed.spoil()
            self._replayed = graph
            graph.run()

        self.queue(run)

    # --- the device's side -----------------------------------------------------------------------

    @property
    def is_executing(self) -> bool:
        """Whether this thread runs a queued operation."""
        return getattr(self._state, "executing", False)

    @property
    def is_dry(self) -> bool:
        """Whether operators make their results without computing them."""
        return self._memory == "meta" or getattr(self._state, "dry", False)

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        self._state.dry = True
        try:
            yield
        finally:
            self._state.dry = False

    def queue(self, run: Callable[[], None]) -> None:
        """Queue an operation on the current stream, or in the graph that is being captured."""
        if self._memory == "meta":
            return

        def operation() -> None:
            self._state.executing = True
            try:
                with torch.inference_mode(), torch._C.DisableTorchFunction():
                    run()
            finally:
                self._state.executing = False

        if self._capturing is not None:
            self._capturing.operations.append(operation)
            return
        self.streams.current.queue(operation)
        self.streams.progress()

    def launched(self, launch: Launch) -> None:
        """Note the launch of a Triton kernel."""
        self._note(launch.kernel.fn.__name__, _tensors_of((launch.args, launch.kwargs)))
        if self.on_launch is not None:
            self.on_launch(launch)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on the device's tensors, or queue it. Views are made at once."""
        if self.is_executing:
            return func(*plain(args), **plain(kwargs))
        name = func._schema.name.split("::")[1]
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if reason := reason_to_wait(name, args, kwargs, lambda one: isinstance(one, DeviceTensor)):
            self._wait(f"{name}: {reason}")
            if "in host memory" not in reason:  # the result needs values: compute it now
                return mapped(self._wrapped, func(*plain(args), **plain(kwargs)))
        if func.is_view or name in ("detach", "lift_fresh"):
            made = func(*plain(args), **plain(kwargs))
            if all(map(partial(_is_view, of=args[0].plain), leaves(made))):  # `to` and `reshape` may copy
                return mapped(partial(self._wrapped, base=args[0]), made)
        return self._queue_operator(func, name, args, kwargs)

    def _queue_operator(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _written(func, args, kwargs)
        results = written
        if written is None:
            results = mapped(self._made, self._shapes.result(func, args, kwargs))
        if not self.is_dry or name not in ("empty", "empty_like", "empty_strided", "new_empty"):
            self._note_operator(name, (args, kwargs, () if results is written else results))
        if self.is_dry or name.startswith(("empty", "new_empty")):
            return results
        held_args, held_kwargs = plain(args), plain(kwargs)
        places = [] if written is not None else [one.plain for one in leaves(results)]

        def run() -> None:
            computed = leaves(func(*held_args, **held_kwargs))
            for place, one in zip(places, computed, strict=False):
                place.copy_(one)

        self.queue(run)
        return results

    def _made(self, spec: Any) -> Any:
        """Allocate memory on the device; nobody has written to it."""
        return self.allocated(spec.on(self._memory)) if isinstance(spec, Spec) else spec

    def memory_for(self, factory: str) -> str:
        """Return where a factory of torch makes its values: those of ``tensor`` are on the host at first."""
        return "cpu" if factory in ("tensor", "as_tensor") else self._memory

    def allocated(self, memory: Tensor) -> DeviceTensor:
        poison(memory)
        tensor = DeviceTensor.wrap(memory, self)
        self.held.add(tensor)
        if self._capturing is not None:
            self._capturing.made(tensor)
        return tensor

    def _wrapped(self, value: Any, base: Tensor | None = None) -> Any:
        return DeviceTensor.wrap(value, self, base) if type(value) is Tensor else value

    def _note_operator(self, name: str, operands: Any) -> None:
        """Note the launch of a torch operator, and refuse it where it may not be captured."""
        tensors = _tensors_of(operands)
        if self._capturing is not None and (reason := reason_to_refuse(name, tensors)):
            raise RuntimeError(f"{reason}, in {_caller()}")
        self._note(name, tensors)

    def _note(self, name: str, operands: list[Tensor]) -> None:
        self.launches[name] += 1
        if self._capturing is not None:
            self._capturing.launched.append((name, operands))

    # --- copies ----------------------------------------------------------------------------------

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        host = next((one for one in (target, source) if not isinstance(one, DeviceTensor)), None)
        if host is source and source.is_meta:  # a number that is assigned to a slice: torch fills the slice
            self._note_operator("fill_", target)
            return target
        into, out_of = plain((target, source))
        if host is not None and not (non_blocking and self.is_pinned(host)):
            self._wait("copy_: between the device and memory of the host that is not pinned, or blocking")
            out_of = out_of.clone()
        elif host is target and not self._is_registered(host) and (self._memory == "meta" or not self.is_dry):
            poison(into)  # the host must not read before the copy has run
        self._note_operator("copy_", (target, source))
        if not self.is_dry:
            self.queue(lambda: into.copy_(out_of))
            if host is target and not (non_blocking and self.is_pinned(host)):
                self.streams.synchronize()
        return target

    def to_host(self, tensor: Tensor, *, non_blocking: bool) -> Tensor:
        # Memory for the result is not pinned, so torch waits even if it was asked not to.
        return self._copy(torch.empty(tensor.shape, dtype=tensor.dtype), tensor, non_blocking)

    def to_device(self, tensor: Tensor, *, non_blocking: bool) -> Tensor:
        spec = Spec.of(tensor)
        target = self.allocated(spec.on(self._memory))
        return self._copy(target, tensor, non_blocking)

    def pin(self, tensor: Tensor) -> Tensor:
        """Note that this host memory is pinned."""
        self._pinned = [one for one in self._pinned if torch._C._storage_Use_Count(one._cdata) > 1]
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        if any(address < one.stop and one.start < address + num_bytes for one in self._registered):
            raise RuntimeError("part or all of the requested memory range is already mapped")
        self._registered.append(range(address, address + num_bytes))
        return 0

    def _unregister(self, address: int) -> int:
        self._registered = [one for one in self._registered if one.start != address]
        return 0

    def _is_registered(self, tensor: Tensor) -> bool:
        """Whether the host never reads the memory itself: copies that are still queued may read it."""
        return any(tensor.data_ptr() in one for one in self._registered)

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        if self._is_registered(tensor):
            return True
        return tensor.numel() == 0 or any(
            one.data_ptr() <= address < one.data_ptr() + one.nbytes() for one in self._pinned
        )


class _Factories(TorchFunctionMode):
    """Makes tensors on the simulated device where torch is asked for a tensor on its GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self._gpu
        if gpu.is_executing:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("to", "cuda") and func is getattr(Tensor, name, None):
            device, dtype, non_blocking, _ = arguments_of_to(*args[1:], **kwargs)
            if name == "cuda" or (device is not None and device.type == "cuda"):
                moved = args[0] if dtype is None else args[0].to(dtype)
                return gpu.to_device(moved, non_blocking=non_blocking)
        if name == "pin_memory":
            return gpu.pin(args[0].clone())
        if name == "is_pinned":
            return gpu.is_pinned(args[0])
        if kwargs.pop("pin_memory", False):
            return gpu.pin(func(*args, **kwargs))
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        made = func(*args, **(kwargs | {"device": gpu.memory_for(name)}))
        if isinstance(made, DeviceTensor):  # like another tensor of the device
            return made
        if name in ("tensor", "as_tensor"):
            return gpu.to_device(made, non_blocking=False)
        tensor = gpu.allocated(torch.empty_like(made))
        if name != "empty":
            gpu._note_operator(name, tensor)
        if name != "empty" and not gpu.is_dry:
            gpu.queue(lambda: tensor.plain.copy_(made))
        return tensor


def _tensors_of(tree: Any) -> list[Tensor]:
    return [one for one in leaves(plain(tree)) if isinstance(one, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator that writes to its arguments returns; None if it writes to none."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[i] if i < len(args) else kwargs[argument.name])
    if not written:
        return None
    return written[0] if len(func._schema.returns) <= 1 else tuple(written)


def _is_view(tensor: Tensor, of: Tensor) -> bool:
    return tensor.numel() == 0 or tensor.untyped_storage()._cdata == of.untyped_storage()._cdata


def _caller() -> str:
    """Return where the product called torch: the innermost frame of its packages."""
    for frame in reversed(traceback.extract_stack()):
        for package in PACKAGES:
            _, is_inside, path = frame.filename.partition(f"/{package}/")
            if is_inside and "/testing/" not in frame.filename and "/site-packages/" not in frame.filename:
                return f"{package}/{path} {frame.name}"
    return "?"
