"""Runs a list of native kernel calls on this thread; helper threads take part if a call is long enough.

The list is a table of int64 with one call per row: trampoline, kernel, block
(:mod:`kernels.cpu.native_call`), number of items, number of shares. Calls are made in order. This thread and
the helpers claim a call's shares one by one, this thread from the first one, helpers from the last: so a core
finds in its cache what it wrote in the calls before. A helper that the operating system gives no core costs
nothing: this thread does all shares that no helper has claimed. No Python runs and no lock is taken between
two calls.

To claim a share, a thread reads one word, ``generation << 24 | first << 12 | end``, and swaps in its
successor, which lacks the first of the shares ``[first, end)`` or the last. The generation changes with every
call, so a helper that slept through any number of calls can't claim a share of a call that it did not read.
Between two calls, while the next call's address is written, the word has no share left. Helpers spin between
two calls of a list, then yield the core, and after a longer time they sleep in a semaphore until a call with
shares begins. A thread that makes many calls from Python can keep them awake in between: then they spin for
longer (:meth:`CpuThreads.awake`).

Such a thread can also offer its calls one by one. A helper makes them while the thread does other work, until
it comes back to make the rest itself, together with the helpers. Only one thread at a time begins calls:
either the thread that has the helpers, or the helper that makes offered calls.

If a helper loses its core while it has a share, this thread has to wait for it. After that it makes calls
alone for some milliseconds, since sharing gains nothing if all cores are busy. A thread that keeps the
helpers awake does so only if they have worked for less time than it had to wait. So a prompt keeps both cores
where another process, of lower priority, takes one from time to time. Short calls it makes alone while other
servers of its stack want the cores (:mod:`kernels.cpu.shared_cores`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.atomics import (
    add_to_word,
    c_function,
    call_c,
    load_word,
    monotonic_ns,
    store_word,
    swap_word,
    thread_ns,
)
from kernels.cpu.compiler import cpu_function
from kernels.cpu.native_call import NativeCall, call_trampoline
from kernels.cpu.shared_cores import are_cores_wanted, shared_cores

log = logging.getLogger(__name__)

TRAMPOLINE, KERNEL, BLOCK, ITEMS, SHARES, COLUMNS = 0, 1, 2, 3, 4, 5
MOST_SHARES = 2**12 - 1
_CALL, _DONE, _RUNNING, _STOPPED, _ASLEEP, _ALONE, _PENALTY, _TIME = 64, 128, 192, 256, 320, 384, 392, 400
"""Offsets in bytes from the word: address of the present call, number of its shares that are done, how long
helpers spin without work (0: none are wanted), whether the process ends, number of helpers asleep, time until
which this thread makes calls alone, how long it will do so after the next such wait, and room for the clock's
time."""
_HELPED, _SHARED_CORES = 448, 456
"""Offsets of the time in which helpers that are kept awake worked since one last lost its core, and of the
address of the shared cores."""
_OFFERED, _TAKEN, _AHEAD, _ENDED, _CONTROL_BYTES = 512, 576, 584, 640, 704
"""Offsets of words for calls that are offered one by one (:meth:`CpuThreads.offer`): how many there are, how
many have been made, whether a helper makes them, and whether it must not make more. Size of all words."""
_LONG_SHARES = 256  # 1.5 ms: beside such a call, what is lost between calls is little
SHARES_A_GRAIN = 16
"""A share takes about 6 µs. Shares can be this short, since claiming one takes a tenth of a µs."""
MOST_OFFERED = 64
_SEMAPHORE_BYTES = 64  # more than any C library's sem_t
_SPINS, _PATIENT_SPINS, _YIELDS = 2**11, 2**16, 3000  # a few µs, 100 µs, 1.3 ms
"""How often a helper without work looks for some before it yields its core: in a list of calls, and between
calls from Python. How often it yields then, before it sleeps: for longer than this thread's work between
shared calls. If another process wants the core, it is away for milliseconds after a yield. So this thread too
looks for a helper's last share for longer than most shares take."""
_PATIENCE_NS = 500_000  # the time of many shares; a helper that lost its core is away for milliseconds
_LEAST_ALONE_NS, _MOST_ALONE_NS = 2_000_000, 32_000_000
_STOP_S = 1.0


@cpu_function
def _run_share(row, share, shares):
    """Runs one of a call's shares. ``row`` is the address of the call's row in its table."""
    items = load_word(row + 8 * ITEMS)
    begin, end = items * share // shares, items * (share + 1) // shares
    call_trampoline(load_word(row), load_word(row + 8 * KERNEL), load_word(row + 8 * BLOCK), begin, end)


