"""The sources of an engine's masks. Rank 0 gets them from its lanes, the other ranks from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.grammar.follower import NOBODY, Asker, Follower
from wire.errors import TwinfangError
from wire.messages.sampling_params import Thinking


class News(NamedTuple):
    """Masks or an error for one answer."""

    request_id: str
    masks: bytes
    """See :attr:`Follower.masks`."""
    error: TwinfangError | None
    """Why the answer can't be continued; None: it can."""


class GrammarSource(Protocol):
    """A source of masks for an engine; see :class:`engine.grammar.grammars.Grammars`."""

    def follow(
        self,
        grammar: str,
        answer: Sequence[int] = (),
        thinking: Thinking | None = None,
        asker: Asker = NOBODY,
    ) -> Follower: ...

    def add(self, follower: Follower, request_id: str) -> None: ...

    def ask(self, follower: Follower, token_ids: Sequence[int], drafts: Sequence[int]) -> None: ...

    def drop(self, follower: Follower) -> None: ...

    def news(self, awaited: Sequence[Follower]) -> list[News]: ...

    def on_news(self, tell: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class RemoteGrammars:
    """Source for a rank other than 0. Rank 0 sends all masks and errors to this rank, so that the plans of
    all ranks depend only on the times at which masks reach rank 0."""

    def follow(
        self,
        grammar: str,
        answer: Sequence[int] = (),
        thinking: Thinking | None = None,
        asker: Asker = NOBODY,
    ) -> Follower:
        follower = Follower(0, grammar, [])
        follower.begun()
        return follower

    def add(self, follower: Follower, request_id: str) -> None:
        pass

    def ask(self, follower: Follower, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        follower.masks = None

    def drop(self, follower: Follower) -> None:
        pass

    def news(self, awaited: Sequence[Follower]) -> list[News]:
        return []

    def on_news(self, tell: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass
