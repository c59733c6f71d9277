"""Starts that the prefix cache has given up and that host memory still has. It uses no tensors.

    prefix cache (device) ── demote ──▶ host memory ── promote ──▶ prefix cache (device)

Host memory is divided into pages. A page holds one block, and a state takes as many pages as it needs. Each
start has its state *and* all blocks that lead to it in host memory. So it can serve a request whatever the
device still has. Starts share blocks: the index is a tree with the keys of the prefix cache.

A start comes when the device gives it up. It goes when its pages are needed and it was used least recently.
A start that was promoted keeps its pages: giving it up once more copies nothing.

This class only decides. There is no clock and no I/O in it, so ranks with equal requests keep the same starts
in the same pages. The copies go into the plan of a step (:class:`HostCopies`), and every rank makes them with
its own share of the bytes (:mod:`engine.schedule.host_pages`). Within one plan all demotions come before all
promotions. That is why a start that a plan moves can't be given up by the same plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.memory.cached_start import CachedBlock, Match, Place
from engine.memory.index_pool import NULL_INDEX, IndexPool
from telemetry.engine_metrics import HostCacheFigures
from wire.errors import ConfigError

STEP_BYTES = 256 << 20
"""Bytes that one step may demote, so that a burst of evictions does not delay a step: 10 ms over PCIe 4. A
single start may be larger."""


@dataclass(frozen=True)
class HostCopy:
    """Blocks and a state to copy between the pools and host memory, in one direction."""

    block_ids: tuple[int, ...]
    block_pages: tuple[int, ...]
    """The page of each block."""
    slot: int = NULL_INDEX
    state_pages: tuple[int, ...] = ()
    """Pages of the slot's bytes, in order; empty: no state is copied."""


@dataclass(frozen=True)
class HostCopies:
    """The copies of one step. All demotions come before all promotions."""

    demoted: tuple[HostCopy, ...] = ()
    promoted: tuple[HostCopy, ...] = ()


NO_COPIES = HostCopies()


