"""Random faults: servers killed, frozen and drained, their files disturbed, one of each role at a time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from benchmarks.soak.file_faults import DAMAGED, FILE_WEIGHTS, FULL, REMOVED, FileFaults
from testing.conditions import wait_until
from testing.fleets.fleet import START_DEADLINE_S, START_INTERVAL_S, Fleet, Process

DEADLINE_S = 2.0
"""The fleet's ``--lease-ttl`` and ``--transfer-deadline``."""
KEEPALIVE_S = 30.0
"""gRPC's keepalive: a peer that is silent for this long is given up."""
PAUSE_S = (0.5, 3.0)
"""Shortest and longest pause between two faults."""
DOWN_S = 2.0
"""Longest time until a dead server is started again."""
MAX_RESTARTS = 3

KILLED, DRAINED, FROZEN_KILLED = "killed", "drained, restarted", "frozen, then killed"
SHORT, LONG = "frozen for less than the deadlines", "frozen for longer than the deadlines"
VERY_LONG = "frozen for longer than the keepalive"
ENDED = "ended by itself, restarted"

WEIGHTS = {KILLED: 0.3, DRAINED: 0.2, FROZEN_KILLED: 0.1, SHORT: 0.15, LONG: 0.25}
"""Weights of the faults of servers. A router is only frozen: its death would end its clients' connections."""
FREEZES = {SHORT: (0.05, 0.75 * DEADLINE_S), LONG: (1.25 * DEADLINE_S, 4 * DEADLINE_S)}
FREEZES[FROZEN_KILLED] = FREEZES[LONG]
FREEZES[VERY_LONG] = (1.1 * KEEPALIVE_S, 1.4 * KEEPALIVE_S)
FULL_S = (1.0, 8.0)
"""Seconds, at least and at most; ``FULL_S`` for a full disk."""
KINDS = {"router": {SHORT, LONG}, "decode": {*WEIGHTS, VERY_LONG}}
"""What may happen to a role, if not everything."""
ROLES = {"prefill": 0.45, "decode": 0.45, "router": 0.1}


@dataclass(frozen=True)
class Struck:
    """One fault that happened."""

    kind: str
    process: str
    at: float
    """``time.monotonic()``"""
    seconds: float
    """Time until the process was as before, and in use."""
    num_in_flight: int
    """Requests of all clients when it struck."""
    note: str = ""


class Faults:
    """Chooses in the caller's thread what to disturb, and does it in its own threads.

    At most one process of each role is disturbed at a time, so that requests still have a server. A server
    that ends by itself is started again, and recorded. ``files`` are for the faults of ``FILE_WEIGHTS``.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        seed: int,
        weights: Mapping[str, float],
        num_in_flight: Callable[[], int],
        files: FileFaults | None = None,
    ) -> None:
        self.struck: list[Struck] = []
        self._fleet = fleet
        self._rng = random.Random(f"faults {seed}")
        self._weights = weights
        self._num_in_flight = num_in_flight
        self._files = files
        self._busy: dict[str, Future[None]] = {}  # by the disturbed process
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(len(fleet.processes))

    def strike_for(self, seconds: float, *, min_faults: int = 0) -> None:
        """Makes faults for ``seconds``, and longer until ``min_faults`` have been made since the start.

        Returns once all servers are in use. Raises the errors of the faults.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(self.struck) < min_faults:
            self._settle()
            self._strike_one()
            time.sleep(self._rng.uniform(*PAUSE_S))
        while self._busy:
            self._settle()
            time.sleep(0.05)
        wait_until(
            self._is_whole,
            "every router uses all its servers",
            START_DEADLINE_S,
            interval_s=START_INTERVAL_S,
        )

    def close(self) -> None:
        """Ends running faults and leaves the processes as they are."""
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)

    # --- choosing, in the caller's thread --------------------------------------------------------

    def _settle(self) -> None:
        """Cleans up faults that are over, and servers that ended without a fault."""
        for name, future in list(self._busy.items()):
            if future.done():
                del self._busy[name]
                future.result()
        for name, server in self._fleet.servers.items():
            if name not in self._busy and not server.is_alive:
                self._busy[name] = self._pool.submit(self._revive, server)

    def _strike_one(self) -> None:
        role = self._rng.choices(list(ROLES), list(ROLES.values()))[0]
        candidates = [process for process in self._fleet.processes if process.role == role]
        kinds = KINDS.get(role, self._weights.keys())
        weights = {kind: weight for kind, weight in self._weights.items() if kind in kinds}
        kind = self._rng.choices(list(weights), list(weights.values()))[0]
        least_s, most_s = FULL_S if kind == FULL else FREEZES.get(kind, (0.0, 0.0))
        process, lasts_s = self._rng.choice(candidates), self._rng.uniform(least_s, most_s)
        down_s = self._rng.uniform(0.0, DOWN_S)
        if not any(one.name in self._busy for one in candidates):
            self._busy[process.name] = self._pool.submit(self._strike, process, kind, lasts_s, down_s)

    def _is_whole(self) -> bool:
        return all(one.is_alive for one in self._fleet.processes) and self._is_used("prefill", "decode")

    # --- a fault, in a thread of its own ---------------------------------------------------------

    def _strike(self, process: Process, kind: str, lasts_s: float, down_s: float) -> None:
        struck, num_in_flight, note = time.monotonic(), self._num_in_flight(), ""
        if kind in FREEZES:
            process.freeze()
            self._ended.wait(lasts_s)
        if kind in FILE_WEIGHTS:
            note = self._disturb_files(process, kind, lasts_s)
        elif kind in (KILLED, FROZEN_KILLED):
            process.kill()
        elif kind == DRAINED:
            code = process.stop()
            note = f"exit code {code}" if code else ""
        else:
            process.thaw()
        if not process.is_alive:
            self._ended.wait(down_s)
            self._start(process)
        self._until_used(process)
        seconds = time.monotonic() - struck
        self.struck.append(Struck(kind, process.name, struck, seconds, num_in_flight, note))

    def _disturb_files(self, process: Process, kind: str, lasts_s: float) -> str:
        assert self._files is not None, "this fleet has no files"
        if kind == DAMAGED:
            process.kill()
            return self._files.damage(process.name)
        if kind == REMOVED:
            self._files.remove(process.name)
        elif kind == FULL:
            with self._files.full(process.name):
                self._ended.wait(lasts_s)
        return ""

    def _revive(self, server: Process) -> None:
        """Restarts a server that ended although nobody told it to."""
        assert server.handle is not None
        found, num_in_flight = time.monotonic(), self._num_in_flight()
        note = f"exit code {server.handle.returncode}: {server.log[-400:]}"
        self._start(server)
        self._until_used(server)
        seconds = time.monotonic() - found
        self.struck.append(Struck(ENDED, server.name, found, seconds, num_in_flight, note))

    def _start(self, process: Process) -> None:
        if not self._ended.is_set():
            self._fleet.start_alone(process.name)

    def _until_used(self, process: Process) -> None:
        """Waits until the process is used or has ended; an ended process is handled then."""

        def is_over() -> bool:
            if self._ended.is_set() or not process.is_alive:
                return True
            return self._fleet.serves(process) if process.role == "router" else self._is_used(process.role)

        wait_until(is_over, f"{process.name} is in use", START_DEADLINE_S, interval_s=START_INTERVAL_S)

    def _is_used(self, *roles: str) -> bool:
        try:
            return self._fleet.is_connected(roles)
        except httpx.HTTPError:  # that router is frozen
            return False
