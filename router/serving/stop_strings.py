"""Finds stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the first stop string to be completed and holds back what may become one.

    The result depends on the text alone, not on how it was cut into pieces: of all matches the one
    that ends first wins, and of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be pushed after it."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Takes the next piece and returns what may be shown.

        Matches that end in an unarmed piece do not count: that is how ``min_tokens`` works. They may
        begin there, though, and end in a later one.
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
        """The text held back, once it is certain that no more comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first, after the ``num_old`` characters known."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _partial_match(self, buffer: str) -> int:
        """Length of the longest end of ``buffer`` that begins a stop string without completing it."""
        longest = 0
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < len(buffer) - longest:
                if stop.startswith(buffer[start:]):
                    longest = len(buffer) - start
                    break
                start = buffer.find(stop[0], start + 1)
        return longest
