"""One answer that follows a grammar, as the server sees it: what came, and what may come next."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wire.errors import TwinfangError

if TYPE_CHECKING:
    from engine.grammar.lane import Lane


@dataclass(eq=False)
class Follower:
    """Masks come from a lane some time after they were asked for; until then the request's row waits.

    The engine's thread alone looks at ``masks``: to it this is an :class:`engine.request.Matcher`. The rest
    belongs to :class:`Grammars`.
    """

    key: int
    grammar: str
    answer: list[int]
    """Tokens that it has been told of."""
    masks: NDArray[np.int32] | None = None
    opened: Future[None] = field(default_factory=Future)
    """Done with the first masks, or with why the grammar can't be followed."""
    lane: Lane | None = None
    """The process that follows, up to ``num_followed`` tokens; None: the next job begins anew."""
    num_followed: int = 0
    needs_own_lane: bool = False
    drafts: tuple[int, ...] = ()
    """Guesses behind the answer, of the masks that were asked for last."""
    asked_s: float = 0.0
    """When those were asked for; 0: they have come."""
    waited_s: float = 0.0
    """For all masks together."""
    request_id: str = ""
    has_ended: bool = False

    def begun(self, error: TwinfangError | None = None) -> None:
        """The first masks have come, or will not. Nobody may wait any more."""
        try:
            if error is None:
                self.opened.set_result(None)
            else:
                self.opened.set_exception(error)
        except InvalidStateError:  # whoever waited was cancelled
            pass