@dataclass(frozen=True)
class HostMemory:
    """Host memory of one rank, in pages."""

    num_pages: int
    page_bytes: int
    state_pages: int
    """Pages of a state; 0 if the model has no states."""
    has_kv: bool = True

    @classmethod
    def within(cls, num_bytes: int, *, block_bytes: int, slot_bytes: int) -> HostMemory:
        """Divides a budget into pages. 0 bytes: there is no host memory.

        Raises :class:`ConfigError` if the budget holds no start.
        """
        page_bytes = block_bytes or slot_bytes
        memory = cls(num_bytes // page_bytes, page_bytes, -(-slot_bytes // page_bytes), block_bytes > 0)
        least = memory.state_pages + int(memory.has_kv)
        if 0 < num_bytes < least * page_bytes:
            raise ConfigError(
                f"`host_cache_bytes` {num_bytes} holds no cached prefix: a block and a state take "
                f"{least * page_bytes} bytes; raise it, or leave it out"
            )
        return memory

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


NO_HOST_MEMORY = HostMemory(0, 0, 0)


@dataclass(eq=False, slots=True)
class HostBlock:
    """A block in host memory, and the start at its end if there is one."""

    key: bytes
    parent: HostBlock | None
    num_blocks: int
    """Number of blocks from the prompt's start to the end of this block."""
    page: int
    """Null if the model has no KV."""
    is_start: bool = False
    state_pages: tuple[int, ...] = ()
    place: Place = Place.INNER
    num_children: int = 0
    moved_in: int = 0
    """Number of the last plan that moves the start."""


class HostTier:
    """Owns the pages of host memory. Without pages it keeps nothing.

    ``pays(start, end, num_blocks)`` says whether copying ``num_blocks`` blocks and a state to the device is
    cheaper than computing the blocks from ``start`` to ``end``.
    """

    def __init__(
        self,
        memory: HostMemory = NO_HOST_MEMORY,
        *,
        pays: Callable[[int, int, int], bool] = lambda start, end, num_blocks: True,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self.memory = memory
        self.figures = HostCacheFigures(size_bytes=memory.num_bytes)
        self._pays = pays
        self._step_bytes = step_bytes
        self._plan = 1
        self._forget()

    def _forget(self) -> None:
        self._pages = IndexPool(1 + self.memory.num_pages, "page of host memory")
        self._blocks: dict[bytes, HostBlock] = {}
        self._starts: OrderedDict[HostBlock, None] = OrderedDict()
        """All starts; those used least recently come first."""
        self._demoted: list[HostCopy] = []
        self._promoted: list[HostCopy] = []
        self._num_demoted_pages = 0
        self._num_dropped = 0

    def clear(self) -> None:
        """Gives up everything. Copies that no plan has taken yet are not made."""
        self._forget()
        self.figures.used_bytes = 0

    def take(self) -> HostCopies:
        """Returns the copies for the plan that is being made. The next plan begins."""
        self._plan += 1
        self.figures.dropped += self._num_dropped
        self._num_dropped = 0
        if not self._demoted and not self._promoted:
            return NO_COPIES
        copies = HostCopies(tuple(self._demoted), tuple(self._promoted))
        self._demoted, self._promoted, self._num_demoted_pages = [], [], 0
        self.figures.demoted += len(copies.demoted)
        self.figures.promoted += len(copies.promoted)
        self.figures.used_bytes = (self._pages.capacity - self._pages.num_free) * self.memory.page_bytes
        return copies

    # --- to the device ---------------------------------------------------------------------------

    def find(self, found: Match, most_blocks: int) -> HostBlock | None:
        """Returns the longest start of at most ``most_blocks`` blocks from which a request should go on.

        None if the device has one that is as long, or if copying does not pay. ``found`` is what the device
        has.
        """
        if not self._starts:
            return None
        for length in range(min(most_blocks, len(found.keys)), len(found.nodes), -1):
            block = self._blocks.get(found.keys[length - 1])
            if block is not None and (block.is_start or not self.memory.state_pages):
                num_missing = max(0, length - found.num_matched_blocks)
                return block if self._pays(len(found.nodes), length, num_missing) else None
        return None

    def hold(self, start: HostBlock) -> None:
        """Protects a start that is to be promoted from being given up by this plan."""
        start.is_start, start.moved_in = True, self._plan
        self._starts[start] = None
        self._starts.move_to_end(start)

    def promote(self, start: HostBlock, block_ids: Sequence[int], slot: int, num_tokens: int) -> None:
        """Lists the copies of a start's last ``len(block_ids)`` blocks, and of its state, to the device.

        The start is held. ``num_tokens`` is the number of tokens that need not be computed for that.
        """
        pages: list[int] = []
        block: HostBlock | None = start
        while block is not None and len(pages) < len(block_ids):
            pages.append(block.page)
            block = block.parent
        self._promoted.append(HostCopy(tuple(block_ids), tuple(reversed(pages)), slot, start.state_pages))
        self.figures.promoted_tokens += num_tokens

    def touch(self, key: bytes) -> None:
        """Notes that a request started here from the device's copy of the start, if host memory has one."""
        block = self._blocks.get(key)
        if block is not None and block.is_start:
            self._starts.move_to_end(block)

    # --- from the device -------------------------------------------------------------------------

    def demote(self, node: CachedBlock, slot: int = NULL_INDEX, place: Place = Place.INNER) -> None:
        """Keeps a start that the device gives up now, if there is room for it.

        The blocks that lead to the start are still on the device. ``slot`` holds its state.
        """
        if not self._pages.capacity:
            return
        known, path = self._missing(node)
        if known is not None and not path and known.is_start:
            self._starts.move_to_end(known)
            return
        num_pages = self.memory.state_pages + (len(path) if self.memory.has_kv else 0)
        if not self._make_room(node, known, num_pages):
            self._num_dropped += 1
            return
        pages = self._pages.allocate(num_pages)
        state_pages, block_pages = pages[: self.memory.state_pages], pages[self.memory.state_pages :]
        start = self._enter(path, known, block_pages)
        start.state_pages, start.place = tuple(state_pages), place
        self.hold(start)
        if pages:
            block_ids = [one.block_id for one in path] if self.memory.has_kv else []
            self._demoted.append(HostCopy(tuple(block_ids), tuple(block_pages), slot, start.state_pages))
            self._num_demoted_pages += num_pages

    def _missing(self, node: CachedBlock) -> tuple[HostBlock | None, list[CachedBlock]]:
        """Returns the last block on the way to ``node`` that host memory has, and the blocks behind it."""
        path: list[CachedBlock] = []
        before: CachedBlock | None = node
        while before is not None and before.key not in self._blocks:
            path.append(before)
            before = before.parent if self.memory.has_kv else None
        path.reverse()
        return (None if before is None else self._blocks[before.key]), path

    def _enter(self, path: Sequence[CachedBlock], known: HostBlock | None, pages: Sequence[int]) -> HostBlock:
        """Adds blocks behind ``known`` and returns the last one."""
        last = known
        for index, node in enumerate(path):
            page = pages[index] if pages else NULL_INDEX
            block = HostBlock(node.key, last, node.num_blocks, page)
            self._blocks[node.key] = block
            if last is not None:
                last.num_children += 1
            last = block
        assert last is not None, "a start has at least one block"
        return last

    def _make_room(self, node: CachedBlock, known: HostBlock | None, num_pages: int) -> bool:
        """Gives up starts until ``num_pages`` pages are free, but never the blocks up to ``known``.

        Returns whether there is room now, and whether the step may copy so much.
        """
        bytes_then = (self._num_demoted_pages + num_pages) * self.memory.page_bytes
        if num_pages and self._num_demoted_pages and bytes_then > self._step_bytes:
            return False
        if node.num_blocks * self.memory.has_kv + self.memory.state_pages > self._pages.capacity:
            return False
        if known is not None:
            known.num_children += 1
        while self._pages.num_free < num_pages:
            oldest = next(iter(self._starts), None)
            if oldest is None or oldest.moved_in == self._plan:
                break
            self._give_up(oldest)
        if known is not None:
            known.num_children -= 1
            if self._pages.num_free < num_pages:
                self._trim(known)
        return self._pages.num_free >= num_pages

    def _give_up(self, start: HostBlock) -> None:
        del self._starts[start]
        start.is_start = False
        self._pages.free(start.state_pages)
        start.state_pages = ()
        self._trim(start)

    def _trim(self, block: HostBlock | None) -> None:
        """Removes a block, and those before it, as long as they lead to no start."""
        while block is not None and not block.is_start and block.num_children == 0:
            del self._blocks[block.key]
            if block.page != NULL_INDEX:
                self._pages.free([block.page])
            block = block.parent
            if block is not None:
                block.num_children -= 1
