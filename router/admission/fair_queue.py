"""The queue of waiting requests: ordered by priority, and fair between clients of one priority.

Fairness is counted in tokens, as in the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024). Each client has a counter of the tokens it was served: prompt tokens count when
a request leaves the queue, tokens of the answer when the request has ended. The client with the smallest
counter is next. The counter of a client that did not wait before is first raised to the smallest counter of
the clients that wait, so no client can save up turns. While two clients of one priority wait, the service
they get differs by at most the cost of one request of each client and of both clients' answers in progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

ANSWER_WEIGHT = 2.0
"""The cost of an answer's token relative to a prompt's token, as in the paper. An answer's token costs more
because each one takes a step of its own."""

MAX_REMEMBERED = 4096
"""If there are more counters than this for one priority, the counters of clients that do not wait are
dropped."""


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """One HTTP request in the queue."""

    client: str
    """The name of its client, see :mod:`router.access.client`."""
    priority: int
    """Requests with a lower number are served earlier."""
    num_places: int
    """The places that the request needs: one for each choice."""
    num_tokens: int
    """The tokens of all its prompts; each prompt counts once for each of its choices."""
    since_s: float = 0.0
    """When it arrived, by the monotonic clock."""
    begin: Callable[[], None] = lambda: None
    """Called when there is room for more choices of the request, after the request was let in."""


@dataclass
class _Level:
    """All waiting requests of one priority."""

    waiting: dict[str, dict[QueuedRequest, None]] = field(default_factory=dict)
    """The waiting requests of each client that has any, oldest first."""
    served: dict[str, float] = field(default_factory=dict)
    """Each client's counter: the value that it began with, plus the tokens that the client was served since
    this level exists."""

    def forget(self) -> None:
        """Drop the counters of clients that do not wait, once there are many counters. There may be many
        because each address counts as a client, and one computer may use any number of addresses."""
        if len(self.served) > MAX_REMEMBERED:
            self.served = {client: self.served[client] for client in self.waiting}

    @property
    def next_client(self) -> str:
        return min(self.waiting, key=lambda client: self.served[client])

    @property
    def longest_client(self) -> str:
        """The client with the most waiting requests; among equals, the one that was served most."""
        return max(self.waiting, key=lambda client: (len(self.waiting[client]), self.served[client]))


class FairQueue:
    """The queue. Pure: no clock, no I/O. A level exists as long as a request waits in it."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._num_queued = 0
        self.num_places = 0
        """The places that all waiting requests need."""

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
        """The clients that have waiting requests."""
        return {client for level in self._levels.values() for client in level.waiting}

    def next(self) -> QueuedRequest | None:
        """Return the request whose turn it is. The request stays in the queue."""
        if not self._levels:
            return None
        level = self._levels[min(self._levels)]
        return next(iter(level.waiting[level.next_client]))

    def heads(self) -> list[QueuedRequest]:
        """Return the first request of each client of each level, in the order of :meth:`next`."""
        return [
            next(iter(level.waiting[client]))
            for _, level in sorted(self._levels.items())
            for client in sorted(level.waiting, key=lambda client: level.served[client])
        ]

    def serve(self, queued: QueuedRequest) -> None:
        """Take a request out of the queue to be served, and charge its client for the prompt."""
        self.charge(queued, queued.num_tokens)
        self.remove(queued)

    def charge(self, queued: QueuedRequest, num_tokens: float) -> None:
        """Add tokens to the counter of a request's client. This has no effect if no request of the same
        priority waits."""
        level = self._levels.get(queued.priority)
        if level is not None:
            level.served[queued.client] = level.served.get(queued.client, 0.0) + num_tokens

    def remove(self, queued: QueuedRequest) -> None:
        """Take a request out of the queue, whether it is served or not. Raises KeyError if it is not
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
        """Return the request that leaves a full queue for a new request of ``client``; None: no request
        leaves, so the new one is refused.

        A full queue must not lock out clients that have fewer waiting requests than others. So a request of
        the last priority leaves: the newest request of the client that has the most requests of this
        priority. Within the same priority, the new request displaces no request of its own client. It
        displaces a request of another client only if that client has at least two waiting requests more than
        the client of the new request.
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