@cpu_function
def _claim_shares(control, from_end):
    """Works on the present call until it has no share left."""
    while True:
        word = load_word(control)
        first, end = (word >> 12) & MOST_SHARES, word & MOST_SHARES
        if first >= end:
            return
        if swap_word(control, word, word - 1 if from_end else word + (1 << 12)) != 0:
            row = load_word(control + _CALL)
            _run_share(row, end - 1 if from_end else first, load_word(row + 8 * SHARES))
            add_to_word(control + _DONE, 1)


@cpu_function
def _await(control, word, value, sched_yield, clock_gettime):
    """Waits until helpers have brought a word to a value. If a helper lost its core, decides whether this
    thread goes on alone."""
    most_spins = load_word(control + _RUNNING)
    for _ in range(most_spins):
        if load_word(word) == value:
            return
    began_ns = monotonic_ns(clock_gettime, control + _TIME)
    while load_word(word) != value:
        call_c(sched_yield, 0, 0, 0, 0)
    penalty_ns, now_ns = load_word(control + _PENALTY), monotonic_ns(clock_gettime, control + _TIME)
    waited_ns = now_ns - began_ns
    if waited_ns <= _PATIENCE_NS:
        store_word(control + _PENALTY, max(penalty_ns - penalty_ns // 16, _LEAST_ALONE_NS))
        return
    helped_ns = load_word(control + _HELPED)
    store_word(control + _HELPED, 0)
    if most_spins != _PATIENT_SPINS or helped_ns < waited_ns:
        store_word(control + _ALONE, now_ns + penalty_ns)
        store_word(control + _PENALTY, min(2 * penalty_ns, _MOST_ALONE_NS))


@cpu_function
def _is_alone(control, shares, clock_gettime):
    """Returns whether this thread makes a call alone: a helper lost its core a short time ago, or the call is
    short and other servers want the cores."""
    if shares < _LONG_SHARES and are_cores_wanted(load_word(control + _SHARED_CORES), clock_gettime):
        return True
    until_ns = load_word(control + _ALONE)
    if until_ns == 0:
        return False
    if monotonic_ns(clock_gettime, control + _TIME) < until_ns:
        return True
    store_word(control + _ALONE, 0)
    return False


@cpu_function
def _publish(row, control, shares, semaphore, sem_post):
    """Lets all threads claim shares of a call."""
    generation = (load_word(control) >> 24) + 1
    store_word(control, generation << 24)  # no shares: no thread claims while the call is written
    store_word(control + _CALL, row)
    store_word(control + _DONE, 0)
    store_word(control, (generation + 1) << 24 | shares)
    _wake(control, semaphore, sem_post)


@cpu_function
def _wake(control, semaphore, sem_post):
    """Wakes a helper if one is asleep."""
    asleep = load_word(control + _ASLEEP)
    if asleep > 0 and swap_word(control + _ASLEEP, asleep, asleep - 1) != 0:
        call_c(sem_post, semaphore, 0, 0, 0)


@cpu_function
def _run_calls(table, control, semaphore, sem_post, sched_yield, clock_gettime, is_shared):
    row = table.ctypes.data
    for i in range(table.shape[0]):
        shares = table[i, SHARES]
        if shares == 1 or not is_shared or _is_alone(control, shares, clock_gettime):
            _run_share(row, 0, 1)
        else:
            _publish(row, control, shares, semaphore, sem_post)
            _claim_shares(control, False)
            _await(control, control + _DONE, shares, sched_yield, clock_gettime)
        row += 8 * COLUMNS


@cpu_function
def _offer(control, number, shares, semaphore, sem_post, clock_gettime):
    """Tells the helpers that there are ``number`` calls now, the last one of so many shares."""
    if not _is_alone(control, shares, clock_gettime):
        store_word(control + _OFFERED, number)
        _wake(control, semaphore, sem_post)


@cpu_function
def _run_ahead(table, control, semaphore, sem_post, sched_yield):
    """Makes offered calls on a helper until there are no more, or another thread takes over."""
    while load_word(control + _ENDED) == 0:
        number = load_word(control + _TAKEN)
        if number >= load_word(control + _OFFERED):
            break
        row = table + number * 8 * COLUMNS
        shares = load_word(row + 8 * SHARES)
        if shares == 1:
            _run_share(row, 0, 1)
        else:
            _publish(row, control, shares, semaphore, sem_post)
            _claim_shares(control, True)
            while load_word(control + _DONE) < shares:
                call_c(sched_yield, 0, 0, 0, 0)
        store_word(control + _TAKEN, number + 1)
    store_word(control + _AHEAD, 0)


@cpu_function
def _take_over(control, sched_yield, clock_gettime):
    """Ends a helper's run ahead, taking part in the call that it makes. Returns how many calls it made."""
    store_word(control + _ENDED, 1)
    for _ in range(load_word(control + _RUNNING)):
        _claim_shares(control, False)
        if load_word(control + _AHEAD) == 0:
            break
    _await(control, control + _AHEAD, 0, sched_yield, clock_gettime)
    number = load_word(control + _TAKEN)
    store_word(control + _OFFERED, 0)
    store_word(control + _TAKEN, 0)
    store_word(control + _ENDED, 0)
    return number


@cpu_function
def _repeat_calls(
    table, control, semaphore, sem_post, sched_yield, clock_gettime, is_shared, most_runs, stop, until_ns
):
    """Makes all calls up to ``most_runs`` times, and returns how often. See :class:`Repeats`."""
    room = np.empty(2, dtype=np.int64)  # threads without helpers are here too
    began_ns, runs = monotonic_ns(clock_gettime, room.ctypes.data), 0
    while True:
        _run_calls(table, control, semaphore, sem_post, sched_yield, clock_gettime, is_shared)
        runs += 1
        if runs >= most_runs or load_word(stop) != 0:
            return runs
        now_ns = monotonic_ns(clock_gettime, room.ctypes.data)
        if now_ns + (now_ns - began_ns) // runs >= until_ns:
            return runs


@cpu_function
def _is_offered(control):
    """Returns whether there are calls that no thread makes."""
    is_open = load_word(control + _AHEAD) == 0 and load_word(control + _ENDED) == 0
    return is_open and load_word(control + _TAKEN) < load_word(control + _OFFERED)


@cpu_function
def _help(control, offered, semaphore, sem_wait, sem_post, sched_yield, clock_gettime):
    """The main loop of a helper."""
    room = np.empty(2, dtype=np.int64)
    while True:
        add_to_word(control + _ASLEEP, 1)
        call_c(sem_wait, semaphore, 0, 0, 0)
        if load_word(control + _STOPPED) != 0:
            return
        spins, most_spins = 0, load_word(control + _RUNNING)
        while most_spins != 0:
            word = load_word(control)
            if (word >> 12) & MOST_SHARES < word & MOST_SHARES:
                if most_spins == _PATIENT_SPINS:
                    began_ns = thread_ns(clock_gettime, room.ctypes.data)
                    _claim_shares(control, True)
                    add_to_word(control + _HELPED, thread_ns(clock_gettime, room.ctypes.data) - began_ns)
                else:
                    _claim_shares(control, True)
                spins = 0
            elif _is_offered(control) and swap_word(control + _AHEAD, 0, 1) != 0:
                began_ns = thread_ns(clock_gettime, room.ctypes.data)
                _run_ahead(offered, control, semaphore, sem_post, sched_yield)
                add_to_word(control + _HELPED, thread_ns(clock_gettime, room.ctypes.data) - began_ns)
                spins = 0
            else:
                spins += 1
                if spins > most_spins:
                    call_c(sched_yield, 0, 0, 0, 0)
                if spins > most_spins + _YIELDS:
                    break  # no work for a helper for this long: sleep until a call with shares
            most_spins = load_word(control + _RUNNING)


class Repeats(NamedTuple):
    """How often to make the calls of a table."""

    most_runs: int
    stop: int
    """Address of an int64. The calls are not made again if it is not 0."""
    until_ns: int
    """The calls are not made again if they would end after this time of :func:`time.monotonic_ns`. They are
    expected to take as long as the others did on average."""


_num_threads: list[int] = []


def set_kernel_threads(num_threads: int) -> None:
    """Sets how many threads of this process share a kernel's work, including the caller."""
    _num_threads[:] = [num_threads]


def kernel_threads() -> int:
    """Returns the number set by :func:`set_kernel_threads`, or torch's number of threads if none is set."""
    return _num_threads[0] if _num_threads else torch.get_num_threads()


class CpuThreads:
    """This process's helpers: one fewer than the kernel threads, since the caller works as well."""

    def __init__(self) -> None:
        self._control = np.zeros(_CONTROL_BYTES // 8 + 8, dtype=np.int64)
        self._address = -(-self._control.ctypes.data // 64) * 64
        self._set(_PENALTY, _LEAST_ALONE_NS)
        self.shared_cores = shared_cores()
        self._set(_SHARED_CORES, self.shared_cores.address)
        self._offered = np.zeros((MOST_OFFERED, COLUMNS), dtype=np.int64)
        self._num_offered = 0
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self._libc = ctypes.CDLL(None)
        names = "sched_yield", "sem_wait", "sem_post", "clock_gettime"
        self._yield, self._wait, self._post, self._clock = map(c_function, names)
        self._has_helpers = self._libc.sem_init(self._semaphore, 0, 0) == 0  # macOS has only named semaphores
        if not self._has_helpers:
            log.warning("this system has no unnamed semaphores: CPU kernels run on one thread")
        self._helpers: list[threading.Thread] = []
        self._busy = threading.Lock()
        self._user = 0
        """The thread that has the helpers, by its identifier; 0: none."""
        atexit.register(self._stop)

    @property
    def helper_ids(self) -> list[int]:
        """Native ids of the present helpers.

        A helper that starts later inherits settings, such as the niceness, of the thread that starts it.
        """
        return [helper.native_id for helper in self._helpers if helper.native_id is not None]

    @contextmanager
    def awake(self, spins: int = _PATIENT_SPINS) -> Generator[bool]:
        """Gives the helpers to this thread. They stay awake between its calls, and spin ``spins`` times.

        Yields whether this thread has them: another thread may use them, or there are none."""
        this = threading.get_ident()
        if self._user == this:
            yield True
        elif kernel_threads() == 1 or not self._has_helpers or not self._busy.acquire(blocking=False):
            yield False
        else:
            self._user = this
            self._set(_RUNNING, spins)
            self.shared_cores.compute(kernel_threads())
            try:
                yield True
            finally:
                self.shared_cores.rest()
                self._set(_RUNNING, 0)
                self._user = 0
                self._busy.release()

    @property
    def are_awake(self) -> bool:
        """Whether this thread has the helpers, so that it need not wake them for a call."""
        return self._user == threading.get_ident()

    def offer(self, row: tuple[int, ...]) -> None:
        """Takes a call that a helper may make while this thread, which keeps helpers awake, does other work.

        Calls are made in order. There can be :data:`MOST_OFFERED` of them until :meth:`withdraw`.
        """
        assert self.are_awake
        self._hire(kernel_threads() - 1)
        self._offered[self._num_offered] = row
        self._num_offered += 1
        semaphore = ctypes.addressof(self._semaphore)
        words = self._address, self._num_offered, row[SHARES], semaphore
        _offer.dispatcher(*words, self._post, self._clock)

    def withdraw(self) -> int:
        """Waits for the offered call that a helper makes, and takes part in it. Returns how many calls have
        been made. No helper makes the others."""
        self._num_offered = 0
        return int(_take_over.dispatcher(self._address, self._yield, self._clock))

    def run(self, table: NDArray[np.int64], repeats: Repeats | None = None) -> int:
        """Makes all calls of a table, without the helpers if another thread uses them. Returns how often."""
        num_helpers = min(kernel_threads() - 1, int(table[:, SHARES].max()) - 1)
        if num_helpers <= 0:
            return self._run(table, False, repeats)
        with self.awake(_SPINS) as has_helpers:
            if has_helpers:
                self._hire(num_helpers)
            return self._run(table, has_helpers, repeats)

    def _run(self, table: NDArray[np.int64], is_shared: bool, repeats: Repeats | None) -> int:
        words = self._address, ctypes.addressof(self._semaphore)
        functions = self._post, self._yield, self._clock
        most_runs, stop, until_ns = repeats or (1, self._address, 0)
        runs = _repeat_calls.dispatcher(table, *words, *functions, is_shared, most_runs, stop, until_ns)
        return int(runs)

    def _hire(self, num_helpers: int) -> None:
        while len(self._helpers) < num_helpers:
            semaphore = ctypes.addressof(self._semaphore)
            functions = self._wait, self._post, self._yield, self._clock
            args = self._address, self._offered.ctypes.data, semaphore, *functions
            helper = threading.Thread(target=_help.dispatcher, args=args, name="cpu-kernel", daemon=True)
            helper.start()
            self._helpers.append(helper)

    def _stop(self) -> None:
        """Makes helpers leave native code before the interpreter shuts down."""
        self._set(_STOPPED, 1)
        for _ in self._helpers:
            self._libc.sem_post(self._semaphore)
        for helper in self._helpers:
            helper.join(_STOP_S)

    def _set(self, offset: int, value: int) -> None:
        ctypes.c_int64.from_address(self._address + offset).value = value


@functools.cache
def cpu_threads() -> CpuThreads:
    """Returns the helpers of this process."""
    return CpuThreads()


def table_row(call: NativeCall, num_items: int, grain: int) -> tuple[int, ...]:
    """Returns a call as a row for :meth:`CpuThreads.run`. ``grain`` items take about 100 µs.

    The number of shares is a multiple of the number of threads, so that none waits long for another.
    """
    shares, threads = num_items * SHARES_A_GRAIN // grain, kernel_threads()
    if shares > 1:
        shares = -(-shares // threads) * threads
    return *call.addresses, num_items, max(1, min(shares, num_items, MOST_SHARES))
