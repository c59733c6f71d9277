"""Counts the tokens of an answer's thinking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.models.reasoning.reasoning_format import Place
from router.models.reasoning.thinking_text import ThinkingText


class ThinkingTokens:
    """Counts the tokens between the two marks of one answer's thinking.

    A token that has text of both the thinking and a mark counts as a part of the mark. Marks that are tokens
    of their own share none.
    """

    def __init__(self, text: ThinkingText, text_of: Callable[[int], str]) -> None:
        """``text_of`` returns the text of one token."""
        self._text = text
        self._text_of = text_of
        self._begin: int | None = 0 if text.is_open else None
        self._end: int | None = None
        self._num_seen = 0
        self._num_certain = 0
        """Number of tokens up to the last one behind which no mark had begun."""
        self._begun: list[int] = []
        """For each token behind those, the number of characters up to its end."""

    def push(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Take the answer's newest tokens; it has ``num_tokens`` now. Earlier tokens that were not pushed
        have no text of marks."""
        num_read = num_tokens - len(token_ids)
        if num_read != self._num_seen:
            self._num_certain = num_read
        self._num_seen = num_tokens
        for token_id in token_ids:
            if self._text.place is Place.BEHIND:
                return
            self._text.push(self._text_of(token_id))
            num_read += 1
            self._note(num_read)

    def _note(self, num_read: int) -> None:
        """Note where the text is behind ``num_read`` tokens."""
        if self._begin is None and self._text.place is Place.WITHIN:
            self._begin = num_read
        self._begun.append(self._text.num_chars)
        if self._text.place is Place.BEHIND:
            self._end = self._num_certain + sum(at <= self._text.end_at for at in self._begun)
        elif not self._text.held:
            self._num_certain = num_read
            self._begun.clear()

    def among(self, num_tokens: int) -> int:
        """Return how many of the answer's first ``num_tokens`` tokens are thinking. All pushed tokens must be
        among them."""
        if self._begin is None:
            return 0
        return max(0, (num_tokens if self._end is None else self._end) - self._begin)
