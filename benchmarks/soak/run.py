"""One soak: first the answers of an undisturbed server, then a quiet fleet, then the fleet under faults."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx

from benchmarks.soak.answer import Answer, Outcome, Sending, receive
from benchmarks.soak.clients import Clients
from benchmarks.soak.evidence import evidence
from benchmarks.soak.faults import DRAINED, VERY_LONG, Faults, Struck
from benchmarks.soak.file_faults import FileFaults, disks
from benchmarks.soak.lineups import PLAIN, YARDSTICK, Lineup
from benchmarks.soak.questions import Question
from benchmarks.soak.tier_watch import TierWatch, deleted_segments
from testing.fleets.fleet import Fleet, held, make_processes, running

ROUTER_FLAGS = ("--request-timeout", "90")
ENVIRONMENT = {"UCX_TLS": "^cma", "TWINFANG_SANITIZE": "1"}
"""Without CMA a prefill server takes part in being read, and can be stopped halfway."""
IDLE_DEADLINE_S = 40.0
"""Longer than leases, reads and gRPC's keepalive."""
IDLE_POLL_S = 0.2
REFERENCE_CONCURRENCY = 4
DAMAGED_READS = "reads that differ from what was sent, under a valid lease"
LOGGED = {
    "requests moved by draining servers": r"(\d+) requests move to other servers",
    "leases expired": r"a lease expired before it was read",
    "reads thrown away, their lease had ended": r"the lease ended while",
    "reads given up": r"did not deliver within",
    "reads failed, the server was gone": r"the read failed",
    DAMAGED_READS: r"is not what was sent: ",
}


class SoakError(Exception):
    """The run is useless: something is wrong even before the faults."""


@dataclass(frozen=True)
class Settings:
    """Length and intensity of the soak."""

    seconds: float
    min_faults: int = 0
    """The soak goes on until so many faults are over: on a busy machine each takes longer."""
    seed: int = 0
    lineup: Lineup = PLAIN
    concurrency: int = 16
    rest_s: float = 0.05
    """A client's mean pause between two requests."""
    quiet_s: float = 30.0
    """Seconds of load without faults, at first."""
    pause_every_s: float = 60.0
    """Time between two pauses of the faults, in which all servers must give everything back."""
    very_long_freezes: float = 0.0
    """Weight of freezes longer than the keepalive, relative to all other faults."""


@dataclass(frozen=True)
class Check:
    """What servers still held in a pause, by server; empty if nothing."""

    seconds: float
    """Time until all memory was free, or until the deadline."""
    leaked: dict[str, dict[str, int]]
    load_average: float
    """The load average of the last minute, including the soak's own load."""

    @property
    def num_leaked(self) -> int:
        return sum(sum(kinds.values()) for kinds in self.leaked.values())


