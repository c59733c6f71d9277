"""Runs cases against a pair, and counts how they ended."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import httpx
import psutil

from conformance.cases import Case
from conformance.client import Reply, connected
from conformance.models import checkpoint
from conformance.oracle import Oracle, OracleError, Verdict
from conformance.pair import Pair, Profile, RunningPair
from conformance.questions import Question, random_questions
from conformance.trial import Trial
from wire.errors import TwinfangError

QUIET_POLL_S = 0.2
MAX_EXAMPLES = 3
MAX_PROBLEM_CHARS = 1500
STARVED_S = 1.0
"""A client that stood still for longer did not play its case as it is meant: it froze and thawed too late,
and counted time as the system's that was its own."""
FAILURES = (TwinfangError, OracleError, AssertionError, OSError, httpx.HTTPError, psutil.Error)
"""Errors of a system that can't be started, asked or disturbed as a case needs it."""


@dataclass(frozen=True)
class Settings:
    """How a suite is run."""

    folder: Path
    """For models and logs."""
    runs: int = 3
    deadline_s: float = 90.0
    """A request without an answer after this time hangs."""
    quiet_s: float = 45.0
    """Time after a run within which all must be given back. Longer than a lease."""
    seed: int = 0
    long_answer: int = 240
    """Tokens of a long answer. Three of them take longer than a lease."""


@dataclass
class Result:
    """One run of one case."""

    case: str
    run: int
    right: int = 0
    wrong: int = 0
    errors: int = 0
    hangs: int = 0
    cancelled: int = 0
    ties: int = 0
    """Answers that differ by a tie, and count as right."""
    lost: dict[str, int] = field(default_factory=dict)
    """What servers still held after ``quiet_s``, by server and kind."""
    slowest_s: float = 0.0
    examples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    """Why the run was not possible."""
    client_late_s: float | None = None
    """The longest time for which the suite's own client got no core; None: not measured."""

    @property
    def is_starved(self) -> bool:
        """Whether the run says nothing of the system, because the client itself stood still."""
        return self.client_late_s is not None and self.client_late_s > STARVED_S

    @property
    def counts(self) -> bool:
        """Whether the run was as it should be. Otherwise it is worth another try."""
        return not (self.problem or self.is_starved)

    @property
    def num_lost(self) -> int:
        return sum(self.lost.values())

    @property
    def is_good(self) -> bool:
        """Whether no answer was wrong, nothing hung and nothing was lost. Clear errors are allowed."""
        return not (self.wrong or self.hangs or self.lost or self.problem)

    def count(self, verdict: Verdict) -> None:
        fields = {"right": "right", "wrong": "wrong", "error": "errors", "hang": "hangs"}
        name = fields[verdict.outcome]
        setattr(self, name, getattr(self, name) + 1)
        self.ties += verdict.ties
        self.slowest_s = max(self.slowest_s, round(verdict.seconds, 1))
        if verdict.detail and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{verdict.outcome}: {verdict.detail}")


def suite(
    pair: Pair,
    cases: Sequence[Case],
    settings: Settings,
    say: Callable[[str], None] = lambda _: None,
    done: Collection[tuple[str, int]] = (),
) -> Iterator[Result]:
    """Runs all cases, except the runs in ``done``; yields each run's result. A case that can't be run has a
    problem in its result, and the others go on."""
    runs = [(run, case) for run in range(settings.runs) for case in cases if (case.name, run) not in done]
    for profile, group in groupby(sorted(runs, key=_place), _profile):
        of_profile, ended = list(group), set[tuple[str, int]]()
        try:
            for result in _group(pair, profile, of_profile, settings, say):
                ended.add((result.case, result.run))
                say(line(result))
                yield result
        except FAILURES as error:
            say(f"{profile.name}: {error}")
            for run, case in of_profile:
                if (case.name, run) not in ended:
                    yield Result(case.name, run, problem=_brief(error))


def _profile(one: tuple[int, Case]) -> Profile:
    return one[1].profile


def _place(one: tuple[int, Case]) -> tuple[bool, str]:
    """Runs of one profile stand together, since the pair is started anew for each."""
    name = _profile(one).name
    return name != "plain", name


