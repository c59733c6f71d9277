"""What is right: the answer of the same engine as one server, or another one by the project's tie rule.

An answer that differs from the single server's is compared with transformers' logits, as in the exactness
tests (:mod:`testing.oracles.ties`). Each of its tokens must be the best one by the logits after the tokens
before it, or equal to the best one up to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.json_file import read_json, write_json
from conformance.client import Client, Reply
from conformance.questions import Question
from testing.checkpoints.families import family_logits
from testing.oracles.ties import count_ties

Outcome = Literal["right", "wrong", "error", "hang"]
AT_ONCE = 8


class OracleError(Exception):
    """The single server did not answer, so nothing can be judged."""


@dataclass(frozen=True)
class Verdict:
    """How one request ended."""

    outcome: Outcome
    detail: str = ""
    ties: int = 0
    seconds: float = 0.0


@dataclass
class Oracle:
    """Answers of a single server, by question."""

    model: Path
    file: Path
    """Keeps the answers for the next run in the same folder."""
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = read_json(self.file) or {}
        self.answers = {key: tuple(tokens) for key, tokens in known.items()}

    def knows(self, questions: Iterable[Question]) -> bool:
        return all(question.key in self.answers for question in questions)

    def learn(self, client: Client, name: str, questions: Sequence[Question]) -> None:
        """Asks the single server. Raises :class:`OracleError` if it does not answer a question."""
        under_way: deque[tuple[Question, Future[Reply]]] = deque()
        for question in questions:
            if question.key not in self.answers:
                under_way.append((question, client.send(question.body(name))))
            if len(under_way) == AT_ONCE:
                self._keep(*under_way.popleft())
        for question, future in under_way:
            self._keep(question, future)
        write_json(self.file, dict(self.answers))

    def _keep(self, question: Question, future: Future[Reply]) -> None:
        reply = future.result()
        if reply.status != 200 or len(reply.token_ids) != question.max_tokens:
            raise OracleError(
                f"the single server answered a prompt of {len(question.prompt)} tokens with {reply}"
            )
        self.answers[question.key] = reply.token_ids

    def judge(self, question: Question, reply: Reply) -> Verdict:
        if reply.is_hang:
            return Verdict("hang", reply.error, seconds=reply.seconds)
        if reply.error:
            return Verdict("error", f"{reply.status}: {reply.error}", seconds=reply.seconds)
        expected = self.answers[question.key]
        if reply.token_ids == expected:
            return Verdict("right", seconds=reply.seconds)
        if len(reply.token_ids) != len(expected):
            detail = f"{len(reply.token_ids)} tokens of {len(expected)}"
            return Verdict("wrong", detail, seconds=reply.seconds)
        logits = family_logits(self.model, [*question.prompt, *reply.token_ids[:-1]])
        try:
            ties = count_ties(len(question.prompt), reply.token_ids, logits)
        except AssertionError as error:
            return Verdict("wrong", str(error), seconds=reply.seconds)
        return Verdict("right", ties=max(1, ties), seconds=reply.seconds)
