"""Tickets for the kept state of earlier answers, found by the tokens that the state covers.

The next turn of a conversation begins with the last turn's prompt and answer. If the decode server has kept
the state after them, a prefill server can read this state back and compute only the new tokens. A ticket can
be used once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wire.messages.handoff import Ticket

MAX_KEPT = 10_000


@dataclass(frozen=True)
class _Kept:
    ticket: Ticket
    expires_at: float


class Conversations:
    """Tickets, found by the tokens that they cover and the cache salt. The oldest tickets make room for new
    ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def remember(self, token_ids: Sequence[int], salt: str, ticket: Ticket) -> None:
        """Keep the ticket for the state after the first ``ticket.num_tokens`` of ``token_ids``."""
        key = (salt, _digest(token_ids[: ticket.num_tokens]).digest())
        self._forget(key)
        self._kept[key] = _Kept(ticket, self._clock() + ticket.ttl_s)
        self._lengths[ticket.num_tokens] += 1
        while len(self._kept) > MAX_KEPT:
            self._forget(next(iter(self._kept)))

    def take(self, token_ids: Sequence[int], salt: str) -> Ticket | None:
        """Remove and return the ticket that covers the longest part of a prompt, but not all of it. Return
        None if there is no such ticket or if it has expired."""
        digest = hashlib.blake2b(digest_size=16)
        done = 0
        best: tuple[str, bytes] | None = None
        for length in sorted(n for n in self._lengths if n < len(token_ids)):
            digest.update(array("q", token_ids[done:length]).tobytes())
            done = length
            key = (salt, digest.digest())
            if key in self._kept:
                best = key
        if best is None:
            return None
        kept = self._forget(best)
        return kept.ticket if kept is not None and kept.expires_at > self._clock() else None

    def _forget(self, key: tuple[str, bytes]) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            length = kept.ticket.num_tokens
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
        return kept


def _digest(token_ids: Sequence[int]) -> hashlib.blake2b:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16)
