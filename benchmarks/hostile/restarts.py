"""What clients notice when servers are killed and restarted; it should be nothing.

    python -m benchmarks.hostile.restarts --out benchmarks/results/hostile-restarts.json     # four minutes

``twinfang up`` with default flags restarts dead processes. First one prefill and one decode server are
killed, each under 6 clients in a closed loop; then two of each are killed at random for a minute. Every
answer is compared with the same stack's answer before any kill. Ends with 1 if a request was answered 5xx, a
stream broke or a token differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.idle import running
from benchmarks.soak.answer import Answer, Outcome, Sending, receive
from benchmarks.soak.clients import Clients
from benchmarks.soak.questions import Question, make_questions
from testing.conditions import wait_until
from testing.fleets.fleet import START_DEADLINE_S, START_INTERVAL_S
from twinfang.bench.machine import machine
from twinfang.launch import LaunchedStack

NUM_CLIENTS = 6
REST_S = 0.05
"""A client's mean pause between two requests."""
QUIET_S = 3.0
"""Seconds of load before a kill, and after the killed server is back."""
KILL_EVERY_S = (3.0, 6.0)
MAX_KILLS_EACH = 4
"""The supervisor gives up a child that dies more than five times in two minutes."""
ONE_OF_EACH, TWO_OF_EACH = ("--prefill", "1", "--decode", "1"), ("--prefill", "2", "--decode", "2")
NEEDS_NO_PREFILL = "one-"
"""Questions of one token: they show nothing about an absent prefill server."""
MAX_EXAMPLES = 10


class NotExactError(Exception):
    """The stack's own answers differ even before any kill."""


@dataclass(frozen=True)
class Kill:
    """A killed server, with times by ``time.monotonic``."""

    server: str
    at: float


def undisturbed(stack: LaunchedStack, questions: Sequence[Question]) -> dict[str, Answer]:
    """Returns each question's answer, asked twice. Raises :class:`NotExactError` if the two differ."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, httpx.Client() as client:

        def answer(question: Question) -> Answer:
            return receive(client, question, Sending(stack.url, question.name, stream=False))

        first, second = (list(pool.map(answer, questions)) for _ in range(2))
    for question, once, again in zip(questions, first, second, strict=True):
        if once.status != 200 or once.problem or once != again:
            raise NotExactError(f"{question.name} has no one answer: {once} and {again}")
    return {question.name: one for question, one in zip(questions, first, strict=True)}


def clients_of(
    stack: LaunchedStack, questions: Sequence[Question], expected: Mapping[str, Answer], seed: int
) -> Clients:
    return Clients(
        [stack.url],
        questions,
        expected,
        seed=seed,
        concurrency=NUM_CLIENTS,
        rest_s=REST_S,
        cancelled=0.0,
    )


def kill(stack: LaunchedStack, name: str) -> Kill:
    os.kill(stack.processes()[name].pid, signal.SIGKILL)
    return Kill(name, time.monotonic())


def wait_until_whole(stack: LaunchedStack, restarts: Mapping[str, int]) -> None:
    """Waits until all servers run and these have been restarted the given number of times."""

    def is_whole() -> bool:
        found = stack.processes()
        return bool(stack.status()["ready"]) and all(
            name in found and found[name].restarts >= count for name, count in restarts.items()
        )

    wait_until(is_whole, "the killed servers are back", START_DEADLINE_S, interval_s=START_INTERVAL_S)


# --- the trials ----------------------------------------------------------------------------------------


def one_of_each(questions: Sequence[Question], seed: int) -> list[dict[str, Any]]:
    """Kills each role's only server in turn."""
    found = []
    with running(ONE_OF_EACH) as stack:
        expected = undisturbed(stack, questions)
        clients = clients_of(stack, questions, expected, seed)
        try:
            for name in ("prefill-0", "decode-0"):
                clients.outcomes = []
                clients.resume()
                time.sleep(QUIET_S)
                killed = kill(stack, name)
                wait_until_whole(stack, {name: 1})
                back_s = time.monotonic() - killed.at
                time.sleep(QUIET_S)
                clients.pause()
                figures = {"servers": "1 + 1", "killed": [name], "back_s": round(back_s, 1)}
                found.append(figures | figures_of(clients.outcomes, [killed]))
        finally:
            clients.close()
    return found


