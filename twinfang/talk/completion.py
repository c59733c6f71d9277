"""Texts to continue, each for itself."""

from __future__ import annotations

from typing import Any

from twinfang.talk.answer_stream import AnswerStream, NotAnsweredError
from twinfang.talk.terminal import Terminal

CUT = "[ended]"


class Completion:
    """Continues texts. ``fields`` are those of each request except the prompt."""

    def __init__(self, stream: AnswerStream, terminal: Terminal, fields: dict[str, Any]) -> None:
        self._stream, self._terminal, self._fields = stream, terminal, fields

    def run(self) -> None:
        """Continues what is typed, until that ends."""
        while True:
            try:
                prompt = self._terminal.ask()
                if prompt is None or prompt.strip() == "/exit":
                    return
                if prompt:
                    self._continue_or_say_why(prompt)
            except KeyboardInterrupt:
                self._terminal.notice("\nCtrl-D or /exit ends the command")

    def complete(self, prompt: str) -> None:
        """Shows how ``prompt`` goes on. Raises :class:`NotAnsweredError`, and :class:`KeyboardInterrupt` on
        Ctrl-C."""
        try:
            for piece in self._stream.pieces("/completions", self._fields | {"prompt": prompt}):
                self._terminal.text(piece.text)
        finally:
            self._terminal.end_answer()

    def _continue_or_say_why(self, prompt: str) -> None:
        try:
            self.complete(prompt)
        except NotAnsweredError as error:
            self._terminal.notice(f"error: {error.message}")
        except KeyboardInterrupt:
            self._terminal.notice(CUT)
