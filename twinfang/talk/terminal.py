"""A terminal, or a file or pipe in its place: what is shown, how it looks, and what is typed.

On a terminal, thinking and notices are dimmed, and control characters of a model's text are replaced: they
could move the cursor, or make the terminal send input. Elsewhere an answer is its text alone, as it came.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

PROMPT, CONTINUED = "> ", "… "
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
KEPT = {ord("\n"), ord("\t")}
REPLACED = dict.fromkeys({*range(32), *range(127, 160)} - KEPT, "\N{REPLACEMENT CHARACTER}")


class Terminal:
    """Where answers go, and where messages come from."""

    def __init__(self, typed: TextIO, shown: TextIO, notices: TextIO) -> None:
        self._typed, self._shown, self._notices = typed, shown, notices
        self._is_dim = False
        self._at_line_start = True
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() then edits lines and remembers them)

    @classmethod
    def standard(cls) -> Terminal:
        """Returns that of this process."""
        return cls(sys.stdin, sys.stdout, sys.stderr)

    @property
    def is_interactive(self) -> bool:
        """Whether a person types and reads here."""
        return self._typed.isatty() and self._shown.isatty()

    def ask(self) -> str | None:
        """Returns what is typed, None at its end. A line that ends with a backslash goes on in the next."""
        lines: list[str] = []
        while True:
            try:
                line = input(CONTINUED if lines else PROMPT)
            except EOFError:
                self._shown.write("\n")
                return None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def read_all(self) -> str:
        """Returns all of a file or pipe."""
        return self._typed.read()

    def text(self, text: str) -> None:
        """Shows a part of an answer."""
        if not text:
            return
        if self._is_dim:
            self._end_thinking()
        self._write(text)

    def thinking(self, text: str) -> None:
        """Shows a part of what a model thinks, on a terminal alone."""
        if text and self._shown.isatty():
            if not self._is_dim:
                self._shown.write(DIM)
                self._is_dim = True
            self._write(text)

    def end_answer(self) -> None:
        """Ends the answer's last line, on a terminal."""
        if self._is_dim:
            self._end_thinking()
        if self._shown.isatty() and not self._at_line_start:
            self._write("\n")

    def notice(self, text: str) -> None:
        """Shows a line that is no part of an answer."""
        text = text.translate(REPLACED)
        self._notices.write(f"{DIM}{text}{PLAIN}\n" if self._notices.isatty() else f"{text}\n")
        self._notices.flush()

    def _end_thinking(self) -> None:
        self._shown.write(PLAIN)
        self._is_dim = False
        self._write("\n" if self._at_line_start else "\n\n")

    def _write(self, text: str) -> None:
        self._shown.write(text.translate(REPLACED) if self._shown.isatty() else text)
        self._shown.flush()
        self._at_line_start = text.endswith("\n")
