"""One run of one case: the pair, the client, and what the case waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from conformance.client import Client, Reply
from conformance.pair import RunningPair
from conformance.questions import Question
from testing.conditions import wait_until

HANDED_OVER_S = 20.0
"""Time within which a few prompts are prefilled."""
MARGIN_S = 1.5
"""Time after a lease's end by which every server has seen that it is over."""


@dataclass
class Trial:
    """What a case gets."""

    pair: RunningPair
    client: Client
    lease_s: float
    without_drafts: dict[str, object]
    deadline_s: float
    notes: list[str] = field(default_factory=list)
    """What was not as the case intends, for example because the system behaves otherwise."""

    def send(self, questions: Sequence[Question]) -> list[Future[Reply]]:
        return [
            self.client.send(
                question.body(self.pair.model) | ({} if question.drafts else self.without_drafts)
            )
            for question in questions
        ]

    def until_handed_over(self, count: int) -> None:
        """Waits until so many prompts are prefilled and not taken over. A system may do it otherwise: then a
        note says so, and the case goes on."""
        try:
            wait_until(lambda: self.pair.num_handed_over() >= count, timeout_s=HANDED_OVER_S)
        except AssertionError:
            self.notes.append(f"{self.pair.num_handed_over()} of {count} prompts were prefilled")

    def until_answered(self, sent: Sequence[Future[Reply]]) -> None:
        wait(sent, self.deadline_s)

    def wait_out_lease(self) -> None:
        self.wait(self.lease_s + MARGIN_S)

    def wait(self, seconds: float) -> None:
        """Lets time pass: the duration is what the case is about."""
        time.sleep(seconds)
