"""Pages of host memory with copies of blocks and states, and the copies themselves.

On a GPU the pages are pinned and every copy is put into the device's queue, in the order of the plans: a
demotion is copied before a later step writes to the memory that it leaves, and a promotion before the step
that reads it. Nothing waits on the host. There blocks are gathered first, since many small copies are slow.

On a CPU each run of blocks is copied by itself: a block is large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from engine.files.start_files import HostBytes
from engine.memory.async_copy import pinned_memory
from engine.memory.cached_start import HostCopy
from engine.memory.caches import Caches
from engine.memory.host_tier import HostMemory

PIECE_BYTES = 32 << 20
"""Blocks are gathered on the device in pieces of this size at most, which the steps' memory has room for."""


class HostPages:
    """One rank's pages. :class:`engine.memory.host_tier.HostTier` decides what they hold."""

    def __init__(self, caches: Caches, memory: HostMemory) -> None:
        self._caches = caches
        self._page_bytes = memory.page_bytes
        self._bytes = pinned_memory(memory.num_bytes, caches.device, "host_cache_bytes")
        self._blocks = caches.kv.view(-1).view(torch.uint8) if caches.device.type == "cpu" else None
        """All blocks, if copies between them and the pages need not be gathered first."""

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes, as NIXL registers them."""
        return self._bytes

    @property
    def memory(self) -> HostBytes:
        """All pages, as files and other servers fill them."""
        return self._bytes.numpy().reshape(-1, self._page_bytes)

    def settled(self) -> Callable[[], None]:
        """Returns a function that waits until the device has made all copies that were asked of it so far."""
        if self._caches.device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._caches.device))
        return event.synchronize

    def save(self, demoted: Iterable[HostCopy]) -> None:
        """Copies blocks and states out of the pools, before others are written there."""
        for copy in demoted:
            for block_ids, pages in self._pieces(copy):
                if self._blocks is None:
                    blocks = self._caches.read_blocks(block_ids).view(-1).view(torch.uint8)
                    self._write(pages, range(len(pages)), blocks)
                else:
                    self._write(pages, block_ids, self._blocks)
            if copy.state_pages:
                self._write(copy.state_pages, range(len(copy.state_pages)), self._caches.state[copy.slot])

    def restore(self, promoted: Iterable[HostCopy]) -> None:
        """Copies blocks and states back into the pools, before a step reads them."""
        for copy in promoted:
            for block_ids, pages in self._pieces(copy):
                if self._blocks is None:
                    num_bytes = len(block_ids) * self._page_bytes
                    blocks = torch.empty(num_bytes, dtype=torch.uint8, device=self._caches.device)
                    self._read(pages, range(len(pages)), blocks)
                    self._caches.write_blocks(block_ids, blocks)
                else:
                    self._read(pages, block_ids, self._blocks)
            if copy.state_pages:
                self._read(copy.state_pages, range(len(copy.state_pages)), self._caches.state[copy.slot])

    def _pieces(self, copy: HostCopy) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yields blocks and their pages, as many at a time as a piece holds."""
        size = max(1, PIECE_BYTES // max(1, self._page_bytes))
        for start in range(0, len(copy.block_ids), size):
            yield copy.block_ids[start : start + size], copy.block_pages[start : start + size]

    def _write(self, pages: Sequence[int], places: Sequence[int], source: torch.Tensor) -> None:
        for page_bytes, source_bytes in self._runs(pages, places, source):
            page_bytes.copy_(source_bytes, non_blocking=True)

    def _read(self, pages: Sequence[int], places: Sequence[int], target: torch.Tensor) -> None:
        for page_bytes, target_bytes in self._runs(pages, places, target):
            target_bytes.copy_(page_bytes, non_blocking=True)

    def _runs(
        self, pages: Sequence[int], places: Sequence[int], memory: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each run of pages that are adjacent in host memory and in ``memory``: its bytes in both.

        ``places`` are those of the pages in ``memory``, counted in pages. The last one may be cut short.
        """
        size, first, num_bytes = self._page_bytes, 0, memory.numel()
        for index in range(1, len(pages) + 1):
            if index < len(pages) and (
                pages[index] - pages[index - 1] == places[index] - places[index - 1] == 1
            ):
                continue
            begin, end = places[first] * size, min((places[index - 1] + 1) * size, num_bytes)
            page = (pages[first] - 1) * size  # page 0 is the null page
            yield self._bytes[page : page + end - begin], memory[begin:end]
            first = index
