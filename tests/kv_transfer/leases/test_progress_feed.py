"""A follower of a prompt gets every block once, in order, then the ticket or the news that the prompt
ended."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.leases.progress_feed import ProgressFeeds
from testing.kv_transfer.early_tickets import early_ticket, ticket_of
from wire.errors import LeaseError
from wire.messages.handoff import Follow, Progress

EARLY = early_ticket(13)
TICKET = ticket_of(EARLY, (1, 2, 3, 4))
FOLLOW = Follow("aa", EARLY.lease_id, EARLY.epoch)


@pytest.fixture
def feeds():
    feeds = ProgressFeeds("aa")
    feeds.open(EARLY)
    return feeds


async def all_news(feeds):
    return [news async for news in feeds.follow(FOLLOW)]


async def test_what_came_before_is_told_at_once_and_the_rest_as_it_comes(feeds):
    feeds.add(EARLY, [1])
    feeds.add(EARLY, [2])
    news = feeds.follow(FOLLOW)
    assert await anext(news) == Progress((1, 2))
    waiting = asyncio.ensure_future(anext(news))
    await asyncio.sleep(0)
    feeds.add(EARLY, [])
    feeds.add(EARLY, [3])
    assert await waiting == Progress((3,))
    feeds.complete(TICKET)
    assert [one async for one in news] == [TICKET]


async def test_who_comes_when_the_prompt_is_computed_gets_its_ticket_alone(feeds):
    feeds.add(EARLY, [1, 2, 3])
    feeds.complete(TICKET)
    assert await all_news(feeds) == [TICKET]
    assert await all_news(feeds) == [TICKET], "another one may follow as well"


async def test_the_end_of_the_lease_is_told_to_all_who_wait(feeds):
    waiting = [asyncio.ensure_future(all_news(feeds)) for _ in range(2)]
    await asyncio.sleep(0)
    feeds.end(EARLY.lease_id, EARLY.epoch)
    for one in waiting:
        with pytest.raises(LeaseError, match="given up"):
            await one
    assert len(feeds) == 0


@pytest.mark.parametrize(
    "message",
    [
        Follow("bb", EARLY.lease_id, EARLY.epoch),
        Follow("aa", 6, EARLY.epoch),
        Follow("aa", EARLY.lease_id, 3),
    ],
    ids=["another life", "another lease", "another epoch"],
)
async def test_what_is_not_leased_can_t_be_followed(feeds, message):
    with pytest.raises(LeaseError, match="has ended"):
        await anext(feeds.follow(message))
