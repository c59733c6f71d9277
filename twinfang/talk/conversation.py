"""A chat: what was said so far, and what a person types."""

from __future__ import annotations

from typing import Any

from twinfang.talk.answer_stream import AnswerStream, NotAnsweredError
from twinfang.talk.terminal import Terminal

HELP = """\
/reset  forget what was said; the system prompt stays
/exit   end the chat, as Ctrl-D does
/help   show these lines
Ctrl-C ends an answer. A line that ends with \\ goes on in the next one.
A message may begin with / behind a space."""
NOTES = {
    "length": "[the answer was cut: it has as many tokens as it may have]",
    "content_filter": "[filtered]",
}
CUT = "[ended]"


class Conversation:
    """Messages to a model and its answers. ``fields`` are those of each request except the messages."""

    def __init__(
        self, stream: AnswerStream, terminal: Terminal, fields: dict[str, Any], system: str | None
    ) -> None:
        self._stream, self._terminal, self._fields = stream, terminal, fields
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)

    def run(self) -> None:
        """Answers what is typed, until the chat is ended."""
        while True:
            try:
                text = self._terminal.ask()
            except KeyboardInterrupt:
                self._terminal.notice("\nCtrl-D or /exit ends the chat")
                continue
            match None if text is None else text.rstrip():
                case None | "/exit" | "/quit":
                    return
                case "":
                    pass
                case "/reset":
                    self._messages = list(self._system)
                    self._terminal.notice("forgotten")
                case "/help":
                    self._terminal.notice(HELP)
                case command if command.startswith("/"):
                    self._terminal.notice(f"{command.split()[0]} is no command; /help lists them")
                case message:
                    self._answer_or_say_why(message)

    def answer(self, message: str) -> None:
        """Shows the answer to ``message``. Raises :class:`NotAnsweredError`, and :class:`KeyboardInterrupt`
        on Ctrl-C. The model remembers what was shown of an answer; without any, it forgets the message."""
        self._messages.append({"role": "user", "content": message})
        answer = ""
        try:
            for piece in self._stream.pieces(
                "/chat/completions", self._fields | {"messages": self._messages}
            ):
                answer += piece.text
                self._terminal.thinking(piece.thinking)
                self._terminal.text(piece.text)
                if note := NOTES.get(piece.finish_reason):
                    self._terminal.end_answer()
                    self._terminal.notice(note)
        finally:
            self._terminal.end_answer()
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()

    def _answer_or_say_why(self, message: str) -> None:
        try:
            self.answer(message)
        except NotAnsweredError as error:
            self._terminal.notice(f"error: {error.message}")
        except KeyboardInterrupt:
            self._terminal.notice(CUT)
