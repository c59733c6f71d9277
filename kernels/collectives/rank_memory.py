"""Sums and gathers over ranks on one machine, through memory that they share.

    sum              x[i] = part_0[i] + part_1[i] + ...          float32, in the order of the ranks
    gather_columns   out[r] = part_0[r], part_1[r], ...

``part_g`` is the tensor of rank ``g``; all have one shape. Sums are added in one order, whatever the size of
the tensor, and every rank adds all of them itself, so that all ranks get the same bits.

A rank has a word in the shared memory, the number of its *posts*, and two slots. To exchange a piece, each
rank copies it to its slot ``post % 2``, stores the word, waits until every rank's word has that number, and
reads all slots. The next piece goes to the other slot, and no rank reaches the piece after that before all
ranks have posted the next one, which they do after they have read this one. So one wait a piece is enough.

A rank that waits spins for a few µs, then yields its core to others that want it, and after some time it
sleeps in ``ppoll`` on the processes of the other ranks, which wakes it when one of them ends. If one has
ended, or a wait takes longer than the limit, the exchange is *lost*: from then on every op returns at once
and its result is undefined. The caller asks :meth:`RankMemory.loss` after the ops and before it uses results.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.cpu.atomics import c_function, call_c, load_word, monotonic_ns, store_word
from kernels.cpu.compiler import cpu_function
from kernels.cpu.jit import FlatArray, cpu_jit

_SLOT_FLOATS = 2**16  # both slots of two ranks fit in a core's L2 cache
_RANK_BYTES = 128
"""Each rank's words are on cache lines of their own: they are written while others read theirs."""
_POSTED, _WAITED_NS = 0, 64
_LOST, _LIMIT_NS, _TIME, _NAP, _POLLED = 0, 8, 16, 32, 48
"""Offsets in bytes of this rank's own words: what was lost, the longest wait, room for a time, the length of
a nap (seconds, ns), and what ``ppoll`` watches, a word for each other rank."""
_RANK_ENDED, _WAITED_TOO_LONG = 1, 2
_SPINS = 2000  # a few µs
_YIELDS_NS = 2_000_000  # longer than ranks are apart within a step, unless one of them lost its core
_NAP_NS = 50_000
_POLL_INPUT = 1
_EVENTS_SHIFT, _FOUND_SHIFT = 32, 48


@cpu_function
def _has_ended(own, num_others):
    """Returns whether the last ``ppoll`` has found that a rank's process has ended."""
    found = 0
    for other in range(num_others):
        found |= load_word(own + _POLLED + 8 * other) >> _FOUND_SHIFT
    return found != 0


@cpu_function
def _wait_long(word, post, own, num_others, began_ns, libc):
    """Waits for one rank, without a core if it takes long. Notes it if the exchange is lost."""
    sched_yield, ppoll, clock_gettime = libc
    while load_word(word) < post:
        waited_ns = monotonic_ns(clock_gettime, own + _TIME) - began_ns
        if waited_ns < _YIELDS_NS:
            call_c(sched_yield, 0, 0, 0, 0)
            continue
        call_c(ppoll, own + _POLLED, num_others, own + _NAP, 0)
        ended = _has_ended(own, num_others)
        if load_word(word) >= post:  # what a rank posted before its end counts
            return
        if ended:
            store_word(own + _LOST, _RANK_ENDED)
            return
        if waited_ns > load_word(own + _LIMIT_NS):
            store_word(own + _LOST, _WAITED_TOO_LONG)
            return


@cpu_function
def _exchange(x, first, count, slots, shared, own, place, libc):
    """Posts ``x[first : first + count]`` and waits for the same piece of all ranks.

    Returns the index of rank 0's slot; the next rank's is two slots later. -1 if the exchange is lost.
    """
    rank, size = place
    if load_word(own + _LOST) != 0:
        return -1
    word = shared + rank * _RANK_BYTES
    post = load_word(word + _POSTED) + 1
    slot = (post % 2) * _SLOT_FLOATS
    target = slots[slot + 2 * rank * _SLOT_FLOATS :][:count]
    target[:] = x[first : first + count]
    store_word(word + _POSTED, post)
    began_ns = monotonic_ns(libc[2], own + _TIME)
    for other in range(size):
        others = shared + other * _RANK_BYTES + _POSTED
        spins = 0
        while spins < _SPINS and load_word(others) < post:
            spins += 1
        if spins == _SPINS:
            _wait_long(others, post, own, size - 1, began_ns, libc)
            if load_word(own + _LOST) != 0:
                return -1
    waited_ns = monotonic_ns(libc[2], own + _TIME) - began_ns
    store_word(word + _WAITED_NS, load_word(word + _WAITED_NS) + waited_ns)
    return slot


