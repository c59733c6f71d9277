"""The addresses that a launch's programs load from and store to, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

NOBODY, SEVERAL = -1, -2
Offsets = NDArray[np.int64]


class AccessError(AssertionError):
    """A load or store that is wrong on a GPU, whatever the interpreter makes of it."""


@dataclass
class Access:
    """One load or store of the running program: an element for each lane, -1 where it is masked."""

    elements: Offsets

    def __post_init__(self) -> None:
        self.live = self.elements[self.elements >= 0]

    def needs_barrier(self, later: Access) -> bool:
        """Whether ``later`` touches an element of this access that another thread may have touched here.

        Lanes at the same place of equally shaped blocks are the same thread's if all lanes agree. All threads
        load a scalar, and one of them stores it.
        """
        if np.array_equal(self.elements, later.elements) and self.elements.size > 1:
            return False
        return bool(np.isin(later.live, self.live).any())


@dataclass
class Operand:
    """One operand's elements, and the programs that touched them."""

    name: str
    tensor: Tensor
    readers: NDArray[np.int32] | None
    """The program that loaded each element between the first and the last; None if there are too many."""
    writers: NDArray[np.int32] | None
    loads: list[Access] = field(default_factory=list)
    """Of the running program since its last barrier; so are the stores."""
    stores: list[Access] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, tensor: Tensor, *, is_tracked: bool) -> Operand:
        span = _span(tensor)
        if not is_tracked:
            return cls(name, tensor, None, None)
        return cls(name, tensor, np.full(span, NOBODY, np.int32), np.full(span, NOBODY, np.int32))

    def holds(self, address: int) -> bool:
        return 0 <= address - self.tensor.data_ptr() < _span(self.tensor) * self.tensor.element_size()

    def elements(self, addresses: NDArray[np.uint64]) -> tuple[Offsets, NDArray[np.bool_]]:
        """Returns the elements at these addresses, counted from its first, and whether they are its own."""
        distance = addresses.astype(np.int64) - self.tensor.data_ptr()
        offsets, remainder = np.divmod(distance, self.tensor.element_size())
        rest, is_inside = offsets, (remainder == 0) & (offsets >= 0)
        sizes = zip(self.tensor.stride(), self.tensor.shape, strict=True)
        for stride, size in sorted(sizes, reverse=True):
            if stride > 0:
                index, rest = np.divmod(rest, stride)
                is_inside &= index < size
        return offsets, is_inside & (rest == 0)


class AccessLog:
    """Checks every load and store of one launch, given its operands by name."""

    def __init__(self, operands: dict[str, tuple[Tensor, bool]]) -> None:
        """``operands`` are tensors, and whether the programs that touch their elements are tracked."""
        self.operands = [
            Operand.of(name, tensor, is_tracked=is_tracked)
            for name, (tensor, is_tracked) in operands.items()
            if tensor.numel() > 0
        ]
        self.written: set[str] = set()
        self.program = NOBODY

    def start_program(self, program: int) -> None:
        self.program = program
        self.pass_barrier()

    def pass_barrier(self) -> None:
        for operand in self.operands:
            operand.loads.clear()
            operand.stores.clear()

    def load(self, addresses: NDArray[np.uint64], mask: NDArray[np.bool_]) -> None:
        found = self._access(addresses, mask)
        if found is None:
            return
        operand, access = found
        if any(store.needs_barrier(access) for store in operand.stores):
            raise AccessError(
                f"{operand.name} is loaded where other threads stored, without a barrier between"
            )
        operand.loads.append(access)
        if operand.readers is None or operand.writers is None:
            return
        self._refuse_others(operand, operand.writers[access.live], "loads what program {} stores")
        before = operand.readers[access.live]
        is_first = (before == NOBODY) | (before == self.program)
        operand.readers[access.live] = np.where(is_first, self.program, SEVERAL)

    def store(self, addresses: NDArray[np.uint64], mask: NDArray[np.bool_]) -> None:
        found = self._access(addresses, mask)
        if found is None:
            return
        operand, access = found
        self.written.add(operand.name)
        if len(np.unique(access.live)) < len(access.live):
            raise AccessError(f"{operand.name}: several lanes store to one element")
        if any(earlier.needs_barrier(access) for earlier in (*operand.loads, *operand.stores)):
            raise AccessError(
                f"{operand.name} is stored where other threads loaded or stored, without a barrier"
            )
        operand.stores.append(access)
        if operand.readers is None or operand.writers is None:
            return
        self._refuse_others(operand, operand.writers[access.live], "stores what program {} stores")
        self._refuse_others(operand, operand.readers[access.live], "stores what program {} loads")
        operand.writers[access.live] = self.program

    def _access(
        self, addresses: NDArray[np.uint64], mask: NDArray[np.bool_]
    ) -> tuple[Operand, Access] | None:
        live = addresses[mask]
        if live.size == 0:
            return None
        wrong = f"address {live[0]} belongs to no operand"
        for operand in self.operands:  # several if they are views of one pool that was too large to copy
            if operand.holds(int(live[0])):
                offsets, is_own = operand.elements(live)
                if is_own.all():
                    elements = np.full(addresses.shape, -1, np.int64)
                    elements[mask] = offsets
                    return operand, Access(elements)
                wrong = f"{operand.name}: offsets {offsets[~is_own][:8].tolist()} are no elements of it"
        raise AccessError(wrong)

    def _refuse_others(self, operand: Operand, programs: NDArray[np.int32], what: str) -> None:
        others = programs[(programs != NOBODY) & (programs != self.program)]
        if others.size:
            which = "others" if others[0] == SEVERAL else others[0]
            raise AccessError(f"{operand.name}: program {self.program} {what.format(which)}")


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last one of a tensor that is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
