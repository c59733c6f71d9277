"""Decides which starts are written to files, which are read back, and for how long a request waits.

* **Out.** Each start that has come to host memory is written, in the order in which they came, one at a time,
  unless host memory has given it up by then.
* **In.** When a request comes for which files have a longer start than the device and host memory, the start
  is read. If a router says that another server has a still longer one, it is read from that server's host
  memory.
* **No longer than computing.** A request that could be admitted waits for its start for at most the time that
  computing the same tokens would take. If reading is not expected to end by then, nothing is read.

Reads and writes end at any time, so this object has a clock, and it has to know what files hold. Both may
differ between ranks. So rank 0 alone decides, and tells the others (:mod:`engine.files.file_tier`).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from engine.files.file_tier import FileTier
from engine.files.neighbours import NoNeighbours, StartNeighbours
from engine.files.start_files import StartFiles, longest_start
from engine.memory.cached_start import HostBlock, Match
from engine.memory.host_tier import HostTier
from engine.memory.prefix_journal import ReadCost, Tier
from wire.messages.ranks import FileJobEnded, FileNews, ReadFromFiles, WriteToFiles


@dataclass(frozen=True)
class LookUp:
    """A request that has come since the last news."""

    request_id: str
    found: Match
    """What the device has of its prompt."""
    most_blocks: int
    """Number of blocks of the longest start that is of use to it."""
    address: str = ""
    """Address of another server that has a start; empty: none is known."""
    num_blocks: int = 0
    """Number of blocks of that start."""


class LookUps(Protocol):
    """Returns the requests that have come since the last news."""

    def __call__(self, *, has_neighbour: bool) -> Iterable[LookUp]:
        """With ``has_neighbour``, only those for which another server has a start."""


PRICE_S = 0.5
"""Between two looks at what a read costs. It is a mean of many reads and steps; routers ask less often."""
OnRead = Callable[[bool], None]
"""Gets whether a start was read."""


class FileChoices:
    """Makes the news of one server. ``tier`` takes them.

    ``compute_s(start, end)`` estimates the seconds in which the device computes the blocks from ``start`` to
    ``end``. ``least_wait_s`` is the least that a request may wait for files, whatever computing takes;
    ``neighbour_wait_s`` the same for another server. ``read_cost`` returns what routers are told that reading
    a start from files costs.
    """

    def __init__(
        self,
        tier: FileTier,
        host: HostTier,
        files: StartFiles,
        neighbours: StartNeighbours | None = None,
        look_ups: LookUps = lambda *, has_neighbour: (),
        *,
        compute_s: Callable[[int, int], float] = lambda start, end: 0.0,
        least_wait_s: float = 0.0,
        neighbour_wait_s: float = 0.0,
        read_cost: Callable[[], ReadCost] = lambda: ReadCost(0.0, 0.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._host = host
        self._files = files
        self._neighbours = neighbours or NoNeighbours()
        self._look_ups = look_ups
        self._compute_s = compute_s
        self._least_wait_s = least_wait_s
        self._neighbour_wait_s = neighbour_wait_s
        self._read_cost = read_cost
        self._clock = clock
        self._figures = files.figures
        self._next_price_s = -math.inf
        self._next_number = secrets.randbits(62)  # a record keeps it: no other server writes the same one
        self._unwritten: dict[bytes, None] = {}
        """Starts that came to host memory and are not in files yet; some may have left host memory."""
        self._limit_s: dict[int, float] = {}
        """For how long requests wait for what is being read, by number. The wait has not begun yet."""
        self._until_s: dict[int, float] = {}
        """When the waits end that have begun."""
        self._on_read: dict[int, OnRead] = {}
        """Who wants to know what becomes of a read that is for no request, by number."""

    @property
    def has_work(self) -> bool:
        """Whether something is being read or written, or is to be written."""
        return bool(self._unwritten or self._tier.arrived or self._tier.writing or self._tier.fetches)

    def news(self) -> FileNews | None:
        """Decides, before a plan, by what has ended and what has come since the last plan.

        None if there is nothing to tell, as before nearly every step.
        """
        if not self._files.is_on and not self._neighbours.is_on:
            return None
        if self._files.is_on:
            self._note_arrived()
            self.tell_routers()
        landed = chain(self._files.landed(), self._neighbours.landed())
        ended = tuple(FileJobEnded(one.job.number, one.is_done, one.place) for one in landed)
        numbers = {one.number for one in ended}
        for one in ended:
            self._on_read.pop(one.number, _nobody)(one.is_done)
        self._forget(numbers)
        late = self._late()
        reads = self._reads(numbers)
        write = self._next_write(numbers)
        if not ended and not late and not reads and write is None:
            return None
        return FileNews(ended, late, reads, write)

    def tell_routers(self) -> None:
        """Notes for routers which starts have come to files and which have gone."""
        changes = self._files.changes()
        for key, is_there in changes:
            (self._host.journal.add if is_there else self._host.journal.remove)(key, Tier.FILES)
        if changes:
            self._price()

    def _price(self) -> None:
        """Notes for routers what reading a start costs, if that has not been looked at for a while."""
        now_s = self._clock()
        if now_s >= self._next_price_s:
            self._next_price_s = now_s + PRICE_S
            self._host.journal.price(Tier.FILES, self._read_cost())

    # --- out -------------------------------------------------------------------------------------

    def _note_arrived(self) -> None:
        if not self._tier.arrived:
            return
        self._unwritten |= dict.fromkeys(self._tier.arrived)
        if len(self._unwritten) > 64 + 2 * self._host.num_starts:
            self._unwritten = {key: None for key in self._unwritten if self._host.start(key)}

    def _next_write(self, ended: set[int]) -> WriteToFiles | None:
        writing = self._tier.writing
        if not self._unwritten or (writing is not None and writing.number not in ended):
            return None
        while self._unwritten and self._files.may_write:
            key = next(iter(self._unwritten))
            del self._unwritten[key]
            start = self._host.start(key)
            if start is None:
                self._figures.dropped += 1
                continue
            path = _path_of(start)
            num_known = self._files.num_known([block.key for block in path])
            # Files that are not read for a while say that they have no start.
            if num_known < len(path) or (start.state_pages and not self._files.has_start(key)):
                known = path[num_known - 1].num_blocks if num_known else 0
                return WriteToFiles(self._new_number(), key, known)
        return None

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    # --- in --------------------------------------------------------------------------------------

    def _reads(self, ended: set[int]) -> tuple[ReadFromFiles, ...]:
        reads: list[ReadFromFiles] = []
        under_way: dict[bytes, int] | None = None
        for one in self._look_ups(has_neighbour=not self._files.is_on):
            if under_way is None:
                if self._files.is_on:
                    self._price()
                under_way = {fetch.job.start: number for number, fetch in self._tier.fetches.items()}
            known, length, address = self._longest(one)
            if not length:
                continue
            key = one.found.keys[length - 1]
            limit_s = self._most_s(known, length, address)
            if key not in under_way:
                under_way[key] = self._begin(one.found.keys[:length], address, limit_s)
            elif self._left_s(under_way[key]) > limit_s:
                continue  # what is under way is for a request that has more to compute, or for none
            number = under_way[key]
            if number and number not in ended:  # what has ended is in host memory now, or of no use
                reads.append(ReadFromFiles(number, one.request_id, length, address))
        return tuple(reads)

    def _longest(self, one: LookUp) -> tuple[int, int, str]:
        """Returns the numbers of blocks of the longest start on the device or in host memory, and of the
        longest one elsewhere: 0 if it is not longer. The address says on which server it is; empty: in files.
        """
        keys = one.found.keys[: one.most_blocks]
        in_host = self._host.longest(one.found, one.most_blocks)
        known = len(one.found.nodes) if in_host is None else in_host.num_blocks
        in_files = longest_start(self._files, keys, known) if self._files.is_on else 0
        if max(in_files, known) < one.num_blocks <= len(keys) and self._neighbours.may_read(one.address):
            return known, one.num_blocks, one.address
        return known, in_files, ""

    def _most_s(self, known: int, length: int, address: str) -> float:
        """Returns for how long a request waits at most for a start that is read."""
        least_s = self._neighbour_wait_s if address else self._least_wait_s
        return max(self._compute_s(known, length), least_s)

    def _left_s(self, number: int) -> float:
        """Returns for how long requests wait at most from now on for what is being read."""
        if number in self._limit_s or not number:
            return self._limit_s.get(number, 0.0)
        return self._until_s.get(number, math.inf) - self._clock()

    def _begin(self, keys: Sequence[bytes], address: str, limit_s: float) -> int:
        """Returns the number of a new read; 0 if reading is expected to take too long."""
        source = self._neighbours if address else self._files
        if not limit_s or source.seconds(self._host.num_missing_pages(keys)) > limit_s:
            source.figures.computed += 1
            return 0
        number = self._new_number()
        self._limit_s[number] = limit_s
        return number

    def take_over(
        self, keys: Sequence[bytes], salt: str, address: str, most_pages: int, on_read: OnRead
    ) -> int:
        """Begins to read the start with the last key from a server that leaves, between two steps.

        Returns the pages that it takes. 0: nothing is read, because there is no room, the start is here or on
        its way, or it takes more than ``most_pages``.
        """
        num_pages = self._host.num_missing_pages(keys)
        is_coming = any(fetch.job.start == keys[-1] for fetch in self._tier.fetches.values())
        is_here = is_coming or self._host.usable(keys[-1]) is not None
        if is_here or num_pages > most_pages or not self._neighbours.may_read(address):
            return 0
        number = self._new_number()
        if self._tier.fetch(number, keys, salt, address) is None:
            return 0
        self._on_read[number] = on_read
        self._limit_s[number] = self._compute_s(0, len(keys))  # for requests that come meanwhile
        return num_pages

    def _forget(self, ended: set[int]) -> None:
        """Forgets the waits for what has ended, and for what host memory had no room for."""
        for waits in (self._limit_s, self._until_s):
            for number in [one for one in waits if one in ended or one not in self._tier.fetches]:
                del waits[number]

    def _late(self) -> tuple[int, ...]:
        if not self._until_s:
            return ()
        now_s = self._clock()
        late = tuple(number for number, until_s in self._until_s.items() if until_s <= now_s)
        for number in late:
            del self._until_s[number]
            address = self._tier.fetches[number].job.address
            (self._neighbours if address else self._files).figures.late += 1
        return late

    def wait_s(self) -> float | None:
        """Returns the seconds until a request has waited long enough; None: no request waits.

        Called after each plan: the waits begin for which the plan held up a request.
        """
        if not self._limit_s and not self._until_s:
            return None
        now_s = self._clock()
        for number, limit_s in list(self._limit_s.items()):
            fetch = self._tier.fetches.get(number)
            if fetch is not None and fetch.is_awaited:
                self._until_s[number] = now_s + limit_s
                del self._limit_s[number]
        return max(0.0, min(self._until_s.values()) - now_s) if self._until_s else None


def _nobody(is_read: bool) -> None:
    pass


def _path_of(start: HostBlock) -> list[HostBlock]:
    """Returns the blocks up to a start, the first one first."""
    path = [start]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    path.reverse()
    return path
