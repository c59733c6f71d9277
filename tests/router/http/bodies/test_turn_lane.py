"""Requests begin one at a time, large bodies are parsed one at a time, and clients take turns."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from router.http.bodies import body_room, json_body
from router.http.bodies.body_room import BodyRoom, BodyShare
from router.http.bodies.turn_lane import LARGE_BODY_BYTES, TurnLane
from testing.conditions import until
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import saying
from wire.errors import OverloadedError


@asynccontextmanager
async def queued(lane, *clients):
    """Each client's turns, in the order of their begin, once the lane is free."""
    order, tasks = [], []

    async def take_turn(client):
        async with lane.turn(client):
            order.append(client)

    async with lane.turn("first"):
        for client in clients:
            tasks.append(asyncio.create_task(take_turn(client)))
            await asyncio.sleep(0)
        assert order == []
    yield order, tasks
    await asyncio.wait(tasks, timeout=20)


async def test_clients_take_turns_however_many_bodies_one_has():
    async with queued(TurnLane(), "hostile", "hostile", "hostile", "victim") as (order, _):
        await until(lambda: len(order) == 4)
        assert order == ["hostile", "victim", "hostile", "hostile"]


async def test_there_is_a_pause_between_two_turns(monkeypatch):
    pauses = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda s, *call: pauses.append(s) or call_later(s, *call))
    async with TurnLane().turn("a"):
        pass
    assert pauses == [0.0]
    lane = TurnLane(pause=1e9)
    async with lane.turn("a"):
        pass
    assert pauses[1] > 0

    async def take_turn():
        async with lane.turn("b"):
            pass

    waiting = asyncio.create_task(take_turn())
    await until(lambda: lane._waiting)
    assert not waiting.done(), "the pause is not over"
    waiting.cancel()


async def test_one_request_begins_in_an_iteration_of_the_event_loop(make_stack, monkeypatch):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    num_iterations, begun = 0, []
    parse = json_body._parsed

    async def count():
        nonlocal num_iterations
        while True:
            num_iterations += 1
            await asyncio.sleep(0)

    def noting(*args):
        begun.append(num_iterations)
        return parse(*args)

    monkeypatch.setattr(json_body, "_parsed", noting)
    counting = asyncio.create_task(count())
    await asyncio.gather(*(stack.complete(max_tokens=1) for _ in range(8)))
    counting.cancel()
    assert len(set(begun)) == len(begun) == 8


async def test_who_goes_away_keeps_nobody_waiting():
    async with queued(TurnLane(), "a", "b", "c") as (order, tasks):
        tasks[0].cancel()
        await until(lambda: len(order) == 2)
        assert order == ["b", "c"]
    lane = TurnLane()
    async with queued(lane, "a", "b") as (order, tasks):
        lane._next()  # it is a's turn, and a does not know
        tasks[0].cancel()
        await until(lambda: order == ["b"])


async def test_a_turn_lasts_until_its_work_has_ended_though_its_caller_has_left():
    lane, begun = TurnLane(num_turns=2), []
    works = [asyncio.get_running_loop().create_future() for _ in range(4)]

    def begin(index):
        begun.append(index)
        return works[index]

    tasks = [asyncio.create_task(lane.run("a", lambda i=i: begin(i))) for i in range(4)]
    await until(lambda: begun == [0, 1])
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks[:2])
    await asyncio.sleep(0)
    assert begun == [0, 1]
    works[1].set_exception(ValueError("nobody reads this"))
    await until(lambda: begun == [0, 1, 2])
    for work in (works[0], works[2], works[3]):
        work.set_result(7)
    assert await asyncio.gather(*tasks[2:]) == [7, 7]
    async with lane.turn("a"), lane.turn("b"):
        pass  # both turns are free again


async def test_large_bodies_take_turns_and_small_ones_do_not_wait(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    large = {"model": MODEL, "prompt": "hello", "max_tokens": 1, "x": "a" * LARGE_BODY_BYTES}
    async with stack.app.state.body_room.large_bodies.turn("somebody"):
        waiting = asyncio.create_task(stack.client.post("/v1/completions", json=large))
        await until(lambda: stack.app.state.body_room.large_bodies._waiting)
        assert (await stack.complete(max_tokens=1)).status_code == 200
        assert not waiting.done()
    assert (await waiting).status_code == 200
    assert len(json.dumps(large)) > LARGE_BODY_BYTES


def test_no_client_has_all_room_for_bodies():
    room = BodyRoom(1600)
    room.take("hostile", 800)
    with pytest.raises(OverloadedError, match="the limit is 800, half of"):
        room.take("hostile", 1)
    room.take("victim", 400)
    room.take("third", 200)
    room.give_back("hostile", 800)
    room.take("victim", 300)
    assert room.num_bytes == 900


async def test_a_large_body_keeps_its_turn_until_its_room_is_given_back():
    room = BodyRoom(1 << 20)
    first, second = BodyShare(room, "a"), BodyShare(room, "b")
    async with first.turn():
        pass

    async def parse():
        async with second.turn():
            pass

    waiting = asyncio.create_task(parse())
    await until(lambda: room.large_bodies._waiting)
    async with first.turn():
        pass  # what else the request has to parse needs no other turn
    assert not waiting.done()
    first.give_back()
    await waiting
    second.end()


async def test_a_large_body_whose_checks_last_loses_its_turn(monkeypatch):
    monkeypatch.setattr(body_room, "MAX_TURN_S", 0.01)
    room = BodyRoom(1 << 20)
    slow = BodyShare(room, "slow")
    async with slow.turn():
        pass
    async with BodyShare(room, "b").turn():
        pass
    slow.end()


async def test_all_requests_take_turns_but_health_probes(make_stack):
    stack = await make_stack()
    lane = stack.app.entrance._beginnings
    async with lane.turn("another"):
        waiting = [
            asyncio.create_task(stack.client.get(path))
            for path in ("/v1/models", "/metrics", "/openapi.json")
        ]
        await until(lambda: sum(map(len, lane._waiting.values())) == len(waiting))
        for path in ("/healthz", "/readyz", "/health", "/ping", "/version"):
            assert (await stack.client.get(path)).status_code == 200
        assert not any(task.done() for task in waiting)
    for answer in await asyncio.gather(*waiting):
        assert answer.status_code == 200