@dataclass
class Soak:
    """A run's results."""

    settings: Settings
    questions: int
    quiet: list[Outcome] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes under faults."""
    struck: list[Struck] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    """Retries by the code of the error."""
    quiet_retries: Counter[str] = field(default_factory=Counter)
    """Retries in the quiet part: on a busy machine a lease or a read may miss a deadline of two seconds."""
    logged: dict[str, int] = field(default_factory=dict)
    unclean_stops: list[str] = field(default_factory=list)
    problem: str = ""
    """The reason for an early end of the run."""
    seconds: float = 0.0
    """Seconds of faults, including pauses."""
    tiers: Counter[str] = field(default_factory=Counter)
    """What servers with tiers have counted, as far as it was seen before they were killed."""

    @property
    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "wrong"]

    @property
    def num_leaked(self) -> int:
        return sum(check.num_leaked for check in self.checks)

    @property
    def num_corrupted(self) -> int:
        """How often the sanitizer found a fault: the router tried again, and the client did not notice."""
        return self.retries["state_corrupted"]

    @property
    def is_good(self) -> bool:
        is_right = not (self.wrong or self.num_corrupted or self.logged.get(DAMAGED_READS))
        return is_right and not (self.num_leaked or self.unclean_stops or self.problem)


def soak(settings: Settings, folder: Path, say: Callable[[str], None] = lambda _: None) -> Soak:
    """Runs the soak with logs in ``folder``. Raises :class:`SoakError` if the quiet fleet is already
    wrong."""
    lineup = settings.lineup
    questions = lineup.questions(settings.seed)
    result = Soak(settings, len(questions))
    say(f"{len(questions)} questions for a server that nobody disturbs")
    expected = undisturbed(questions, folder)
    with disks(folder, lineup.tiered) as directories:
        servers, routers = make_processes(
            folder,
            lineup.started(directories),
            lineup.routers,
            router_flags=ROUTER_FLAGS,
            environment=ENVIRONMENT,
            with_metrics=lineup.tiered,
        )
        fleet = Fleet(folder, servers, routers, lineup.routers)
        files = FileFaults(directories, settings.seed)
        with (
            running(fleet),
            _clients(fleet, questions, expected, settings) as clients,
            contextlib.closing(TierWatch(fleet, lineup.tiered)) as watch,
        ):
            say("the fleet runs; quiet load")
            _quiet(fleet, clients, result)
            say("faults")
            try:
                _disturbed(fleet, clients, files, watch, result, say)
            except AssertionError as error:
                result.problem = f"a wait that took too long: {error}"
            result.tiers = watch.counted
            result.unclean_stops += _stop(fleet)
    return result


def undisturbed(questions: Sequence[Question], folder: Path) -> dict[str, Answer]:
    """Returns each question's answer from one server of both roles, which ends before any fault can strike
    it.

    Without handoffs and a second server, an answer damaged by a fault or a handoff can't become the
    reference. All questions are asked twice, in other batches and with a warm prefix cache, and the answers
    must be the same.
    """
    servers, routers = make_processes(
        folder, YARDSTICK, {"reference": tuple(YARDSTICK)}, environment=ENVIRONMENT
    )
    fleet = Fleet(folder, servers, routers, {"reference": tuple(YARDSTICK)})
    with running(fleet), ThreadPoolExecutor(REFERENCE_CONCURRENCY) as pool, httpx.Client() as client:

        def answer(question: Question) -> Answer:
            return receive(client, question, Sending(fleet["reference"].url, question.name, stream=False))

        first = list(pool.map(answer, questions))
        second = list(pool.map(answer, reversed(questions)))[::-1]
    for question, once, again in zip(questions, first, second, strict=True):
        if once.status != 200 or once.problem or once != again:
            raise SoakError(f"{question.name} has no one answer: {once} and {again}")
    return {question.name: one for question, one in zip(questions, first, strict=True)}


def _stop(fleet: Fleet) -> list[str]:
    """Asks all to stop; returns those that did not stop cleanly, with the ends of their logs."""
    alive = [process for process in fleet.processes if process.is_alive]
    return [f"{one.name}: exit code {code}: {one.log[-400:]}" for one in alive if (code := one.stop())]


@contextlib.contextmanager
def _clients(
    fleet: Fleet, questions: Sequence[Question], expected: Mapping[str, Answer], settings: Settings
) -> Iterator[Clients]:
    clients = Clients(
        [router.url for router in fleet.routers.values()],
        questions,
        expected,
        seed=settings.seed,
        concurrency=settings.concurrency,
        rest_s=settings.rest_s,
        salted=settings.lineup.salted,
    )
    try:
        yield clients
    finally:
        clients.close()


def _quiet(fleet: Fleet, clients: Clients, result: Soak) -> None:
    """Runs the same load without faults: all answers must be right."""
    clients.resume()
    time.sleep(result.settings.quiet_s)
    clients.pause()
    result.quiet, clients.outcomes = clients.outcomes, []
    strange = [one for one in result.quiet if one.verdict not in ("right", "cancelled")]
    result.quiet_retries, check = _retries(fleet), until_idle(fleet)
    if strange or result.quiet_retries["state_corrupted"] or check.leaked:
        raise SoakError(
            f"the quiet fleet: {strange[:3]}, {result.quiet_retries}, not given back {check.leaked}"
        )


def _disturbed(
    fleet: Fleet,
    clients: Clients,
    files: FileFaults,
    watch: TierWatch,
    result: Soak,
    say: Callable[[str], None],
) -> None:
    settings = result.settings
    weights = dict(settings.lineup.weights)
    if settings.very_long_freezes:
        weights[VERY_LONG] = settings.very_long_freezes
    faults = Faults(
        fleet,
        seed=settings.seed,
        weights=weights,
        num_in_flight=lambda: clients.num_in_flight,
        files=files,
    )
    result.outcomes, result.struck = clients.outcomes, faults.struck
    started = time.monotonic()
    try:
        while (left := settings.seconds - (time.monotonic() - started)) > 0:
            clients.resume()
            # No short stretch at the end: it would be over before the first fault.
            if left < 1.5 * settings.pause_every_s:
                faults.strike_for(left, min_faults=settings.min_faults)
            else:
                faults.strike_for(settings.pause_every_s)
            clients.pause()
            result.checks.append(until_idle(fleet, watch))
            result.seconds = time.monotonic() - started
            verdicts, check = Counter(one.verdict for one in result.outcomes), result.checks[-1]
            say(
                f"{result.seconds:5.0f} s: {len(faults.struck)} faults, {dict(verdicts)}, "
                f"idle after {check.seconds:.1f} s, leaked {check.leaked or 'nothing'}"
            )
    except AssertionError:
        for line in evidence(fleet):  # before anything is stopped
            say(line)
        raise
    finally:
        # If a wait has failed, clients go on while all is stopped: that is not what is judged.
        result.outcomes = list(clients.outcomes)
        faults.close()
        logs = "".join(process.log for process in fleet.processes)
        result.unclean_stops = [
            f"{one.process}: {one.note}" for one in faults.struck if one.kind == DRAINED and one.note
        ]
        result.logged = {name: _count(pattern, logs) for name, pattern in LOGGED.items()}
    result.retries = _retries(fleet) - result.quiet_retries


def until_idle(fleet: Fleet, watch: TierWatch | None = None) -> Check:
    """Waits until every server has all its blocks, slots and leases back; returns what is missing at the
    deadline, and what processes have grown by."""
    started = time.monotonic()
    while True:
        leaked = {name: held_by for name in fleet.servers if (held_by := _held(fleet, name))}
        seconds = time.monotonic() - started
        if not leaked or seconds > IDLE_DEADLINE_S:
            grown = {} if watch is None else watch.grown()
            both = {name: leaked.get(name, {}) | grown.get(name, {}) for name in leaked | grown}
            return Check(seconds, both, os.getloadavg()[0])
        time.sleep(IDLE_POLL_S)


def _held(fleet: Fleet, name: str) -> dict[str, int]:
    try:
        found = held(fleet.stats(name))
    except grpc.RpcError:
        return {"servers that say nothing": 1}
    found["deleted segments"] = deleted_segments(fleet.servers[name])
    return {kind: count for kind, count in found.items() if count}


def _retries(fleet: Fleet) -> Counter[str]:
    total: Counter[str] = Counter()
    for router in fleet.routers:
        total.update({code: int(count) for code, count in fleet.retries(router).items()})
    return total


def _count(pattern: str, text: str) -> int:
    """Counts matches; if the pattern has a number, adds the numbers."""
    found = re.findall(pattern, text)
    return sum(int(match) if match.isdigit() else 1 for match in found)
