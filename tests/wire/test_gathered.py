"""Messages that wait together are sent as one, in their order, and come out again."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import gathered
from wire.codec import encode
from wire.errors import WireError
from wire.gathered import Gathered, Outgoing, messages_in
from wire.messages.generation import Cancel


def message(i: int) -> bytes:
    return encode(Cancel(f"request-{i}"))


async def all_of(outgoing: Outgoing) -> list[bytes]:
    outgoing.close()
    sent = []
    while (data := await outgoing.next()) is not None:
        sent.append(data)
    return sent


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_what_was_gathered_comes_out_in_its_order(messages):
    assert messages_in(encode(Gathered(tuple(messages)))) == tuple(messages)


async def test_a_message_alone_is_sent_as_it_is():
    outgoing = Outgoing()
    waiting = asyncio.create_task(outgoing.next())
    await asyncio.sleep(0)
    outgoing.put(message(1))
    assert await waiting == message(1)
    assert messages_in(message(1)) == (message(1),)


async def test_messages_that_wait_leave_together():
    outgoing = Outgoing()
    for i in range(5):
        outgoing.put(message(i))
    (data,) = await all_of(outgoing)
    assert messages_in(data) == tuple(map(message, range(5)))


async def test_what_is_long_is_not_made_longer(monkeypatch):
    monkeypatch.setattr(gathered, "MAX_BYTES", 100)
    outgoing = Outgoing()
    messages = [b"a" * 60, b"b" * 60, b"c" * 500, b"d" * 30, b"e" * 30]
    for one in messages:
        outgoing.put(one)
    sent = await all_of(outgoing)
    assert [len(messages_in(data)) for data in sent] == [1, 1, 1, 2]
    assert [one for data in sent for one in messages_in(data)] == messages


async def test_until_a_time_further_messages_may_join():
    outgoing = Outgoing()
    outgoing.put(message(1))
    waiting = asyncio.create_task(outgoing.next(not_before_s=asyncio.get_running_loop().time() + 0.05))
    await asyncio.sleep(0)
    outgoing.put(message(2))
    data = await waiting
    assert data is not None
    assert messages_in(data) == (message(1), message(2))


async def test_a_closed_stream_sends_what_waits_and_then_ends():
    outgoing = Outgoing()
    outgoing.put(message(1))
    assert await all_of(outgoing) == [message(1)]
    assert await outgoing.next() is None


def test_what_only_looks_gathered_is_refused():
    with pytest.raises(WireError):
        messages_in(encode(Gathered((b"a",)))[:-1])
