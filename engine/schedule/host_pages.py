"""Pages of host memory with copies of blocks and states, and the copies themselves.

On a GPU the pages are pinned and every copy is put into the device's queue, in the order of the plans: a
demotion is copied before a later step writes to the memory that it leaves, and a promotion before the step
that reads it. Nothing waits on the host. There blocks are gathered first, since many small copies are slow.

On a CPU one call copies all blocks and states of a plan in one direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.files.start_files import HostBytes
from engine.memory.async_copy import pinned_memory
from engine.memory.cached_start import HostCopy
from engine.memory.caches import Caches
from engine.memory.host_tier import HostMemory
from kernels.cpu.page_copies import copy_pages

PIECE_BYTES = 32 << 20
"""Blocks are gathered on the device in pieces of this size at most, which the steps' memory has room for."""


class HostPages:
    """One rank's pages. :class:`engine.memory.host_tier.HostTier` decides what they hold."""

    def __init__(self, caches: Caches, memory: HostMemory) -> None:
        self._caches = caches
        self._page_bytes = memory.page_bytes
        self._bytes = pinned_memory(memory.num_bytes, caches.device, "host_cache_bytes")
        self.memory: HostBytes = self._bytes.numpy().reshape(-1, max(1, self._page_bytes))
        """All pages, as files and other servers fill them."""
        self._on_cpu: _CpuCopies | None = None
        if caches.device.type == "cpu" and memory.num_pages:
            self._on_cpu = _CpuCopies(caches, self._bytes, memory)

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes, as NIXL registers them."""
        return self._bytes

    def settled(self) -> Callable[[], None]:
        """Returns a function that waits until the device has made all copies that were asked of it so far."""
        if self._caches.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._caches.device))
        return event.synchronize

    def save(self, demoted: Sequence[HostCopy]) -> None:
        """Copies blocks and states out of the pools, before others are written there."""
        if self._on_cpu is not None:
            self._on_cpu.save(demoted)
            return
        for copy in demoted:
            for block_ids, pages in self._pieces(copy):
                blocks = self._caches.read_blocks(block_ids).view(-1).view(torch.uint8)
                self._write(pages, blocks)
            if copy.state_pages:
                self._write(copy.state_pages, self._caches.state[copy.slot])

    def restore(self, promoted: Sequence[HostCopy]) -> None:
        """Copies blocks and states back into the pools, before a step reads them."""
        if self._on_cpu is not None:
            self._on_cpu.restore(promoted)
            return
        for copy in promoted:
            for block_ids, pages in self._pieces(copy):
                num_bytes = len(block_ids) * self._page_bytes
                blocks = torch.empty(num_bytes, dtype=torch.uint8, device=self._caches.device)
                self._read(pages, blocks)
                self._caches.write_blocks(block_ids, blocks)
            if copy.state_pages:
                self._read(copy.state_pages, self._caches.state[copy.slot])

    def _pieces(self, copy: HostCopy) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yields blocks and their pages, as many at a time as a piece holds."""
        size = max(1, PIECE_BYTES // max(1, self._page_bytes))
        for start in range(0, len(copy.block_ids), size):
            yield copy.block_ids[start : start + size], copy.block_pages[start : start + size]

    def _write(self, pages: Sequence[int], source: torch.Tensor) -> None:
        for page_bytes, source_bytes in self._runs(pages, source):
            page_bytes.copy_(source_bytes, non_blocking=True)

    def _read(self, pages: Sequence[int], target: torch.Tensor) -> None:
        for page_bytes, target_bytes in self._runs(pages, target):
            target_bytes.copy_(page_bytes, non_blocking=True)

    def _runs(
        self, pages: Sequence[int], memory: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each run of adjacent pages: its bytes in host memory and in ``memory``, which holds all
        pages one after the other. The last one may be cut short."""
        size, first, num_bytes = self._page_bytes, 0, memory.numel()
        for index in range(1, len(pages) + 1):
            if index < len(pages) and pages[index] - pages[index - 1] == 1:
                continue
            begin, end = first * size, min(index * size, num_bytes)
            page = (pages[first] - 1) * size  # page 0 is the null page
            yield self._bytes[page : page + end - begin], memory[begin:end]
            first = index


class _CpuCopies:
    """The copies on a CPU, between pages and pools that both lie in this process's memory."""

    def __init__(self, caches: Caches, pages: torch.Tensor, memory: HostMemory) -> None:
        page_bytes, num_state_pages = memory.page_bytes, memory.state_pages
        num_slots, slot_bytes = caches.state.shape
        num_blocks = caches.kv.nbytes // page_bytes if memory.has_kv else 0
        self._num_blocks, self._num_state_pages = num_blocks, num_state_pages
        in_slot = page_bytes * np.arange(num_state_pages)
        states_at = caches.state.data_ptr() + slot_bytes * np.arange(num_slots)[:, None] + in_slot
        blocks_at = caches.kv.data_ptr() + page_bytes * np.arange(num_blocks)
        of_states = _places(states_at.reshape(-1), np.tile(slot_bytes - in_slot, num_slots))
        self._parts = np.concatenate((_places(blocks_at, page_bytes), of_states), axis=1)
        """The parts of the pools that have a page each: all blocks, and then those of each slot's state."""
        before_pages = pages.data_ptr() - page_bytes  # page 0 is the null page
        self._pages = _places(before_pages + page_bytes * np.arange(1 + memory.num_pages), page_bytes)
        copy_pages(self._pages, [], self._parts, [])  # so that no step has to compile it

    def save(self, demoted: Sequence[HostCopy]) -> None:
        if demoted:
            pages, parts = self._both_ends(demoted)
            copy_pages(self._pages, pages, self._parts, parts)

    def restore(self, promoted: Sequence[HostCopy]) -> None:
        if promoted:
            pages, parts = self._both_ends(promoted)
            copy_pages(self._parts, parts, self._pages, pages)

    def _both_ends(self, copies: Sequence[HostCopy]) -> tuple[list[int], list[int]]:
        """Returns the pages of these copies, and the part of the pools that belongs to each."""
        pages: list[int] = []
        parts: list[int] = []
        for copy in copies:
            pages += copy.block_pages
            parts += copy.block_ids
            if copy.state_pages:
                first = self._num_blocks + copy.slot * self._num_state_pages
                pages += copy.state_pages
                parts += range(first, first + self._num_state_pages)
        return pages, parts


def _places(addresses: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Returns places as :func:`kernels.cpu.page_copies.copy_pages` takes them: ``[2, n]``."""
    return np.stack((addresses, np.broadcast_to(lengths, addresses.shape)))
