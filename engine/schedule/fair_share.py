"""Shares rows fairly when clients want more rows than there are.

A client's share is the larger of two fractions: its part of all rows, and its part of all blocks. A row that
reports log-probabilities costs a step as much as several other rows, and counts as that many. The next row
goes to the waiting client with the smallest share. If no row is free, a client with a larger share gives up
a row, as long as that makes the shares more equal (dominant resource fairness: Ghodsi et al., NSDI 2011). So
no client has to wait until other clients' long answers and many choices end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.request import Request

PAUSE_STEPS = 4
"""Number of steps between two preemptions that give a row to another client. Each such row costs a copy of
blocks and state to host memory and back."""

ALTERNATIVES_A_ROW = 10
"""Alternatives in log-probabilities: a row that reports this many costs as much as two other rows."""


def cost_of(request: Request) -> float:
    """Returns the cost of the request's row in a step, in rows."""
    alternatives = None if request.params is None else request.params.logprobs
    return 1.0 if alternatives is None else 1.0 + alternatives / ALTERNATIVES_A_ROW


@dataclass
class Share:
    """Rows and blocks of one client."""

    num_rows: float = 0.0
    num_blocks: int = 0


class FairShares:
    """The share of each client at one moment. Pure: requests are read, not changed."""

    def __init__(self, owners: Iterable[Request], *, num_rows: int, num_blocks: int) -> None:
        """Adds up the shares. ``owners`` are the requests with rows; the server has ``num_rows`` and
        ``num_blocks`` in all."""
        self._num_rows, self._num_blocks = num_rows, max(1, num_blocks)
        self._shares: dict[str, Share] = {}
        for request in owners:
            share = self._shares.setdefault(request.client, Share())
            share.num_rows += cost_of(request)
            share.num_blocks += len(request.memory.block_ids)

    def of(self, client: str, *, rows: float = 0.0, blocks: int = 0) -> float:
        """Returns the share that a client would have with ``rows`` more rows and ``blocks`` more blocks; 1
        means all rows or all blocks of the server."""
        share = self._shares.get(client, Share())
        return max((share.num_rows + rows) / self._num_rows, (share.num_blocks + blocks) / self._num_blocks)

    def next_of(self, waiting: Iterable[Request]) -> Request | None:
        """Returns the request to admit next: the first one of the client with the smallest share."""
        heads: dict[str, Request] = {}
        for request in waiting:
            heads.setdefault(request.client, request)
        return min(heads.values(), key=lambda request: self.of(request.client), default=None)

    def giver_for(self, request: Request, num_blocks: int, running: Iterable[Request]) -> Request | None:
        """Returns the request that should give its row to ``request``; None: shares are fair as they are.

        ``request`` needs ``num_blocks``. The client with the largest share gives its youngest row. The oldest
        request of each client stays, so that every request is completed at some time. ``running`` begins
        with the oldest request.
        """
        smaller = self.of(request.client, rows=cost_of(request), blocks=num_blocks)
        givers = [
            giver
            for giver in _youngest_but_oldest(running)
            if giver.client != request.client
            and smaller <= self.of(giver.client, rows=-cost_of(giver), blocks=-len(giver.memory.block_ids))
        ]
        return max(givers, key=lambda giver: self.of(giver.client), default=None)

    def first_to_go(self, running: Collection[Request]) -> Request:
        """Returns the request to preempt when blocks run out: the youngest of the client with the largest
        share, but never the oldest request of all, unless it is alone. ``running`` begins with the oldest."""
        youngest = {
            request.client: (i, request) for i, request in enumerate(running) if i or len(running) == 1
        }
        return max(youngest.values(), key=lambda found: (self.of(found[1].client), found[0]))[1]


def _youngest_but_oldest(running: Iterable[Request]) -> Iterable[Request]:
    """Returns the youngest request of each client that has several."""
    oldest: dict[str, Request] = {}
    youngest: dict[str, Request] = {}
    for request in running:
        if oldest.setdefault(request.client, request) is not request:
            youngest[request.client] = request
    return youngest.values()


def have_several_clients(*queues: Mapping[str, Request]) -> bool:
    clients = (request.client for queue in queues for request in queue.values())
    first = next(clients, None)
    return any(client != first for client in clients)
