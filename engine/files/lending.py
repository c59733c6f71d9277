"""What other servers may read in this server's host memory: which starts, how much at a time, by whom.

A start that is lent stays in host memory until its loan ends. All loans together, and those of each borrower,
are bounded, so that no borrower can fill host memory with what nobody uses here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.memory.cached_start import CachedBlock, HostBlock
from engine.memory.prefix_cache import PrefixCache
from telemetry.engine_metrics import NeighbourCacheFigures, NeighbourFailure

MAX_LOANS, MAX_LOANS_EACH = 32, 8
LENT_SHARE = 0.5
"""Part of host memory that all loans together may keep, as if their starts shared no blocks."""
BORROWER_SHARE = 0.25
"""Part of host memory that the loans of one borrower may keep."""
MAX_LISTED_BLOCKS = 262_144
"""Blocks of all starts that a leaving server names, those that several starts share counted for each."""


@dataclass(frozen=True, eq=False)
class Loan:
    """Pages of a start that stay as they are until the loan ends."""

    start: HostBlock
    borrower: str
    block_pages: tuple[int, ...]
    """Those of the blocks that the borrower lacks, in order."""
    num_kept: int
    """Pages of the whole start."""


class Lending:
    """The loans of one engine. ``cache`` owns the starts."""

    def __init__(self, cache: PrefixCache, figures: NeighbourCacheFigures) -> None:
        self._cache = cache
        self._tier = cache.tier
        self._figures = figures
        self._loans: set[Loan] = set()

    def lend(self, borrower: str, key: bytes, num_blocks: int) -> Loan | NeighbourFailure:
        """Lends the start at the end of a block, with its last ``num_blocks`` blocks; or says why not.

        A start that only the device has is copied to host memory: the copies of the tier's next plan have to
        be made before the loan's pages are read.
        """
        start, on_device = self._tier.usable(key), self._cache.start(key)
        found = start or on_device
        if found is None or num_blocks > found.num_blocks:
            return "gone"
        num_kept = self._tier.memory.pages_of(found.num_blocks)
        if not self._may_lend(borrower, num_kept):
            return "limit"
        if start is None and on_device is not None:
            state = on_device.state
            if state is None:
                self._tier.demote(on_device)
            else:
                self._tier.demote(on_device, state.slot, state.place)
            start = self._tier.usable(key)
        if start is None:
            return "limit"  # host memory has no room, or has copied enough in this plan
        self._tier.hold(start)
        self._tier.pin(start)
        loan = Loan(start, borrower, self._last_pages(start, num_blocks), num_kept)
        self._loans.add(loan)
        self._figures.lent += 1
        num_pages = len(loan.block_pages) + len(start.state_pages)
        self._figures.lent_bytes += num_pages * self._tier.memory.page_bytes
        self._count()
        return loan

    def end(self, loan: Loan) -> None:
        """Lets the start be given up again."""
        self._loans.remove(loan)
        self._tier.unpin(loan.start)
        self._count()

    def most_valuable(self) -> list[tuple[bytes, ...]]:
        """Returns the keys of all blocks of each start, the most valuable start first.

        Those of the device come first, then those that only host memory has, retained ones before others.
        """
        found: dict[bytes, CachedBlock | HostBlock] = {
            start.key: start
            for starts in (self._cache.by_value(), self._tier.by_last_use())
            for start in starts
        }
        listed: list[tuple[bytes, ...]] = []
        num_blocks = 0
        for start in found.values():
            num_blocks += start.num_blocks
            if num_blocks > MAX_LISTED_BLOCKS:
                break
            listed.append(_keys_to(start))
        return listed

    def _may_lend(self, borrower: str, num_pages: int) -> bool:
        num_of = Counter(loan.borrower for loan in self._loans)
        kept = sum(loan.num_kept for loan in self._loans)
        kept_for = sum(loan.num_kept for loan in self._loans if loan.borrower == borrower)
        capacity = self._tier.memory.num_pages
        return (
            len(self._loans) < MAX_LOANS
            and num_of[borrower] < MAX_LOANS_EACH
            and kept + num_pages <= LENT_SHARE * capacity
            and kept_for + num_pages <= BORROWER_SHARE * capacity
        )

    def _last_pages(self, start: HostBlock, num_blocks: int) -> tuple[int, ...]:
        pages: list[int] = []
        block: HostBlock | None = start
        while block is not None and self._tier.memory.has_kv and len(pages) < num_blocks:
            pages.append(block.page)
            block = block.parent
        return tuple(reversed(pages))

    def _count(self) -> None:
        kept = sum(loan.num_kept for loan in self._loans)
        self._figures.lent_now_bytes = kept * self._tier.memory.page_bytes


def _keys_to(start: CachedBlock | HostBlock) -> tuple[bytes, ...]:
    """Returns the keys of all blocks from the prompt's beginning to a start."""
    keys: list[bytes] = []
    block: CachedBlock | HostBlock | None = start
    while block is not None:
        keys.append(block.key)
        block = block.parent
    return tuple(reversed(keys))
