"""One answer that follows a grammar, as the server sees it: its tokens, and the masks of the next ones."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.grammar.preamble import NoPreamble, Preamble
from wire.errors import TwinfangError

if TYPE_CHECKING:
    from engine.grammar.lane import Lane


class Asker(NamedTuple):
    """Whom an answer with a grammar is for."""

    client: str = ""
    """Lanes are shared fairly between clients."""
    salt: str = ""
    """The request's ``cache_salt``. What is known of a grammar is known for one salt alone: how soon an
    answer begins would tell a client which grammars others have used."""


NOBODY = Asker()


@dataclass(eq=False)
class Follower:
    """The server's side of one answer's grammar.

    Masks come from a lane some time after they were asked for; until then the request's row waits. Only the
    engine's thread reads ``masks``: for that thread this is an :class:`engine.request.Matcher`. All other
    fields belong to :class:`Grammars`.
    """

    key: int
    grammar: str
    answer: list[int]
    """Tokens of the answer that the grammar has to follow and that have been passed to this follower."""
    preamble: Preamble = field(default_factory=NoPreamble)
    """What comes before the grammar."""
    masks: NDArray[np.int32] | None = None
    opened: Future[None] = field(default_factory=Future)
    """Done when the first masks have come. If the grammar can't be followed, its exception says why."""
    asker: Asker = NOBODY
    lane: Lane | None = None
    """The lane that has followed ``num_followed`` tokens; None: the next job begins at the answer's start."""
    num_followed: int = 0
    needs_own_lane: bool = False
    drafts: tuple[int, ...] = ()
    """Draft tokens of the last question for masks that the grammar has to follow after the answer."""
    asked_s: float = 0.0
    """When the last masks were asked for; 0: these masks have come."""
    waited_s: float = 0.0
    """Time waited for all masks together."""
    request_id: str = ""
    has_ended: bool = False

    def begun(self, error: TwinfangError | None = None) -> None:
        """Completes ``opened``: the first masks have come, or, if there is an error, will never come."""
        try:
            if error is None:
                self.opened.set_result(None)
            else:
                self.opened.set_exception(error)
        except InvalidStateError:  # the caller that waited was cancelled
            pass
