"""A lane as the server sees it: a process that follows grammars, and the thread that talks to it."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import queue
import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from engine.grammar.lane_process import LaneSettings, run
from engine.grammar.lane_turns import LaneTurns, Used
from engine.grammar.messages import Followed, FollowedAll, Job, Jobs, LaneReady
from wire.codec import decode, encode

log = logging.getLogger(__name__)

_processes = multiprocessing.get_context("forkserver")
"""Starts lanes in milliseconds, as copies of a process that has already imported all modules they need."""
_processes.set_forkserver_preload(["engine.grammar.lane_process"])


IDLE_S = 20.0
"""A lane that has been idle for this long asks whether it may end, so that its memory is freed."""


_openings = itertools.count(1)
"""Numbers the grammars that lanes of this process begin."""


class _Put(NamedTuple):
    job: Job
    used: Used


class LaneEnd(NamedTuple):
    """Why a lane's process has ended."""

    why: str
    is_of_time: bool
    """Whether a job took too much processor time. If so, the same job would end any other lane as well."""


class LaneUser(Protocol):
    """Gets the results of a lane's jobs, on the lane's thread."""

    def followed(self, lane: Lane, followed: Sequence[Followed]) -> None: ...

    def ended(self, lane: Lane, end: LaneEnd, keys: Sequence[int]) -> None:
        """The process has ended by itself. ``keys`` are the keys of jobs without an answer, in order."""

    def may_end(self, lane: Lane) -> bool:
        """The lane has had nothing to do for a while. Returns whether nobody needs it, so that it ends."""

    def failed(self, lane: Lane, why: str) -> None:
        """The process can't follow grammars of this model at all."""


class Lane:
    """Starts its process when it is made. Any thread may pass jobs; the lane does them in order."""

    def __init__(
        self,
        settings: LaneSettings,
        user: LaneUser,
        turns: LaneTurns | None = None,
        used: Used | None = None,
    ) -> None:
        """``turns``: the lane computes only in turns of the client that has ``used`` so much; None: at any
        time."""
        self.settings = settings
        self._turns, self._used = turns, used or Used()
        self.num_followers = 0
        """Set by the lane's user."""
        self._user = user
        self._queue: queue.SimpleQueue[_Put | int | None] = queue.SimpleQueue()
        self._openings: list[_Put] = []
        """Jobs that begin a grammar. Jobs of answers that have already begun are done before these jobs."""
        self._process: multiprocessing.process.BaseProcess | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="grammar-lane", daemon=True)
        self._thread.start()

    def put(self, job: Job, used: Used) -> None:
        """``used``: what the client of the job's answer has used."""
        self._queue.put(_Put(job, used))

    def drop(self, key: int) -> None:
        """Drops a follower that is no longer needed."""
        self._queue.put(key)

    def end(self) -> None:
        """Ends the process at once. The lane's user gets no more calls."""
        self._has_ended = True
        self._queue.put(None)
        if self._process is not None:
            self._process.kill()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        ours, theirs = _processes.Pipe()
        process = _processes.Process(
            target=run, args=(theirs, self.settings), name="grammar-lane", daemon=True
        )
        waiting: list[Job] = []
        try:
            with self._turn():
                if self._has_ended:
                    return
                process.start()
                theirs.close()  # so that ours reports the end of the process
                self._process = process
                ready = decode(ours.recv_bytes(), LaneReady)
            if ready.error is not None:
                self._user.failed(self, ready.error)
                return
            while not self._has_ended and (jobs := self._next_jobs()) is not None:
                waiting = list(jobs.jobs)
                with self._turn():
                    ours.send_bytes(encode(jobs))  # sometimes without jobs: that shows if the process is gone
                    while waiting:
                        answer = decode(ours.recv_bytes(), FollowedAll)
                        del waiting[: len(answer.followed)]
                        self._user.followed(self, answer.followed)
        except (EOFError, OSError):
            if not self._has_ended:
                process.join()
                left = [one for one in self._left() if isinstance(one, _Put)]
                waiting += [one.job for one in (*self._openings, *left)]
                self._user.ended(self, self._end_of(process.exitcode), [job.key for job in waiting])
        finally:
            if self._process is not None:
                process.kill()
                process.join()
            ours.close()

    def _turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turns is None else self._turns.turn(self._used)

    def _next_jobs(self) -> Jobs | None:
        """Returns all jobs for answers that have already begun, and one job that begins a grammar.

        None: the lane has to end. Compiling a grammar takes as long as hundreds of masks; so a job for an
        answer that has already begun waits for one compilation at most. Clients take turns with compilations:
        the one whose last one is the longest ago is next, also if that was in another lane.
        """
        try:
            items = self._left() if self._openings else [self._queue.get(timeout=IDLE_S), *self._left()]
        except queue.Empty:
            return None if self._user.may_end(self) else Jobs((), ())
        if None in items:
            return None
        ended = {item for item in items if isinstance(item, int)}
        jobs = [item for item in items if isinstance(item, _Put) and item.job.key not in ended]
        self._openings = [one for one in self._openings if one.job.key not in ended]
        self._openings += [one for one in jobs if one.job.grammar is not None]
        now = [one.job for one in jobs if one.job.grammar is None]
        if self._openings:
            opening = min(self._openings, key=lambda one: one.used.last_opening)
            self._openings.remove(opening)
            opening.used.last_opening = next(_openings)
            now.append(opening.job)
        return Jobs(tuple(now), tuple(ended))

    def _left(self) -> list[_Put | int | None]:
        items: list[_Put | int | None] = []
        while not self._queue.empty():
            items.append(self._queue.get())
        return items

    def _end_of(self, exit_code: int | None) -> LaneEnd:
        if exit_code == -signal.SIGPROF:
            return LaneEnd("it takes more processor time than one request may have", True)
        if exit_code in (-signal.SIGABRT, 1):  # an allocation failed in Rust code, or in Python code
            return LaneEnd(f"it needs more than {self.settings.max_bytes >> 20} MB of memory", False)
        return LaneEnd(f"its process ended with exit code {exit_code}", False)
