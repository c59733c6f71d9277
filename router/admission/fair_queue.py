"""Requests that wait for their turn: by priority, and fair between clients of one priority.

Fairness is in tokens, as in the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024): each client has a counter of what it was served, prompt tokens when a request leaves
the queue and tokens of the answer as they become known; the client with the smallest one is next. A client
that comes back after a while begins where the others are, so nobody saves up turns. While two clients of one
priority wait, what they were served since differs by no more than the cost of one request of each and of
their answers under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

ANSWER_WEIGHT = 2.0
"""What a token of an answer costs beside one of a prompt, as in the paper: it takes a step of its own."""

MAX_REMEMBERED = 4096
"""Clients of a priority whose counters are kept, besides those that wait."""


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """One HTTP request in the queue."""

    client: str
    """Name of whose it is, see :mod:`router.access.client`."""
    priority: int
    """Lower is earlier."""
    num_places: int
    """Choices that run at the same time once it is let in."""
    num_tokens: int
    """Of all its prompts, each counted once a choice."""
    since_s: float = 0.0
    """When it came, by the monotonic clock."""
    begin: Callable[[], None] = lambda: None
    """Told, once it is let in, that there is room for further choices."""


@dataclass
class _Level:
    """All that waits with one priority."""

    waiting: dict[str, dict[QueuedRequest, None]] = field(default_factory=dict)
    """Turns of each client that has any, oldest first."""
    served: dict[str, float] = field(default_factory=dict)
    """Tokens each client was served since somebody waits here, or where it began."""

    def forget(self) -> None:
        """Begins anew with those that do not wait, once there are many: clients may have any number of
        addresses."""
        if len(self.served) > MAX_REMEMBERED:
            self.served = {client: self.served[client] for client in self.waiting}

    @property
    def next_client(self) -> str:
        return min(self.waiting, key=lambda client: self.served[client])

    @property
    def longest_client(self) -> str:
        """Whose turns are the most; of equal ones, whose was served most."""
        return max(self.waiting, key=lambda client: (len(self.waiting[client]), self.served[client]))


class FairQueue:
    """Pure: no clock, no I/O. A level lives as long as something waits in it."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._num_queued = 0
        self.num_places = 0
        """Of all turns that wait."""

    def __len__(self) -> int:
        return self._num_queued

    def push(self, queued: QueuedRequest) -> None:
        level = self._levels.setdefault(queued.priority, _Level())
        if queued.client not in level.waiting:
            start = min((level.served[client] for client in level.waiting), default=0.0)
            level.served[queued.client] = max(level.served.get(queued.client, 0.0), start)
            level.waiting[queued.client] = {}
            level.forget()
        level.waiting[queued.client][queued] = None
        self._num_queued += 1
        self.num_places += queued.num_places

    @property
    def clients(self) -> set[str]:
        """Those that wait."""
        return {client for level in self._levels.values() for client in level.waiting}

    def next(self) -> QueuedRequest | None:
        """Whose turn it is; it stays in the queue."""
        if not self._levels:
            return None
        level = self._levels[min(self._levels)]
        return next(iter(level.waiting[level.next_client]))

    def heads(self) -> list[QueuedRequest]:
        """The first turn of each client of a level, in the order of :meth:`next`."""
        return [
            next(iter(level.waiting[client]))
            for _, level in sorted(self._levels.items())
            for client in sorted(level.waiting, key=lambda client: level.served[client])
        ]

    def serve(self, queued: QueuedRequest) -> None:
        """Takes a turn out of the queue to be served: its prompt counts."""
        self.charge(queued, queued.num_tokens)
        self.remove(queued)

    def charge(self, queued: QueuedRequest, num_tokens: float) -> None:
        """Counts what a client was served; of no consequence where nobody waits any more."""
        level = self._levels.get(queued.priority)
        if level is not None:
            level.served[queued.client] = level.served.get(queued.client, 0.0) + num_tokens

    def remove(self, queued: QueuedRequest) -> None:
        """Takes a turn out of the queue that will not be served, or has been. Raises KeyError if it is not
        there."""
        level = self._levels[queued.priority]
        turns = level.waiting[queued.client]
        del turns[queued]
        if not turns:
            del level.waiting[queued.client]
        if not level.waiting:
            del self._levels[queued.priority]
        self._num_queued -= 1
        self.num_places -= queued.num_places

    def displaced_by(self, client: str, priority: int) -> QueuedRequest | None:
        """Who leaves a full queue for a request of ``client``; None: nobody, so it is the one to be refused.

        A full queue must not lock out those that it is fair to. The newest turn of the client that has the
        most gives way, and those of the least priority before all others. Among equals a client displaces no
        turn of its own, nor one that would leave it with as many as the client it came from.
        """
        if not self._levels:
            return None
        last = max(self._levels)
        if priority > last:
            return None
        level = self._levels[last]
        longest = level.longest_client
        if priority == last and len(level.waiting[longest]) <= len(level.waiting.get(client, ())) + 1:
            return None
        return next(reversed(level.waiting[longest]))
