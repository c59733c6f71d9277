"""Conversations of more clients than a device has room for: every contender gets the same prompts, in the
same order, one at a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from benchmarks.serving.event_stream import EventStream
from benchmarks.serving.load import Workload, cached_tokens, timed_prompt, token_ids

NUM_SESSIONS, NUM_TURNS = 32, 12
WARM_UP_SESSIONS = 3
"""Conversations that nobody measures, of one long prompt each."""

Answers = list[list[list[int]]]
"""Token ids of answers, by session and turn."""


@dataclass(frozen=True)
class TierLoad:
    """The sizes of all conversations. Their tokens depend on nothing but the seed."""

    first_tokens: int
    """Tokens of a conversation's first prompt."""
    new_tokens: int
    """Tokens that each later turn adds behind the last answer."""
    answer_tokens: int
    last_token_id: int
    num_sessions: int = NUM_SESSIONS
    num_turns: int = NUM_TURNS
    seed: int = 1
    first_token_id: int = 5

    @property
    def turn_tokens(self) -> int:
        """Tokens by which each turn is longer than the one before."""
        return self.answer_tokens + self.new_tokens

    def prompt_tokens(self, turn: int) -> int:
        return self.first_tokens + turn * self.turn_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of a whole conversation."""
        return self.prompt_tokens(self.num_turns - 1) + self.answer_tokens

    def order(self, turn: int) -> list[int]:
        """Returns the order in which sessions take this turn: another one each turn."""
        sessions = list(range(self.num_sessions))
        random.Random(f"{self.seed} order {turn}").shuffle(sessions)
        return sessions

    def prompt(self, session: int, answers: Iterable[list[int]]) -> list[int]:
        """Returns the prompt behind these answers: all earlier prompts and answers, and new tokens."""
        tokens = self._tokens(session, 0)
        for turn, answer in enumerate(answers, start=1):
            tokens += [*answer, *self._tokens(session, turn)]
        return tokens

    def _tokens(self, session: int, turn: int) -> list[int]:
        choose = random.Random(f"{self.seed} {session} {turn}")
        count = self.new_tokens if turn else self.first_tokens
        return [choose.randint(self.first_token_id, self.last_token_id) for _ in range(count)]

    @cached_property
    def workload(self) -> Workload:
        return Workload(0, self.answer_tokens, self.first_token_id, self.last_token_id)


@dataclass(frozen=True)
class Asked:
    """One answered request."""

    turn: int
    session: int
    ttft_ms: float
    cached_tokens: int
    answer: list[int]


async def hold(
    url: str, model: str, load: TierLoad, turns: Iterable[int], answers: Answers, *, pace_s: float = 0.0
) -> list[Asked]:
    """Lets all sessions take these turns. ``answers`` are part of later prompts.

    The answers of turns that ``answers`` lacks are added to it. A request is sent ``pace_s`` after the last
    one, or when that one has ended. Raises :class:`benchmarks.serving.load.LoadError` and :class:`OSError`.
    """
    stream = await EventStream.connect(url)
    found: list[Asked] = []
    due_s = time.monotonic()
    try:
        for turn in turns:
            for session in load.order(turn):
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                due_s = time.monotonic() + pace_s
                asked = await _ask(stream, model, load, turn, session, answers[session][:turn])
                found.append(asked)
                if len(answers[session]) == turn:
                    answers[session].append(asked.answer)
    finally:
        stream.close()
    return found


async def warm_up(url: str, model: str, load: TierLoad) -> None:
    """Sends prompts of every length from the first turn's to the last one's. Raises as :func:`hold`."""
    stream = await EventStream.connect(url)
    try:
        for number in range(WARM_UP_SESSIONS):
            session = load.num_sessions + number
            answer = load.prompt(session, [])[: load.answer_tokens]
            for num_answers in (0, 1, load.num_turns - 1):
                await _ask(stream, model, load, 0, session, [answer] * num_answers)
    finally:
        stream.close()


async def _ask(
    stream: EventStream, model: str, load: TierLoad, turn: int, session: int, answers: list[list[int]]
) -> Asked:
    events: list[bytes] = []
    prompt = load.prompt(session, answers)
    timing = await timed_prompt(
        *(stream, model, load.workload, prompt),
        keep=events,
        fields={"prompt_cache_key": f"conversation {session}"},
    )
    answer = token_ids(events, load.answer_tokens)
    return Asked(turn, session, timing.ttft_s * 1e3, cached_tokens(events), answer)
