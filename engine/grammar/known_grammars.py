"""What a server remembers of grammars: which can't be followed, and which are slow."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from engine.grammar.follower import Follower
from wire.errors import TwinfangError

REMEMBERED = 4096
"""Maximum number of grammars that are remembered as quick, slow or invalid."""


class Known(NamedTuple):
    error: TwinfangError | None
    """Why the grammar can't be followed even from an answer's start; None: it can be followed."""
    is_slow: bool


class KnownGrammars:
    """Remembers each grammar for its salt alone: see :class:`engine.grammar.follower.Asker`."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    def get(self, follower: Follower) -> Known | None:
        """Returns what is known of a follower's grammar. None: nothing."""
        return self._known.get(_digest(follower))

    def remember(self, follower: Follower, known: Known) -> None:
        self._known[_digest(follower)] = known
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def _digest(follower: Follower) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (follower.asker.salt, follower.grammar):
        data = part.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8) + data)
    return digest.digest()
