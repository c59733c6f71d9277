"""How a model marks its thinking."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

MAX_END_CHARS = 256
"""The end of a prompt in which marks are looked for: white space and one mark."""


class Place(Enum):
    """Where in an answer a position is."""

    BEFORE = auto()
    """The thinking may begin."""
    WITHIN = auto()
    BEHIND = auto()
    """The thinking has ended, or there is none."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks of one format. Where there are several, any of them may stand there. All end marks begin with
    the same character."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    written: str = ""
    """What the model writes to begin, if that is more than the first begin mark."""
    opens: tuple[str, ...] = ()
    """Further ends of prompts within the thinking."""
    interrupts: tuple[str, ...] = ()
    """Beginnings of tool calls that some models write without ending their thinking."""

    @property
    def begin(self) -> str:
        """The text of the begin mark, as the model writes it."""
        return self.written or self.begins[0]

    @property
    def end(self) -> str:
        return self.ends[0]

    def place_behind(self, prompt: str) -> Place:
        """Return the place of an answer's first character.

        Templates write the begin mark at the end of the prompt, or both marks if the model is not to think.
        """
        said = prompt[-MAX_END_CHARS:].rstrip()
        if said.endswith((*self.begins, *self.opens)):
            return Place.WITHIN
        return Place.BEHIND if said.endswith(self.ends) else Place.BEFORE
