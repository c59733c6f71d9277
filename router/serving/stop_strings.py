"""Finds stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the stop string that is completed first, and holds back text that may become a stop string.

    The result depends only on the text, not on how it was cut into pieces. The match that ends first wins; if
    several matches end at the same character, the longest one wins.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; None: none was found so far. Once it is set, :meth:`push` must not
        be called again."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take the next piece and return the text that may be shown.

        A piece with ``armed=False`` belongs to the first ``min_tokens`` tokens of the answer: a match that
        ends in it does not count. A match that begins in it and ends in a later, armed piece does count.
        """
        if not self._stops:
            return text
        buffer = self._held + text
        if armed and (found := self._first_match(buffer, len(self._held))):
            start, self.matched = found
            self._held = ""
            return buffer[: start + len(self.matched)] if self._include else buffer[:start]
        num_held = self._partial_match(buffer)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def flush(self) -> str:
        """Return the text that was held back. To be called when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """Return where the match that ends first begins, and its stop string.

        The first ``num_old`` characters were searched by earlier calls, so a match must end after them.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _partial_match(self, buffer: str) -> int:
        """Return the length of the longest suffix of ``buffer`` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < len(buffer) - longest:
                if stop.startswith(buffer[start:]):
                    longest = len(buffer) - start
                    break
                start = buffer.find(stop[0], start + 1)
        return longest
