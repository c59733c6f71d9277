"""The part of an answer before its grammar begins: its thinking, or nothing.

| the answer so far | may go on with |
|---|---|
| is empty, and the thinking is not open | what the grammar allows, or the begin mark's first token |
| is the first tokens of the begin mark | the next token of the begin mark |
| is within the thinking | any token, but no end of sequence |
| is behind the thinking | what the grammar allows after the tokens behind the thinking |

Within the thinking, an end of sequence would end the answer before its grammar has begun, and the client
would get nothing that follows the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.sampling.thinking_automaton import BEGINNING, OVER, ThinkingAutomaton, is_thinking, start
from wire.messages.sampling_params import Thinking

_WORD_BITS = 32


class Preamble(Protocol):
    """Separates what comes before a grammar from what the grammar follows. ``W`` words of 32 bits are a mask,
    with one bit for each token."""

    def take(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Follows the answer's new tokens. Returns those that the grammar has to follow."""

    def ask(self, drafts: Sequence[int]) -> Sequence[int] | None:
        """Prepares the masks after the answer and after each of ``drafts``, up to where the grammar begins.

        Returns the drafts that the grammar has to follow; None if it has not begun after the last draft.
        """

    def complete(self, masks: bytes) -> bytes:
        """Returns the masks that were asked for, where ``masks`` are those that the grammar has given."""


class NoPreamble:
    """The grammar begins with the answer."""

    def take(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids

    def ask(self, drafts: Sequence[int]) -> Sequence[int] | None:
        return drafts

    def complete(self, masks: bytes) -> bytes:
        return masks


class ThinkingPreamble:
    """The grammar begins behind the answer's thinking."""

    def __init__(self, thinking: Thinking, free: NDArray[np.int32]) -> None:
        """``free`` ``[W]`` int32 is the mask within the thinking: :func:`free_mask`."""
        self._begin = thinking.begin_token_ids
        self._free = free
        self._automaton = ThinkingAutomaton.of(thinking)
        self._state = start(thinking)
        self._masks: list[NDArray[np.int32]] = []
        """Masks of the last question, up to where the grammar begins."""
        self._begins = False
        """Whether the last question reaches the grammar."""

    def take(self, token_ids: Sequence[int]) -> Sequence[int]:
        for i, token_id in enumerate(token_ids):
            if self._state == OVER:
                return token_ids[i:]
            is_first = self._state == BEGINNING
            self._state = self._automaton.next(self._state, token_id)
            if is_first and self._state == OVER:  # the answer has no thinking
                return token_ids[i:]
        return ()

    def ask(self, drafts: Sequence[int]) -> Sequence[int] | None:
        self._masks, self._begins = [], False
        state = self._state
        for i in range(1 + len(drafts)):
            if state in (OVER, BEGINNING):  # no drafts follow an empty answer
                self._begins = True
                return drafts[i:]
            self._masks.append(self._mask(state))
            state = self._automaton.next(state, drafts[i]) if i < len(drafts) else state
        return None

    def complete(self, masks: bytes) -> bytes:
        own = b"".join(mask.tobytes() for mask in self._masks)
        if self._state == BEGINNING:
            return (np.frombuffer(masks, dtype=np.int32) | self._only(self._begin[0])).tobytes()
        return own + masks if self._begins else own

    def _mask(self, state: int) -> NDArray[np.int32]:
        return self._free if is_thinking(state) else self._only(self._begin[state - BEGINNING])

    def _only(self, token_id: int) -> NDArray[np.int32]:
        bits = np.zeros(len(self._free), dtype=np.uint32)
        bits[token_id // _WORD_BITS] = 1 << token_id % _WORD_BITS
        return bits.view(np.int32)


def free_mask(num_words: int, forbidden: Sequence[int]) -> NDArray[np.int32]:
    """Returns the mask ``[num_words]`` that allows every token except ``forbidden``."""
    bits = np.full(num_words, (1 << _WORD_BITS) - 1, dtype=np.uint32)
    for token_id in forbidden:
        bits[token_id // _WORD_BITS] &= ~np.uint32(1 << token_id % _WORD_BITS)
    return bits.view(np.int32)
