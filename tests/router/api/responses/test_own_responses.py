"""Clients take turns at the store, however many calls one of them makes."""

import asyncio
import logging
from collections import Counter

import pytest

from router.access.api_keys import ApiKey, digest_of
from router.access.client import Client
from router.api.responses.own_responses import OwnResponses, store_turns
from router.api.responses.response_store import NoStore, StoredResponse
from testing.conditions import until
from wire.errors import OverloadedError


class SlowStore(NoStore):
    """A store whose calls last until they are let go."""

    keeps = True

    def __init__(self):
        self.begun = []
        self.may_end = asyncio.Semaphore(0)

    async def find(self, owner, response_id):
        self.begun.append((owner, response_id))
        await self.may_end.acquire()
        return StoredResponse(response_id, None, b"{}", b"[]", b"[]")

    async def save(self, owner, response):
        await self.find(owner, response.id)


def client(name):
    return Client(f"key {name}", ApiKey(name, digest_of(name)))


async def ended(tasks):
    return Counter(type(end) for end in await asyncio.gather(*tasks, return_exceptions=True))


async def test_a_client_waits_for_one_call_of_each_other_client_and_for_no_more():
    store, turns = SlowStore(), store_turns()
    hostile, victim = (OwnResponses(store, turns, client(name)) for name in ("hostile", "victim"))
    tasks = [asyncio.create_task(hostile.find(f"h{i}")) for i in range(20)]
    await until(lambda: store.begun)
    tasks.append(asyncio.create_task(victim.find("v")))
    await asyncio.sleep(0)
    for _ in tasks:
        store.may_end.release()
    assert await ended(tasks) == {StoredResponse: 21}
    assert store.begun.index(("victim", "v")) <= 2


async def test_one_client_s_calls_leave_room_for_others(caplog):
    store, turns = SlowStore(), store_turns(max_calls=16)
    hostile, victim = (OwnResponses(store, turns, client(name)) for name in ("hostile", "victim"))
    tasks = [asyncio.create_task(hostile.find(f"h{i}")) for i in range(40)]
    await until(lambda: sum(task.done() for task in tasks) == 32)
    with pytest.raises(OverloadedError, match=r"8 calls .* of this client .* the limit is 8: send .* again"):
        await hostile.find("one more")
    with caplog.at_level(logging.ERROR):
        await hostile.save(StoredResponse("h", None, b"{}", b"[]", b"[]"))
    assert "response h is not stored: 8 calls for stored responses of this client wait" in caplog.text
    tasks += [asyncio.create_task(victim.find(f"v{i}")) for i in range(4)]
    for _ in tasks:
        store.may_end.release()
    assert await ended(tasks) == {OverloadedError: 32, StoredResponse: 12}
    assert await hostile.find("again")


async def test_a_caller_that_is_gone_gives_its_turn_to_the_next():
    store, turns = SlowStore(), store_turns()
    own = OwnResponses(store, turns, client("a"))
    tasks = [asyncio.create_task(own.find(f"r{i}")) for i in range(3)]
    await until(lambda: store.begun)
    for task in tasks[:2]:
        task.cancel()
    store.may_end.release()
    assert await ended(tasks) == {asyncio.CancelledError: 2, StoredResponse: 1}
    assert [response_id for _, response_id in store.begun] == ["r0", "r2"]