def asked(runs: Iterable[tuple[int, Case]], settings: Settings) -> dict[tuple[str, int], list[Question]]:
    """Returns the questions of every run of a case: others in each, so that no cache knows them."""
    return {
        (case.name, run): case.ask(random.Random(f"{case.name} {run} {settings.seed}"), settings.long_answer)
        for run, case in runs
    }


def _group(
    pair: Pair,
    profile: Profile,
    runs: list[tuple[int, Case]],
    settings: Settings,
    say: Callable[[str], None],
) -> Iterator[Result]:
    model = checkpoint(profile.model, settings.folder)
    oracle = Oracle(model, settings.folder / f"{pair.name}-{profile.name}-answers.json")
    questions = asked(runs, settings)
    logs = settings.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    everything = [question for some in questions.values() for question in some]
    if not oracle.knows(everything):
        say(f"{pair.name}, {profile.name}: {len(everything)} questions for a single server")
        with pair.monolith(profile, model) as url, connected(url, settings.deadline_s) as client:
            oracle.learn(client, model.name, everything)
    with pair.running(profile, model, logs) as running:
        for run, case in runs:
            result = one(pair, running, case, questions[case.name, run], oracle, run, settings)
            yield result
            if (result.hangs or result.lost or result.problem) and (run, case) != runs[-1]:
                say(f"{pair.name} is started anew, so that the next run finds all memory free")
                running.restart()


def _warm_up(running: RunningPair, settings: Settings) -> None:
    """Lets both servers meet, so that no case begins with the handshake that follows a start."""
    with connected(running.url, settings.deadline_s) as client:
        [question] = random_questions(random.Random("warm-up"), [100], 8)
        client.send(question.body(running.model)).result()


def one(
    pair: Pair,
    running: RunningPair,
    case: Case,
    questions: Sequence[Question],
    oracle: Oracle,
    run: int,
    settings: Settings,
) -> Result:
    """Runs one case once, and lets the pair recover."""
    result = Result(case.name, run)
    try:
        _warm_up(running, settings)
    except FAILURES as error:
        result.problem = _brief(error)
        return result
    with connected(running.url, settings.deadline_s) as client:
        without_drafts = dict(pair.without_drafts)
        trial = Trial(running, client, pair.lease_s, without_drafts, settings.deadline_s, result.notes)
        try:
            sent = case.play(trial, questions)
            replies: list[Reply | None] = []
            for future in sent:
                try:
                    replies.append(future.result())
                except CancelledError:
                    replies.append(None)
            running.recover()
        except FAILURES as error:
            result.problem = _brief(error)
            return result
        finally:
            result.client_late_s = round(client.late_s, 2)
    for question, reply in zip(questions, replies, strict=True):
        if reply is None:
            result.cancelled += 1
        else:
            result.count(oracle.judge(question, reply))
    result.lost = _lost(running, settings.quiet_s)
    return result


def _lost(running: RunningPair, quiet_s: float) -> dict[str, int]:
    """Returns what is still held when nothing has been asked for ``quiet_s``, or nothing as soon as all is
    given back."""
    deadline = time.monotonic() + quiet_s
    while True:
        held = _held(running)
        if held == {} or time.monotonic() > deadline:
            return held
        time.sleep(QUIET_POLL_S)


def _held(running: RunningPair) -> dict[str, int]:
    try:
        told: Mapping[str, int] = running.held()
    except (OSError, ValueError) as error:
        return {f"no metrics: {type(error).__name__}": 1}
    return {name: count for name, count in told.items() if count}


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS]


def line(result: Result) -> str:
    """One line for a terminal."""
    words = f"right {result.right}, wrong {result.wrong}, errors {result.errors}, hangs {result.hangs}"
    more = [f"cancelled {result.cancelled}"] * bool(result.cancelled) + [f"ties {result.ties}"] * bool(
        result.ties
    )
    more += (
        [f"lost {result.lost}"] * bool(result.lost) + result.notes + [result.problem] * bool(result.problem)
    )
    more += [f"the client stood still for {result.client_late_s:g} s"] * result.is_starved
    more += result.examples[:1]
    return f"{result.case} {result.run + 1}: {', '.join([words, *more])} ({result.slowest_s:g} s)"
