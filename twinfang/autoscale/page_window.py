"""The pages of metrics that were read in a recent window of time, and what changed between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from twinfang.autoscale.metrics_page import Page, PageChange


class PageWindow:
    """Keeps each process's last two pages, and all others that a window of ``window_s`` needs. If a process
    has restarted, its earlier pages are dropped."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._pages: dict[str, deque[Page]] = {}

    def take(self, pages: Iterable[Page]) -> None:
        """Adds the pages that were read at one moment. Forgets processes without a new page."""
        kept: dict[str, deque[Page]] = {}
        for page in pages:
            earlier = self._pages.get(page.address, deque())
            if earlier and earlier[-1].started_s != page.started_s:
                earlier = deque()
            earlier.append(page)
            while len(earlier) > 2 and page.read_s - earlier[1].read_s >= self._window_s:
                earlier.popleft()
            kept[page.address] = earlier
        self._pages = kept

    def changes(self) -> list[PageChange]:
        """Returns the change of each process that was read at least twice."""
        return [PageChange(pages[0], pages[-1]) for pages in self._pages.values() if len(pages) > 1]

    def mean(self, name: str) -> float:
        """Returns a gauge's mean over the window, summed over processes that were read at least twice."""
        return sum(
            sum(page.sum(name) for page in pages) / len(pages)
            for pages in self._pages.values()
            if len(pages) > 1
        )