def random_kills(questions: Sequence[Question], seed: int, seconds: float) -> dict[str, Any]:
    """Kills any of four servers at random, sometimes several at a time."""
    rng = random.Random(f"kills {seed}")
    with running(TWO_OF_EACH) as stack:
        expected = undisturbed(stack, questions)
        clients = clients_of(stack, questions, expected, seed)
        names = [name for name in stack.processes() if name != "router"]
        kills: list[Kill] = []
        counts: Counter[str] = Counter()
        try:
            clients.resume()
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, rng.uniform(*KILL_EVERY_S)))
                found = stack.processes()
                able = [name for name in names if name in found and found[name].restarts == counts[name]]
                able = [name for name in able if counts[name] < MAX_KILLS_EACH]
                if able:
                    kills.append(kill(stack, rng.choice(able)))
                    counts[kills[-1].server] += 1
            wait_until_whole(stack, counts)
            back_s = time.monotonic() - kills[-1].at
            clients.pause()
        finally:
            clients.close()
    figures = {"servers": "2 + 2", "killed": [one.server for one in kills], "back_s": round(back_s, 1)}
    return figures | figures_of(clients.outcomes, kills)


# --- figures -------------------------------------------------------------------------------------------


def figures_of(outcomes: Sequence[Outcome], kills: Sequence[Kill]) -> dict[str, Any]:
    """Returns the clients' results from the first kill on."""
    first = kills[0].at
    since = [one for one in outcomes if one.sent + one.seconds >= first]
    sorts = Counter(sort_of(one) for one in since)
    return {
        "load_average": os.getloadavg()[0],
        "requests": len(since),
        "right": sorts["right"],
        "answered_5xx": sorts["5xx"],
        "streams_broken": sorts["broken"],
        "other": sorts["other"],
        "answered_after_s": worst_of([answered_after_s(since, one) for one in kills]),
        "slowest_s": round(max((one.seconds for one in since), default=0.0), 2),
        "longest_silence_s": round(max((one.longest_silence_s for one in since), default=0.0), 2),
        "codes": dict(Counter(one.code for one in since if one.verdict == "error")),
        "examples": [one.detail for one in since if one.verdict != "right"][:MAX_EXAMPLES],
    }


def sort_of(outcome: Outcome) -> str:
    """Returns the kind of outcome. ``broken``: an answer that began and then ended with an error, too early
    or with other tokens."""
    if outcome.verdict == "right":
        return "right"
    if outcome.status >= 500:
        return "5xx"
    return "broken" if outcome.status == 200 else "other"


def answered_after_s(outcomes: Sequence[Outcome], killed: Kill) -> float | None:
    """Returns the time from the kill until a request that was sent after it was answered."""
    ends = [
        one.sent + one.seconds
        for one in outcomes
        if one.verdict == "right" and one.sent >= killed.at and not one.question.startswith(NEEDS_NO_PREFILL)
    ]
    return round(min(ends) - killed.at, 2) if ends else None


def worst_of(seconds: Sequence[float | None]) -> float | None:
    """Returns the longest time; None if one is None, which means never answered."""
    known = [one for one in seconds if one is not None]
    return max(known) if len(known) == len(seconds) else None


def table(trials: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| servers | killed | requests | right | 5xx | broken streams | other | all back after, s "
        "| answered after, s | slowest answer, s | longest silence, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in trials:
        killed = one["killed"][0] if len(one["killed"]) == 1 else f"{len(one['killed'])} at random"
        names = ("requests", "right", "answered_5xx", "streams_broken", "other")
        cells = [one["servers"], killed, *(str(one[name]) for name in names)]
        cells += [str(one[name]) for name in ("back_s", "answered_after_s", "slowest_s", "longest_silence_s")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def is_met(trial: Mapping[str, Any]) -> bool:
    """Returns whether the goal is met: no client noticed anything."""
    return bool(trial["requests"] and trial["right"] == trial["requests"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile.restarts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of random kills; default: 60")
    parser.add_argument("--seed", type=int, default=0, help="of requests and kills")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON with machine and versions")
    parser.add_argument("--note", default="", help="a line about this run for the JSON")
    options = parser.parse_args()
    facts = machine()
    questions = make_questions(options.seed)
    trials = [*one_of_each(questions, options.seed), random_kills(questions, options.seed, options.seconds)]
    print(table(trials))
    print("0 x 5xx, 0 broken streams:", "met" if all(map(is_met, trials)) else "not met")
    if options.out is not None:
        report = {"machine": facts, "note": options.note, "trials": trials}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(map(is_met, trials)) else 1


if __name__ == "__main__":
    sys.exit(main())
