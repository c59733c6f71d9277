"""Starts that the prefix cache has given up and that host memory still has. It uses no tensors.

    prefix cache (device) ── demote ──▶ host memory ── promote ──▶ prefix cache (device)

Host memory is divided into pages. A page holds one block, and a state takes as many pages as it needs. Each
start has its state *and* all blocks that lead to it in host memory. So it can serve a request whatever the
device still has. Starts share blocks: the index is a tree with the keys of the prefix cache.

A start comes when the device gives it up. It goes when its pages are needed and it was used least recently.
A session's start goes before that, once a request of the session has started from a longer one.
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

from engine.memory.cached_start import (
    NO_COPIES,
    CachedBlock,
    HostBlock,
    HostCopies,
    HostCopy,
    Match,
    Place,
    Reservation,
)
from engine.memory.index_pool import NULL_INDEX, IndexPool
from engine.memory.prefix_journal import PrefixJournal, Tier
from telemetry.engine_metrics import HostCacheFigures
from wire.errors import ConfigError

STEP_BYTES = 256 << 20
"""Bytes that one step may demote, so that a burst of evictions does not delay a step: 10 ms over PCIe 4. A
single start may be larger."""


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

    def pages_of(self, num_blocks: int) -> int:
        """Returns the pages of a start that shares its blocks with no other."""
        return self.state_pages + num_blocks * self.has_kv


NO_HOST_MEMORY = HostMemory(0, 0, 0)


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
        journal: PrefixJournal | None = None,
    ) -> None:
        self.memory = memory
        self.journal = journal or PrefixJournal()
        """What routers learn of: the starts here, and those that the prefix cache notes there."""
        self.figures = HostCacheFigures(size_bytes=memory.num_bytes)
        self._pays = pays
        self._step_bytes = step_bytes
        self._plan = 1
        self.newcomers: list[HostBlock] = []
        """The starts that the last plan demotes."""
        self._arriving: list[HostBlock] = []
        self._pages = IndexPool(1 + memory.num_pages, "page of host memory")
        self._blocks: dict[bytes, HostBlock] = {}
        self._starts: OrderedDict[HostBlock, None] = OrderedDict()
        """All starts that may be given up; those used least recently come first."""
        self._retained: set[HostBlock] = set()
        """Starts that may not be given up."""
        self._forget_copies()

    def _forget_copies(self) -> None:
        self._demoted: list[HostCopy] = []
        self._promoted: list[HostCopy] = []
        self._num_demoted_pages = 0
        self._num_dropped = 0

    def clear(self) -> None:
        """Gives up everything but what is being written to files or is lent. Copies that no plan has taken
        yet are not made."""
        for start in [*self._retained]:
            self.let_go(start)
        for start in [start for start in self._starts if not start.is_pinned]:
            self._give_up(start)
        self._forget_copies()
        self._arriving = []
        self._count_used()

    def purge(self, covers: Callable[[str], bool]) -> int:
        """Gives up the starts whose cache salt ``covers`` holds for, between two plans, but what is retained
        or pinned. Returns their number."""
        purged = [one for one in self._starts if covers(one.salt) and not one.is_pinned]
        for start in purged:
            self._give_up(start)
        self._count_used()
        return len(purged)

    def _count_used(self) -> None:
        self.figures.used_bytes = (self._pages.capacity - self._pages.num_free) * self.memory.page_bytes

    @property
    def num_starts(self) -> int:
        return len(self._starts) + len(self._retained)

    def take(self) -> HostCopies:
        """Returns the copies for the plan that is being made. The next plan begins."""
        self._plan += 1
        self.figures.dropped += self._num_dropped
        self._num_dropped = 0
        self.newcomers, self._arriving = self._arriving, []
        if not self._demoted and not self._promoted:
            return NO_COPIES
        copies = HostCopies(tuple(self._demoted), tuple(self._promoted))
        self._demoted, self._promoted, self._num_demoted_pages = [], [], 0
        self.figures.demoted += len(copies.demoted)
        self.figures.promoted += len(copies.promoted)
        self._count_used()
        return copies

    # --- to the device ---------------------------------------------------------------------------

    def find(self, found: Match, most_blocks: int) -> HostBlock | None:
        """Returns the longest start of at most ``most_blocks`` blocks from which a request should go on.

        None if the device has one that is as long, or if copying does not pay. ``found`` is what the device
        has.
        """
        block = self.longest(found, most_blocks)
        if block is None:
            return None
        num_missing = max(0, block.num_blocks - found.num_matched_blocks)
        return block if self._pays(len(found.nodes), block.num_blocks, num_missing) else None

    def longest(self, found: Match, most_blocks: int) -> HostBlock | None:
        """Returns the longest start of at most ``most_blocks`` blocks if it is longer than the device's."""
        if not self._blocks:
            return None
        for length in range(min(most_blocks, len(found.keys)), len(found.nodes), -1):
            block = self._blocks.get(found.keys[length - 1])
            if block is not None and self._serves(block):
                return block
        return None

    def _serves(self, block: HostBlock) -> bool:
        """Whether a request can start at the end of a block. Without states, it can at every block."""
        return block.is_start or not self.memory.state_pages

    def hold(self, start: HostBlock) -> None:
        """Protects a start that is to be promoted from being given up by this plan."""
        if not self._serves(start):
            self.journal.add(start.key, Tier.HOST)
        start.is_start, start.moved_in = True, self._plan
        self._used(start)

    def _used(self, start: HostBlock) -> None:
        if start not in self._retained:
            self._starts[start] = None
            self._starts.move_to_end(start)

    def promote(
        self, start: HostBlock, block_ids: Sequence[int], slot: int, num_tokens: int, reader: str = ""
    ) -> None:
        """Lists the copies of a start's last ``len(block_ids)`` blocks, and of its state, to the device.

        The start is held. ``num_tokens`` is the number of tokens that need not be computed for that.
        ``reader`` is the id of the request that needs the start.
        """
        pages: list[int] = []
        block: HostBlock | None = start
        while block is not None and len(pages) < len(block_ids):
            pages.append(block.page)
            block = block.parent
        copy = HostCopy(tuple(block_ids), tuple(reversed(pages)), slot, start.state_pages, reader)
        self._promoted.append(copy)
        self.figures.promoted_tokens += num_tokens

    def touch(self, key: bytes) -> None:
        """Notes that a request started here from the device's copy of the start, if host memory has one."""
        block = self.start(key)
        if block is not None:
            self._used(block)

    def resumed(self, keys: Sequence[bytes], session: str) -> None:
        """Notes that a request of a session starts behind the blocks with these keys: the session's shorter
        starts go next."""
        last = self._blocks.get(keys[-1])
        if last is not None and last.session != session:
            last.session = ""
        for key in keys[:-1] if session and self._starts else ():
            self.outdate(key, session)

    def outdate(self, key: bytes, session: str) -> bool:
        """Lets a session's start go next, unless it is retained. Returns whether there is such a start."""
        block = self.start(key)
        if block is None or block.session != session:
            return False
        # What this plan moves must not stand before what it may give up.
        if block in self._starts and block.moved_in != self._plan:
            self._starts.move_to_end(block, last=False)
        return True

    def share(self, key: bytes, session: str) -> None:
        """Keeps a session's start like one that others use too."""
        block = self.start(key)
        if block is not None and block.session == session:
            block.session = ""
            self._used(block)

    # --- retained --------------------------------------------------------------------------------

    def start(self, key: bytes) -> HostBlock | None:
        """Returns the start at the end of a block; None if host memory has none there."""
        block = self._blocks.get(key)
        return block if block is not None and block.is_start else None

    def usable(self, key: bytes) -> HostBlock | None:
        """Returns the block with a key if a request can start at its end. Without states it always can."""
        block = self._blocks.get(key)
        return block if block is not None and self._serves(block) else None

    def by_last_use(self) -> list[HostBlock]:
        """Returns all starts: retained ones first, then the others, last used first."""
        return [*self._retained, *reversed(self._starts)]

    def retain(self, start: HostBlock) -> None:
        """Keeps a start until :meth:`let_go`."""
        self._starts.pop(start, None)
        self._retained.add(start)

    def let_go(self, start: HostBlock) -> None:
        """Lets a retained start be given up. It counts as used now."""
        if start in self._retained:
            self._retained.remove(start)
            self._used(start)

    # --- from and to what lies behind host memory ------------------------------------------------

    def num_missing_pages(self, keys: Sequence[bytes]) -> int:
        """Returns the number of pages that a start takes, besides the blocks that host memory has."""
        num_blocks = len(keys) - self._num_known(keys) if self.memory.has_kv else 0
        return num_blocks + self.memory.state_pages

    def _num_known(self, keys: Sequence[bytes]) -> int:
        """Returns the number of blocks, from the prompt's start, that need not be read for the last key."""
        if not self.memory.has_kv:
            return len(keys) - 1
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._blocks), 0)

    def reserve(self, keys: Sequence[bytes], salt: str) -> Reservation | None:
        """Takes pages for the start with the last key, which is to be read; None: there is no room.

        ``salt`` is the cache salt that the keys are chained to.
        """
        num_known, num_pages = self._num_known(keys), self.num_missing_pages(keys)
        known = self._blocks[keys[num_known - 1]] if num_known and self.memory.has_kv else None
        if not self._make_room(len(keys), known, num_pages):
            return None
        if known is not None:
            known.num_children += 1
        pages = tuple(self._pages.allocate(num_pages))
        state_pages, block_pages = pages[: self.memory.state_pages], pages[self.memory.state_pages :]
        return Reservation(known, num_known, tuple(keys[num_known:]), block_pages, state_pages, salt)

    def enter(self, reserved: Reservation, place: Place) -> list[int]:
        """Adds a start that was read. Returns the pages that hold it; the others were known meanwhile."""
        used: list[int] = []
        last = reserved.known
        for index, key in enumerate(reserved.keys):
            page = reserved.block_pages[index] if reserved.block_pages else NULL_INDEX
            block = self._blocks.get(key)
            if block is None:
                block = self._add(key, last, reserved.num_before + index + 1, page, reserved.salt)
                used += [page] if page != NULL_INDEX else []
            elif page != NULL_INDEX:
                self._pages.free([page])
            last = block
        assert last is not None, "a start has at least one block"
        if last.is_start:
            self._pages.free(reserved.state_pages)
        else:
            last.state_pages, last.place = reserved.state_pages, place
            used += reserved.state_pages
        self.hold(last)
        if reserved.known is not None:
            reserved.known.num_children -= 1
        self._count_used()
        return used

    def cancel(self, reserved: Reservation) -> None:
        """Takes back the pages of a start that could not be read."""
        self._pages.free([*reserved.block_pages, *reserved.state_pages])
        if reserved.known is not None:
            reserved.known.num_children -= 1
            self._trim(reserved.known)

    def pin(self, start: HostBlock) -> None:
        """Keeps a start until :meth:`unpin` is called as often."""
        start.num_pins += 1

    def unpin(self, start: HostBlock) -> None:
        start.num_pins -= 1

    # --- from the device -------------------------------------------------------------------------

    def demote(self, node: CachedBlock, slot: int = NULL_INDEX, place: Place = Place.INNER) -> None:
        """Keeps a start that the device gives up now, if there is room for it.

        The blocks that lead to the start are still on the device. ``slot`` holds its state.
        """
        if not self._pages.capacity:
            return
        known, path = self._missing(node)
        if known is not None and not path and known.is_start:
            self._used(known)
            return
        num_pages = self.memory.state_pages + (len(path) if self.memory.has_kv else 0)
        if not self._may_copy(num_pages) or not self._make_room(node.num_blocks, known, num_pages):
            self._num_dropped += 1
            return
        pages = self._pages.allocate(num_pages)
        state_pages, block_pages = pages[: self.memory.state_pages], pages[self.memory.state_pages :]
        start = self._enter(path, known, block_pages)
        start.state_pages, start.place = tuple(state_pages), place
        start.session = "" if node.state is None else node.state.session
        self.hold(start)
        self._arriving.append(start)
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
            last = self._add(node.key, last, node.num_blocks, page, node.salt)
        assert last is not None, "a start has at least one block"
        return last

    def _add(self, key: bytes, parent: HostBlock | None, num_blocks: int, page: int, salt: str) -> HostBlock:
        block = self._blocks[key] = HostBlock(key, parent, num_blocks, page, salt)
        if self._serves(block):
            self.journal.add(key, Tier.HOST)
        if parent is not None:
            parent.num_children += 1
        return block

    def _may_copy(self, num_pages: int) -> bool:
        """Whether the step may demote so much."""
        bytes_then = (self._num_demoted_pages + num_pages) * self.memory.page_bytes
        return not num_pages or not self._num_demoted_pages or bytes_then <= self._step_bytes

    def _make_room(self, num_blocks: int, known: HostBlock | None, num_pages: int) -> bool:
        """Gives up starts until ``num_pages`` pages are free, but never the blocks up to ``known``.

        ``num_blocks`` is the length of the start that needs the pages. Returns whether there is room now.
        """
        if self.memory.pages_of(num_blocks) > self._pages.capacity:
            return False
        if known is not None:
            known.num_children += 1
        while self._pages.num_free < num_pages:
            oldest = next((start for start in self._starts if not start.is_pinned), None)
            if oldest is None or oldest.moved_in == self._plan:
                break
            self._give_up(oldest)
        if known is not None:
            known.num_children -= 1
        has_room = self._pages.num_free >= num_pages
        if not has_room:
            self._trim(known)  # frees pages, but what would need them can't follow `known` any more
        return has_room

    def _give_up(self, start: HostBlock) -> None:
        del self._starts[start]
        start.is_start = False
        if not self._serves(start):
            self.journal.remove(start.key, Tier.HOST)
        self._trim(start, start.state_pages)
        start.state_pages = ()

    def _trim(self, block: HostBlock | None, pages: Sequence[int] = ()) -> None:
        """Removes a block, and those before it, as long as they lead to no start. Frees all pages."""
        freed: list[int] = []
        while block is not None and not block.is_start and block.num_children == 0:
            del self._blocks[block.key]
            if self._serves(block):
                self.journal.remove(block.key, Tier.HOST)
            if block.page != NULL_INDEX:
                freed.append(block.page)
            block = block.parent
            if block is not None:
                block.num_children -= 1
        freed.reverse()  # pages of adjacent blocks are mostly adjacent
        self._pages.free([*pages, *freed])
