"""Where an engine gets masks from: its own lanes, or rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.grammar.follower import Follower
from wire.errors import TwinfangError


class News(NamedTuple):
    """What may come next in one answer."""

    request_id: str
    masks: bytes
    """As :attr:`Follower.masks`."""
    error: TwinfangError | None
    """Why the answer can't go on."""


class GrammarSource(Protocol):
    """Where an engine gets masks from; see :class:`engine.grammar.grammars.Grammars`."""

    def follow(self, grammar: str, answer: Sequence[int] = ()) -> Follower: ...

    def add(self, follower: Follower, request_id: str) -> None: ...

    def ask(self, follower: Follower, token_ids: Sequence[int], drafts: Sequence[int]) -> None: ...

    def drop(self, follower: Follower) -> None: ...

    def news(self, awaited: Sequence[Follower]) -> list[News]: ...

    def on_news(self, tell: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class RemoteGrammars:
    """Of a rank other than 0. Rank 0 tells it all masks and errors: no clock but its enters a plan."""

    def follow(self, grammar: str, answer: Sequence[int] = ()) -> Follower:
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
