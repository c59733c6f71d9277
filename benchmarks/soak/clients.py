"""Clients in a closed loop: a fixed number of requests in flight, with random questions."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Mapping, Sequence

import httpx

from benchmarks.soak.answer import ANSWER_TIMEOUT_S, Answer, Outcome, Sending, ask
from benchmarks.soak.questions import Question
from testing.conditions import wait_until

STREAMED = 0.6
CANCELLED = 0.15
SALTED = 0.5
"""Shares of the requests."""
MAX_EVENTS_BEFORE_CANCEL = 40
MAX_CANCEL_S = 1.0


class Clients:
    """``concurrency`` threads, each with its own connection to each router.

    ``rest_s`` is a client's mean pause between two requests, ``cancelled`` the share of cancelled requests,
    ``salted`` the share of those that no cache helps.
    ``outcomes`` grows as answers arrive.
    """

    def __init__(
        self,
        urls: Sequence[str],
        questions: Sequence[Question],
        expected: Mapping[str, Answer],
        *,
        seed: int,
        concurrency: int,
        rest_s: float,
        cancelled: float = CANCELLED,
        salted: float = SALTED,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._urls, self._questions, self._expected = urls, questions, expected
        self._rest_s = rest_s
        self._shares = (STREAMED, cancelled, salted)
        self._numbers = itertools.count()
        self._open = threading.Event()
        self._ended = threading.Event()
        self._busy: set[int] = set()
        self._fault: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(i, random.Random(f"client {seed} {i}")), daemon=True)
            for i in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_in_flight(self) -> int:
        return len(self._busy)

    def resume(self) -> None:
        self._open.set()

    def pause(self) -> None:
        """Pauses the clients. Returns once the last answer has arrived."""
        self._open.clear()
        wait_until(lambda: not self._busy, "all requests are answered", 2 * ANSWER_TIMEOUT_S)
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Closes the clients. A thread that waits for an answer is left alone: it ends with the answer or
        with its router."""
        self._ended.set()
        self._open.set()

    def _work(self, index: int, rng: random.Random) -> None:
        try:
            with httpx.Client() as client:
                while self._may_ask(index):
                    self.outcomes.append(self._ask(client, rng))
                    self._busy.discard(index)
                    self._ended.wait(rng.uniform(0.0, 2 * self._rest_s))
        except BaseException as fault:
            self._fault = fault
        finally:
            self._busy.discard(index)

    def _may_ask(self, index: int) -> bool:
        while not self._ended.is_set():
            self._open.wait()
            self._busy.add(index)  # before the gate is looked at once more: pause() must not miss this client
            if self._open.is_set():
                return not self._ended.is_set()
            self._busy.discard(index)
        return False

    def _ask(self, client: httpx.Client, rng: random.Random) -> Outcome:
        question = rng.choice(self._questions)
        number = next(self._numbers)
        stream, cancelled, salted = (rng.random() < share for share in self._shares)
        sending = Sending(
            rng.choice(self._urls),
            f"soak-{number}",
            stream,
            salt=f"salt-{number}" if salted else "",
            cancel_after_events=rng.randint(1, MAX_EVENTS_BEFORE_CANCEL) if cancelled and stream else None,
            cancel_after_s=rng.uniform(0.01, MAX_CANCEL_S) if cancelled and not stream else None,
        )
        return ask(client, question, sending, self._expected[question.name])
