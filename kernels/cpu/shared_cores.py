"""The servers that were forked from one process, and which of them compute at this moment.

They share a page of memory, in which each has a word: the time until which it computes, and its niceness.
Two servers with small models that compute at once on two cores get more done with one thread each: a second
thread shortens a short call by less than half, and spins between calls. So a server uses helpers for short
calls only if no server of the same or a lower niceness wants their cores.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time

import numpy as np

from kernels.cpu.atomics import load_word, monotonic_ns
from kernels.cpu.compiler import cpu_function

MOST_SERVERS = 16
_PAGE, _PLACE, _THREADS, _NICENESS, _TIME = 0, 8, 16, 24, 32
"""Offsets in bytes: address of all words (0: there are no others) and of this process's own, number of
its threads, its niceness, and room for the clock's time."""
_NICENESS_BITS = 31
"""The lowest bits of a word are the niceness. So times are multiples of 32 ns."""
_AT_MOST_NS = 1_000_000_000  # a server that was killed seems to compute for so long
_BETWEEN_STEPS_NS = 2_000_000


class SharedCores:
    """This process's place among the servers that share cores. Each process that is forked gets another."""

    def __init__(self, shares_page: bool) -> None:
        self._record = np.zeros(6, dtype=np.int64)
        self.address = self._record.ctypes.data
        self._next = 0
        if shares_page:
            self._page = mmap.mmap(-1, 8 * MOST_SERVERS)
            self._take_place()
            os.register_at_fork(before=self._count, after_in_child=self._take_place)

    def lower_priority(self, niceness: int) -> None:
        """Sets the niceness of this process's compute threads, 0 to 19: servers with less ignore this one."""
        self._record[_NICENESS // 8] = niceness

    def compute(self, num_threads: int) -> None:
        """Says that this process computes from now on, with so many threads if nobody wants their cores."""
        self._record[_THREADS // 8] = num_threads
        self._promise(_AT_MOST_NS)

    def rest(self) -> None:
        """Says that this process has ended a step. The next one may follow at once."""
        self._promise(_BETWEEN_STEPS_NS)

    @property
    def comes_second(self) -> bool:
        """Whether a server with a lower niceness computes at this moment."""
        page, niceness = int(self._record[_PAGE // 8]), int(self._record[_NICENESS // 8])
        if page == 0 or niceness == 0:
            return False
        now_ns = time.monotonic_ns()
        words = (ctypes.c_int64 * MOST_SERVERS).from_address(page)
        return any(word > now_ns and word & _NICENESS_BITS < niceness for word in words)

    def _promise(self, duration_ns: int) -> None:
        if self._record[_PAGE // 8] != 0:
            own = ctypes.c_int64.from_address(int(self._record[_PLACE // 8]))
            until_ns = time.monotonic_ns() + duration_ns
            own.value = until_ns & ~_NICENESS_BITS | int(self._record[_NICENESS // 8])

    def _count(self) -> None:
        self._next = (self._next + 1) % MOST_SERVERS

    def _take_place(self) -> None:
        page = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self._record[:2] = page, page + 8 * self._next


_kept: list[SharedCores] = []


def share_cores() -> None:
    """Lets all processes that this process forks from now on share its cores."""
    _kept[:] = _kept or [SharedCores(shares_page=True)]


def shared_cores() -> SharedCores:
    """Returns this process's place: one without others unless :func:`share_cores` was called."""
    return _kept[0] if _kept else SharedCores(shares_page=False)


@cpu_function
def are_cores_wanted(record, clock_gettime):
    """Returns whether so many others compute, with as much priority or more, that this process's share of its
    threads is one."""
    page = load_word(record)
    if page == 0:
        return False
    own_word, niceness = load_word(record + _PLACE), load_word(record + _NICENESS)
    now_ns, num_computing = 0, 1
    for word in range(page, page + 8 * MOST_SERVERS, 8):
        until_ns = load_word(word)
        if until_ns != 0 and until_ns & _NICENESS_BITS <= niceness and word != own_word:
            now_ns = now_ns or monotonic_ns(clock_gettime, record + _TIME)
            if until_ns > now_ns:
                num_computing += 1
    return num_computing > 1 and load_word(record + _THREADS) < 2 * num_computing
