"""The progress of prompts that are leased while they are being computed, sent to their followers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from wire.errors import LeaseError
from wire.messages.handoff import AnyTicket, Follow, Progress, Ticket


@dataclass
class _Feed:
    """The feed of one lease."""

    block_ids: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    ticket: Ticket | None = None
    has_ended: bool = False
    followers: set[asyncio.Event] = field(default_factory=set)

    def wake(self) -> None:
        for follower in self.followers:
            follower.set()


class ProgressFeeds:
    """One feed per lease, from the early ticket to the lease's end. Used only on the event loop."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._feeds: dict[tuple[int, int], _Feed] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    def open(self, early: AnyTicket) -> None:
        self._feeds[early.lease_id, early.epoch] = _Feed()

    def add(self, early: AnyTicket, block_ids: Sequence[int], digests: Sequence[int] = ()) -> None:
        """Adds blocks that are full and will not change any more, and their digests if the server makes
        any."""
        feed = self._feeds.get((early.lease_id, early.epoch))
        if feed is not None and block_ids:
            feed.block_ids += block_ids
            feed.digests += digests
            feed.wake()

    def complete(self, ticket: Ticket) -> None:
        """Sends the whole ticket to followers: the prompt is computed."""
        feed = self._feeds.get((ticket.lease_id, ticket.epoch))
        if feed is not None:
            feed.ticket = ticket
            feed.wake()

    def end(self, lease_id: int, epoch: int) -> None:
        """Ends the feed: the lease is over, whether or not the prompt was computed."""
        feed = self._feeds.pop((lease_id, epoch), None)
        if feed is not None:
            feed.has_ended = True
            feed.wake()

    async def follow(self, message: Follow) -> AsyncGenerator[Progress | Ticket, None]:
        """Yields the blocks that are already full, further blocks as they become full, and at last the
        ticket.

        One message may report the blocks of several steps. Raises :class:`LeaseError` if the lease is unknown
        or ends before the prompt is computed.
        """
        feed = self._feeds.get((message.lease_id, message.epoch))
        if feed is None or message.incarnation != self._incarnation:
            raise LeaseError(f"lease {message.lease_id}, epoch {message.epoch}, has ended")
        news = asyncio.Event()
        feed.followers.add(news)
        num_told = 0
        try:
            while feed.ticket is None:
                if feed.has_ended:
                    raise LeaseError("the prompt was given up while it was being computed")
                if len(feed.block_ids) == num_told:
                    news.clear()
                    await news.wait()
                    continue
                block_ids, digests = tuple(feed.block_ids[num_told:]), tuple(feed.digests[num_told:])
                num_told += len(block_ids)
                yield Progress(block_ids, digests)
            yield feed.ticket
        finally:
            feed.followers.discard(news)
