"""All connections of one process by client address, and the choice of those to close when there are too many.

A connection costs a file descriptor, and a client needs no key to open one. So connections that ask for
nothing are closed, the oldest first, before they take the room of others. A connection is *silent* until the
head of its first request is complete; it is *kept* while it waits for a further request. Connections with a
request under way are never closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.open_files import open_file_limit
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

MAX_SILENT = 1024
"""The maximum number of silent connections of one address."""
MAX_CONNECTIONS = 1 << 16
MIN_CONNECTIONS = 16
MIN_OTHER_FILES = 128
"""Files that are left for everything else: connections to servers, logs, pipes. An eighth of the limit if
that is more."""


def room_for(max_open_files: int) -> int:
    """Return how many connections a process may have."""
    others = max(MIN_OTHER_FILES, max_open_files // 8)
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, max_open_files - others))


class _Site:
    """The connections of one client address, or of one IPv6 network."""

    __slots__ = ("kept", "name", "num", "silent")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num = 0
        self.silent: dict[Place, None] = {}
        """Oldest first, as :attr:`kept`."""
        self.kept: dict[Place, None] = {}

    @property
    def num_idle(self) -> int:
        return len(self.silent) + len(self.kept)

    @property
    def oldest(self) -> Place | None:
        return next(iter(self.silent or self.kept), None)


class Place:
    """One connection's place among all."""

    __slots__ = ("_connections", "_end", "_site")

    def __init__(self, connections: OpenConnections, site: _Site, end: Callable[[], None]) -> None:
        self._connections = connections
        self._site: _Site | None = site
        self._end: Callable[[], None] | None = end

    @property
    def is_open(self) -> bool:
        return self._site is not None

    def works(self) -> None:
        """Note that a request's head is complete."""
        if self._site is not None:
            self._site.silent.pop(self, None)
            self._site.kept.pop(self, None)

    def waits(self) -> None:
        """Note that all requests are answered."""
        if self._site is not None:
            self._site.kept[self] = None

    def left(self) -> None:
        """Note that the connection is closed. A second call has no effect."""
        if self._site is not None:
            self.works()
            self._connections.forget(self._site)
            self._site = self._end = None

    def drop(self) -> None:
        """Close the connection."""
        end = self._end
        self.left()
        if end is not None:
            end()


class OpenConnections(Collector):
    """Belongs to one event loop.

    An address has at most :data:`MAX_SILENT` silent connections, and half of all. Beyond that a new
    connection takes the place of its own oldest idle one. If there is no room at all, it takes that of the
    address with the most idle ones. Only if nobody has an idle one is the new one closed.
    """

    def __init__(self, site_of: Callable[[str], str], room: int | None = None) -> None:
        """``site_of`` returns whose an address is. ``room``: how many connections there may be; None: as many
        as the limit of open files allows."""
        self._site_of = site_of
        self.room = room_for(open_file_limit()) if room is None else room
        self._sites: dict[str, _Site] = {}
        self._num = self._num_dropped = 0

    def opened(self, host: str, end: Callable[[], None]) -> Place:
        """Return the place of a new connection from ``host``. ``end`` closes it at once."""
        name = self._site_of(host)
        site = self._sites.setdefault(name, _Site(name))
        place = Place(self, site, end)
        site.num += 1
        self._num += 1
        if site.num > max(self.room // 2, 1) or len(site.silent) >= MAX_SILENT:
            self._drop_one_of(site, place)
        elif self._num > self.room:
            self._drop_one_of(max(self._sites.values(), key=lambda one: one.num_idle), place)
        if place.is_open:
            site.silent[place] = None
        return place

    def forget(self, site: _Site) -> None:
        """Count one connection of ``site`` less."""
        site.num -= 1
        self._num -= 1
        if not site.num:
            del self._sites[site.name]

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("twinfang_open_connections", "Connections of clients.", value=self._num)
        yield CounterMetricFamily(
            "twinfang_dropped_connections",
            "Connections without a request under way that were closed to make room for others.",
            value=self._num_dropped,
        )

    def _drop_one_of(self, site: _Site, newcomer: Place) -> None:
        self._num_dropped += 1
        lines.write(
            logging.WARNING,
            f"connections of {site.name}",
            "closed a connection of %s, which has %d, %d of them without a request: %d are open, and there "
            "is room for %d; a higher limit of open files (ulimit -Hn) makes more room, up to %d",
            *(site.name, site.num, site.num_idle, self._num, self.room, MAX_CONNECTIONS),
        )
        (site.oldest or newcomer).drop()
