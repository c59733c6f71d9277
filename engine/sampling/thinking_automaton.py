"""Follows an answer token by token to where its thinking begins and ends.

| state | the answer so far |
|---|---|
| ``OVER`` | is behind the thinking, or has none; it stays there |
| ``THINKING + j`` | is within the thinking, whose newest tokens are the first j tokens of the end mark |
| ``BEGINNING + j`` | is the first j tokens of the begin mark |

j is the largest number that fits (Knuth, Morris, Pratt, Fast pattern matching in strings, 1977). So an end
mark that is written in part is known as such, also if its beginning occurs in it twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from wire.messages.sampling_params import MAX_MARK_TOKENS, Thinking

OVER = 0
"""Zero, so that a cleared row of a table is a row without thinking."""
THINKING = 1
BEGINNING = THINKING + MAX_MARK_TOKENS
NUM_STATES = BEGINNING + MAX_MARK_TOKENS
KEPT_MARKS = 64


def is_thinking(state: int) -> bool:
    return THINKING <= state < BEGINNING


class Progress(NamedTuple):
    """How far an answer's thinking has come."""

    state: int
    num_tokens: int
    """Number of thinking tokens. They are the tokens behind the begin mark; once the thinking is over, the
    end mark is counted as well."""


class ThinkingAutomaton:
    """The automaton of one pair of marks."""

    def __init__(self, begin: tuple[int, ...], end: tuple[int, ...]) -> None:
        self.moves: list[dict[int, int]] = [{} for _ in range(NUM_STATES)]
        """For each state, the next state by token; any other token leads to :meth:`otherwise`."""
        for j, token_id in enumerate(begin):
            is_last = j + 1 == len(begin)
            self.moves[BEGINNING + j] = {token_id: THINKING if is_last else BEGINNING + j + 1}
        shorter = THINKING  # the state that would be reached without the mark's first token
        for j, token_id in enumerate(end):
            is_last = j + 1 == len(end)
            next_shorter = self.next(shorter, token_id) if j else THINKING
            self.moves[THINKING + j] = self.moves[shorter] | {token_id: OVER if is_last else THINKING + j + 1}
            shorter = next_shorter

    @classmethod
    def of(cls, thinking: Thinking) -> ThinkingAutomaton:
        """Returns the automaton of these marks, which is kept, since most requests have the same marks."""
        return _automaton(thinking.begin_token_ids, thinking.end_token_ids)

    def next(self, state: int, token_id: int) -> int:
        """Returns the state after one more token."""
        return self.moves[state].get(token_id, otherwise(state))

    def follow(self, thinking: Thinking, answer: Iterable[int]) -> Progress:
        """Returns how far the thinking has come in ``answer``."""
        state, num_tokens = start(thinking), 0
        for token_id in answer:
            if state == OVER:
                break
            num_tokens += is_thinking(state)
            state = self.next(state, token_id)
        return Progress(state, num_tokens)


def start(thinking: Thinking) -> int:
    """Returns the state before the answer's first token."""
    return THINKING if thinking.is_open else BEGINNING


def otherwise(state: int) -> int:
    """Returns the state after a token that is in neither mark."""
    return THINKING if is_thinking(state) else OVER


@lru_cache(KEPT_MARKS)
def _automaton(begin: tuple[int, ...], end: tuple[int, ...]) -> ThinkingAutomaton:
    return ThinkingAutomaton(begin, end)