@cpu_jit
def _sum_ranks(x, slots, shared, own, place, libc, begin, end):
    """There is one item, since one thread exchanges."""
    for first in range(0, x.size, _SLOT_FLOATS):
        count = min(_SLOT_FLOATS, x.size - first)
        slot = _exchange(x, first, count, slots, shared, own, place, libc)
        if slot < 0:
            return
        total = x[first : first + count]
        a, b = slots[slot:][:count], slots[slot + 2 * _SLOT_FLOATS :][:count]
        for i in range(count):
            total[i] = a[i] + b[i]
        for rank in range(2, place[1]):  # one rank after another: the order must not be the compiler's choice
            part = slots[slot + 2 * rank * _SLOT_FLOATS :][:count]
            for i in range(count):
                total[i] += part[i]


@cpu_jit
def _gather_columns(x, columns, out, width, slots, shared, own, place, libc, begin, end):
    """There is one item, since one thread exchanges. ``columns`` are x's, ``width`` are the result's."""
    for first in range(0, x.size, _SLOT_FLOATS):
        count = min(_SLOT_FLOATS, x.size - first)
        slot = _exchange(x, first, count, slots, shared, own, place, libc)
        if slot < 0:
            return
        for rank in range(place[1]):
            part = slots[slot + 2 * rank * _SLOT_FLOATS :][:count]
            i = 0
            while i < count:
                row, column = (first + i) // columns, (first + i) % columns
                run = min(columns - column, count - i)
                target = rank * columns + column
                live = max(0, min(run, width - target))
                out[row * width + target : row * width + target + live] = part[i : i + live]
                i += run


class RankMemory:
    """One rank's part in the exchange."""

    def __init__(self, rank: int, memory: np.ndarray, process_fds: Sequence[int], *, limit_s: float) -> None:
        """``memory`` is shared by all ranks, uint8, zeros, :meth:`num_bytes` long.

        ``process_fds`` are descriptors of the other ranks' processes (``pidfd_open``). A wait that takes
        longer than ``limit_s`` loses the exchange.
        """
        size = len(process_fds) + 1
        self._keeps = memory
        self._slots = memory[size * _RANK_BYTES :].view(np.float32)
        self._shared = memory.ctypes.data
        self._own = np.zeros(_POLLED // 8 + len(process_fds), dtype=np.int64)
        self._own[_LIMIT_NS // 8] = int(limit_s * 1e9)
        self._own[_NAP // 8 + 1] = _NAP_NS
        self._own[_POLLED // 8 :] = [fd | _POLL_INPUT << _EVENTS_SHIFT for fd in process_fds]
        self._place = rank, size
        self._libc = tuple(map(c_function, ("sched_yield", "ppoll", "clock_gettime")))

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the size of the memory that ``size`` ranks share."""
        return size * (_RANK_BYTES + 2 * 4 * _SLOT_FLOATS)

    def sum(self, x: torch.Tensor) -> None:
        """Add up the ranks' ``x`` in place; x is float32 and contiguous."""
        assert x.is_contiguous()
        self._run(_sum_ranks, FlatArray(x))

    def gather_columns(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Concatenate each rank's ``[n, c]`` to ``[n, size * c]`` and keep ``width`` columns.

        x has any type of four or eight bytes.
        """
        x = x.contiguous()
        num_rows, columns = x.shape
        out = torch.empty((num_rows, width), dtype=x.dtype)
        given, taken = (FlatArray(one.view(torch.float32)) for one in (x, out))
        words = x.itemsize // 4
        self._run(_gather_columns, given, columns * words, taken, width * words)
        return out

    def loss(self) -> str | None:
        """Return why the exchange is lost; None as long as it is not."""
        lost = int(self._own[_LOST // 8])
        if lost == _RANK_ENDED:
            return "another rank has ended"
        if lost == _WAITED_TOO_LONG:
            return f"another rank has not answered for {self._own[_LIMIT_NS // 8] / 1e9:g} s"
        return None

    def waited_s(self, rank: int) -> float:
        """Return for how long a rank has waited for others since the start."""
        return int(self._keeps[rank * _RANK_BYTES + _WAITED_NS :][:8].view(np.int64)[0]) / 1e9

    def _run(self, kernel: object, *args: object) -> None:
        own = self._own.ctypes.data
        kernel.parallel_for(1, 1, *args, self._slots, self._shared, own, self._place, self._libc)  # type: ignore[attr-defined]
