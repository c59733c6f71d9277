"""How rows are shared when clients want more than there are.

A client's share is the larger one of two parts: of all rows, and of all blocks. A row that reports
log-probabilities costs a step as much as several others, and counts as many. The next row goes to whoever
waits and has the smallest share; where none is free, a client with a larger share gives one, as long as that
makes shares more equal (dominant resource fairness: Ghodsi et al., NSDI 2011). So clients with long answers
and many choices keep nobody waiting until these end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.request import Request

PAUSE_STEPS = 4
"""Between two rows that are given: each costs a copy of blocks and state to host memory and back."""

ALTERNATIVES_A_ROW = 10
"""Of log-probabilities: a row that reports as many costs twice what another does."""


def cost_of(request: Request) -> float:
    """What its row costs a step, in rows."""
    alternatives = None if request.params is None else request.params.logprobs
    return 1.0 if alternatives is None else 1.0 + alternatives / ALTERNATIVES_A_ROW


@dataclass
class Share:
    """Rows and blocks of one client."""

    num_rows: float = 0.0
    num_blocks: int = 0


class FairShares:
    """What each client has at one moment. Pure: requests are read, not changed."""

    def __init__(self, owners: Iterable[Request], *, num_rows: int, num_blocks: int) -> None:
        """``owners`` have rows; there are ``num_rows`` and ``num_blocks`` in all."""
        self._num_rows, self._num_blocks = num_rows, max(1, num_blocks)
        self._shares: dict[str, Share] = {}
        for request in owners:
            share = self._shares.setdefault(request.client, Share())
            share.num_rows += cost_of(request)
            share.num_blocks += len(request.memory.block_ids)

    def of(self, client: str, *, rows: float = 0.0, blocks: int = 0) -> float:
        """A client's share with so many rows and blocks more; 1 is everything."""
        share = self._shares.get(client, Share())
        return max((share.num_rows + rows) / self._num_rows, (share.num_blocks + blocks) / self._num_blocks)

    def next_of(self, waiting: Iterable[Request]) -> Request | None:
        """Who is admitted next: the first of the client with the smallest share."""
        heads: dict[str, Request] = {}
        for request in waiting:
            heads.setdefault(request.client, request)
        return min(heads.values(), key=lambda request: self.of(request.client), default=None)

    def giver_for(self, request: Request, num_blocks: int, running: Iterable[Request]) -> Request | None:
        """Whose row ``request``, which needs ``num_blocks``, should have; None: shares are fair as they are.

        The client with the largest share gives its youngest row. The oldest one of each client stays, so
        that all requests get to their end. ``running`` begins with the oldest.
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
        """Who makes room where blocks run out: the youngest of the client with the largest share, but never
        the oldest of all, unless it is alone. ``running`` begins with the oldest."""
        youngest = {
            request.client: (i, request) for i, request in enumerate(running) if i or len(running) == 1
        }
        return max(youngest.values(), key=lambda found: (self.of(found[1].client), found[0]))[1]


def _youngest_but_oldest(running: Iterable[Request]) -> Iterable[Request]:
    """The youngest request of each client that has several."""
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
