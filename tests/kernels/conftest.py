"""What the kernel tests share: the device under test and poisoned state pools.

Triton kernels run compiled where there is CUDA, else in Triton's interpreter (tests/conftest.py asks for it),
which checks what a GPU would punish (testing/kernels/hardened).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from testing.kernels.target import Target


@pytest.fixture(autouse=True)
def checked_launches() -> Iterator[None]:
    """Check every launch that is interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from testing.kernels.hardened.interpreter import hardened

    with hardened():
        yield


@pytest.fixture(params=["cpu", "triton"])
def target(request: pytest.FixtureRequest) -> Target:
    """The CPU path, then the Triton kernel."""
    on_gpu = request.param == "triton" and torch.cuda.is_available()
    return Target(request.param, "cuda" if on_gpu else "cpu")


@dataclass(frozen=True)
class PoisonedPool:
    """One layer's states in a slot-major pool of bytes. All bytes not written by a test belong to NaNs."""

    bytes: torch.Tensor  # uint8 [num_slots, slot_bytes]
    view: torch.Tensor  # [num_slots, *shape], strided

    def fill(self, slots: list[int], seed: int = 0) -> None:
        """Give these slots random states."""
        generator = torch.Generator().manual_seed(seed)
        for slot in slots:
            state = torch.randn(self.view.shape[1:], generator=generator)
            self.view[slot] = state.to(self.view.dtype).to(self.view.device)

    def assert_same_outside(self, before: torch.Tensor, slots: list[int]) -> None:
        """No byte changed since ``before = pool.bytes.clone()`` but for this layer's in these slots."""
        changed = (self.bytes != before).cpu()
        offset = self.view.storage_offset() * self.view.element_size()
        size = self.view[0].numel() * self.view.element_size()
        changed[slots, offset : offset + size] = False
        assert not changed.any(), f"bytes changed outside the written slots: {changed.nonzero()[:8].tolist()}"


@pytest.fixture
def poisoned_pool() -> Callable[..., PoisonedPool]:
    """Make a pool ``[num_slots, bytes]`` with other layers' states around the tested layer's."""

    def make(
        num_slots: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> PoisonedPool:
        itemsize = torch.empty((), dtype=dtype).element_size()
        before, size, after = 16 * 5, torch.Size(shape).numel() * itemsize, 16 * 3
        slot_bytes = (before + size + after + 15) // 16 * 16
        # All bits set is a NaN in float16, bfloat16, float32 and float64.
        pool = torch.full((num_slots, slot_bytes), 0xFF, dtype=torch.uint8, device=device)
        strides = torch.empty(shape, device="meta").stride()
        view = pool.view(dtype).as_strided(
            (num_slots, *shape), (slot_bytes // itemsize, *strides), before // itemsize
        )
        return PoisonedPool(pool, view)

    return make
