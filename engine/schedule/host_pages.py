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
from kernels.cpu.byte_ranges import copy_ranges

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
        self._caches = caches
        self._page_bytes, self._slot_bytes = memory.page_bytes, caches.state.shape[1]
        self._before_pages = pages.data_ptr() - self._page_bytes  # page 0 is the null page
        self._begins = np.arange(memory.state_pages) * self._page_bytes + caches.state.data_ptr()
        """Where the pages of slot 0 begin, if it has a state."""
        ends = range(self._page_bytes, (memory.state_pages + 1) * self._page_bytes, self._page_bytes)
        self._lengths = np.array([self._page_bytes - max(0, end - self._slot_bytes) for end in ends])
        copy_ranges(np.empty((3, 0), dtype=np.int64))  # so that no step has to compile it

    def save(self, demoted: Sequence[HostCopy]) -> None:
        if demoted:
            copy_ranges(self._ranges(demoted))

    def restore(self, promoted: Sequence[HostCopy]) -> None:
        if promoted:
            copy_ranges(self._ranges(promoted)[_TO_POOLS])

    def _ranges(self, copies: Sequence[HostCopy]) -> NDArray[np.int64]:
        """Returns where each block, and each page of a state, lies in host memory and in its pool, and its
        length: ``[3, n]``."""
        block_ids: list[int] = []
        pages: list[int] = []
        for copy in copies:
            block_ids += copy.block_ids
            pages += copy.block_pages
        for copy in copies:
            pages += copy.state_pages
        num_blocks, num_state_pages = len(block_ids), len(self._lengths)
        ranges = np.empty((3, len(pages)), dtype=np.int64)
        ranges[0] = pages
        ranges[0] *= self._page_bytes
        ranges[0] += self._before_pages
        ranges[1, :num_blocks] = block_ids
        ranges[1, :num_blocks] *= self._page_bytes
        ranges[1, :num_blocks] += self._caches.kv.data_ptr()
        ranges[2, :num_blocks] = self._page_bytes
        first = num_blocks
        for slot in (copy.slot for copy in copies if copy.state_pages):
            end = first + num_state_pages
            np.add(self._begins, slot * self._slot_bytes, out=ranges[1, first:end])
            ranges[2, first:end] = self._lengths
            first = end
        return ranges


_TO_POOLS = [1, 0, 2]
"""Turns ranges of copies to host memory into those of copies from it."""
