"""A server that leaves hands its most valuable starts to servers that stay: it offers, and they read.

Both sides are bounded. The leaving server stops after a time. A server that stays takes at most a part of its
host memory from each server that leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

from engine.engine import Engine
from engine.host import EngineHost
from kv_transfer.reads.peers import Peers
from kv_transfer.starts.heirs import Heirs
from wire.errors import TwinfangError
from wire.messages.neighbours import OfferReply, OfferStart

log = logging.getLogger(__name__)

HAND_OVER_S = 30.0
"""How long a leaving server offers what it has."""
OFFER_S = 10.0
"""How long one server that stays may take to read a start."""
TAKEN_SHARE = 0.25
"""Part of its host memory that a server takes from one that leaves."""
MAX_LEAVING = 64
"""Leaving servers that are remembered."""

Answer = Callable[[OfferReply], None]


class HandOver:
    """The leaving server's side. Used on the event loop."""

    def __init__(
        self, host: EngineHost, engine: Engine, peers: Peers, *, address: str, incarnation: str
    ) -> None:
        self._host = host
        self._engine = engine
        self._peers = peers
        self._address = address
        self._incarnation = incarnation
        self._task: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, heirs: Sequence[str]) -> None:
        """Begins to offer starts to the servers that stay, unless that has begun already."""
        if heirs and not self.is_under_way:
            self._task = asyncio.create_task(self._run(heirs))

    async def end(self) -> None:
        """Stops offering."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, addresses: Sequence[str]) -> None:
        starts = await self._host.ask(self._engine.calls.most_valuable)
        heirs, offers = Heirs(addresses), {address: deque[tuple[bytes, ...]]() for address in addresses}
        for keys in starts:
            offers[heirs.choose(keys)].append(keys)
        until_s = time.monotonic() + HAND_OVER_S
        taken = await asyncio.gather(*(self._offer(*one, until_s) for one in offers.items()))
        log.info(
            "handed over %d of %d cached prefixes to %d servers", sum(taken), len(starts), len(addresses)
        )

    async def _offer(self, address: str, starts: deque[tuple[bytes, ...]], until_s: float) -> int:
        """Offers starts to one server, one after the other. Returns how many it took."""
        num_taken = 0
        while starts and time.monotonic() < until_s:
            keys = starts.popleft()
            salt = await self._host.ask(partial(self._engine.scheduler.owned.cache.salt_of, keys[-1]))
            if salt is None:
                continue
            offer = OfferStart(self._address, self._incarnation, keys, salt)
            try:
                reply = await self._peers.offer(address, offer, timeout_s=OFFER_S)
            except TwinfangError as error:
                log.info("the server at %s takes no cached prefixes: %s", address, error.message)
                break
            num_taken += reply.is_taken
            self._engine.measures.neighbour_cache.handed_over += reply.is_taken
            if not reply.may_offer_more:
                break
        return num_taken


class Inheritance:
    """The side of a server that stays: how much it has taken from each server that leaves."""

    def __init__(self, host: EngineHost, engine: Engine) -> None:
        self._host = host
        self._files = engine.file_choices
        self._memory = engine.scheduler.owned.cache.tier.memory
        self._taken: OrderedDict[str, int] = OrderedDict()
        """Pages that were taken from each incarnation. Used on the engine's thread."""

    async def offered(self, offer: OfferStart) -> OfferReply:
        """Reads a start of a leaving server, unless it is here or takes too much."""
        outcome: asyncio.Future[OfferReply] = asyncio.get_running_loop().create_future()

        def answer(reply: OfferReply) -> None:
            if not outcome.done():
                outcome.set_result(reply)

        self._host.post(lambda: self._take(offer, lambda reply: self._host.answer(answer, reply)))
        return await outcome

    def _take(self, offer: OfferStart, answer: Answer) -> None:
        most = int(TAKEN_SHARE * self._memory.num_pages) - self._taken.get(offer.incarnation, 0)

        def was_read(is_read: bool) -> None:
            num_bytes = num_pages * self._memory.page_bytes if is_read else 0
            answer(OfferReply(is_read, num_bytes))

        num_pages = self._files.take_over(offer.keys, offer.salt, offer.address, most, was_read)
        if not num_pages:
            answer(OfferReply(False, may_offer_more=most > self._memory.state_pages))
            return
        self._taken[offer.incarnation] = self._taken.pop(offer.incarnation, 0) + num_pages
        if len(self._taken) > MAX_LEAVING:
            self._taken.popitem(last=False)
