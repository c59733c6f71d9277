"""The gate as requests use it. The test says what servers have room for."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from router.admission.fair_queue import QueuedRequest
from router.admission.gate import Gate, GateLimits
from router.fleet.links.capacity import Capacity, Resource
from testing.conditions import until
from wire.errors import DeadlineError, OverloadedError, UnavailableError


class Servers:
    """What the gate asks."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.may_return = True

    def room(self) -> Capacity | None:
        return Capacity((Resource(self.rows),), (), ()) if self.rows else None


class Client:
    """One request: it asks, and if it is let in it stays until it is told to leave."""

    def __init__(
        self, gate: Gate, client: str = "", priority: int = 0, num_choices: int = 1, timeout_s: float = 20
    ):
        self.gate = gate
        self.asked = QueuedRequest(
            client, priority, num_choices, 10 * num_choices, time.monotonic(), self._begin
        )
        self.is_in = False
        self.num_begun = 0
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._run(asyncio.get_running_loop().time() + timeout_s))

    async def _run(self, deadline: float) -> None:
        self.place = self.gate.admit(self.asked) or await self.gate.wait(self.asked, deadline=deadline)
        try:
            self.is_in = True
            self._begin()
            await self.done.wait()
        finally:
            self.gate.leave(self.place)

    def _begin(self) -> None:
        if self.is_in:
            self.num_begun = self.asked.num_places - self.place.num_left

    def choice_ends(self) -> None:
        """One of several."""
        self.gate.choice_ended(self.place)

    async def leave(self) -> None:
        self.done.set()
        await self.task

    async def end(self) -> BaseException | None:
        await asyncio.wait([self.task], timeout=10)
        return asyncio.CancelledError() if self.task.cancelled() else self.task.exception()


@asynccontextmanager
async def gate_of(rows: int, max_queue: int = 1000, max_in_flight: int = 1000, hold_s: float = 0):
    servers = Servers(rows)
    limits = GateLimits(max_in_flight, max_queue, hold_s)
    problem = UnavailableError("no server is there")
    gate = Gate(limits, servers.room, lambda: problem, lambda: servers.may_return)
    yield gate, servers
    assert (gate.num_in_flight, gate.num_waiting) == (0, 0), "something was left behind"


async def clients_of(gate: Gate, count: int, **asked) -> list[Client]:
    clients = []
    for _ in range(count):
        clients.append(Client(gate, **asked))
        await asyncio.sleep(0)
    return clients


async def leave(clients: list[Client]) -> None:
    for client in clients:
        await client.leave()


async def test_as_many_run_as_servers_have_room_for_and_the_rest_wait():
    async with gate_of(rows=2) as (gate, _):
        clients = await clients_of(gate, 5)
        assert [client.is_in for client in clients] == [True, True, False, False, False]
        assert (gate.num_in_flight, gate.num_waiting, gate.places) == (2, 3, 2)
        await clients[0].leave()
        await until(lambda: clients[2].is_in)
        await leave(clients)


async def test_choices_are_counted_not_requests():
    async with gate_of(rows=16) as (gate, _):
        others = await clients_of(gate, 11)
        clients = await clients_of(gate, 2, num_choices=3)
        assert [client.is_in for client in clients] == [True, False]
        late = await clients_of(gate, 1)
        assert not late[0].is_in, "a small request overtook a large one"
        await clients[0].leave()
        await until(lambda: clients[1].is_in and late[0].is_in)
        await leave([*clients, *late, *others])


async def test_a_request_of_many_choices_leaves_places_to_others():
    async with gate_of(rows=16) as (gate, _):
        (large,) = await clients_of(gate, 1, num_choices=100)
        assert large.num_begun == 12
        small = await clients_of(gate, 4)
        assert all(client.is_in for client in small)
        assert gate.num_in_flight == gate.places
        await leave([large, *small])


async def test_a_second_one_waits_for_one_place_and_keeps_nobody_behind_it_waiting():
    async with gate_of(rows=16) as (gate, _):
        first, second = await clients_of(gate, 2, num_choices=100)
        assert (first.num_begun, second.num_begun) == (12, 1)
        small = await clients_of(gate, 4)
        assert [client.is_in for client in small] == [True, True, True, False]
        first.choice_ends()
        assert first.num_begun == 12, "its place is for who waits"
        await until(lambda: small[3].is_in)
        await leave([second, *small])
        await until(lambda: first.num_begun == 13)
        await first.leave()


async def test_choices_that_are_left_begin_as_others_end_and_as_places_are_free():
    async with gate_of(rows=16) as (gate, _):
        small = await clients_of(gate, 14)
        (large,) = await clients_of(gate, 1, num_choices=20)
        assert large.num_begun == 1
        await leave(small)
        await until(lambda: large.num_begun == 12)
        for _ in range(8):
            large.choice_ends()
        assert large.num_begun == 20
        assert gate.num_in_flight == 12
        for _ in range(11):
            large.choice_ends()
        assert gate.num_in_flight == 1, "places of choices that ended are others' before the request has"
        await large.leave()


async def test_the_last_place_stays_until_all_choices_have_begun():
    async with gate_of(rows=2) as (gate, _):
        (large,) = await clients_of(gate, 1, num_choices=10)
        small = await clients_of(gate, 3)
        for number in range(9):
            large.choice_ends()
            assert large.num_begun >= 2 + number
        assert large.num_begun == 10
        await leave([large, *small])


async def test_a_client_gets_its_share_though_others_hold_all_places():
    async with gate_of(rows=16) as (gate, _):
        hostile = await clients_of(gate, 20, client="hostile")
        assert (gate.num_in_flight, gate.num_waiting) == (16, 4)
        victim = await clients_of(gate, 10, client="victim")
        assert [client.is_in for client in victim] == [True] * 8 + [False] * 2
        third = await clients_of(gate, 6, client="third")
        assert [client.is_in for client in third] == [True] * 5 + [False], "16 places are 5 for each of three"
        assert not any(client.is_in for client in hostile[16:])
        await leave([*hostile[:16], *victim, *third, *hostile[16:]])


async def test_many_choices_begin_with_their_clients_share():
    async with gate_of(rows=16) as (gate, _):
        hostile = await clients_of(gate, 20, client="hostile")
        (victim,) = await clients_of(gate, 1, client="victim", num_choices=12)
        assert victim.num_begun == 8
        await leave(hostile)
        await until(lambda: victim.num_begun == 12)
        await victim.leave()


async def test_more_clients_than_places_have_no_share_to_claim():
    async with gate_of(rows=2) as (gate, _):
        first = await clients_of(gate, 2, client="first")
        others = [(await clients_of(gate, 1, client=name))[0] for name in "abc"]
        assert [client.is_in for client in others] == [True, False, False]
        assert gate.num_in_flight == 3
        await leave([*first, *others])


async def test_however_many_clients_come_shares_add_up_to_little():
    async with gate_of(rows=16) as (gate, _):
        crowds = [await clients_of(gate, 20, client=f"client {number}") for number in range(20)]
        assert gate.num_in_flight == sum(16 // k for k in range(1, 17)) == 50
        for crowd in crowds:
            for client in crowd:
                client.done.set()
        await until(lambda: all(client.task.done() for crowd in crowds for client in crowd))


async def test_the_operators_limit_holds_for_shares_too():
    async with gate_of(rows=50, max_in_flight=4) as (gate, _):
        hostile = await clients_of(gate, 4, client="hostile")
        (victim,) = await clients_of(gate, 1, client="victim")
        assert not victim.is_in
        await leave([*hostile, victim])


async def test_the_operators_limit_holds_whatever_servers_have():
    async with gate_of(rows=50, max_in_flight=1) as (gate, _):
        clients = await clients_of(gate, 2)
        assert [client.is_in for client in clients] == [True, False]
        gate.limits = GateLimits(2, 100)
        await until(lambda: clients[1].is_in)
        await leave(clients)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    async with gate_of(rows=1, max_queue=2) as (gate, _):
        clients = await clients_of(gate, 4)
        error = await clients[3].end()
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s >= 1
        assert "2 requests wait, the limit is 2" in error.message
        with pytest.raises(OverloadedError):
            gate.refuse_early("", 0)
        gate.refuse_early("", -1)  # that one would get in
        await leave(clients[:3])


async def test_priorities_and_keys_share_a_full_queue():
    async with gate_of(rows=1, max_queue=3) as (gate, _):
        greedy = await clients_of(gate, 4, client="greedy")
        (other,) = await clients_of(gate, 1, client="other")
        assert isinstance(await greedy[3].end(), OverloadedError)
        (urgent,) = await clients_of(gate, 1, client="greedy", priority=-1)
        assert isinstance(await greedy[2].end(), OverloadedError)
        await greedy[0].leave()
        await until(lambda: urgent.is_in)
        await urgent.leave()
        await until(lambda: greedy[1].is_in or other.is_in)
        await leave([greedy[1], other])


async def test_who_goes_away_leaves_the_queue_and_nobody_waits_for_it():
    async with gate_of(rows=2) as (gate, _):
        first = await clients_of(gate, 1)
        large, small = await clients_of(gate, 1, num_choices=2) + await clients_of(gate, 1)
        assert not small.is_in
        large.task.cancel()
        await until(lambda: small.is_in)
        assert isinstance(await large.end(), asyncio.CancelledError)
        await leave([*first, small])


async def test_a_deadline_passes_in_the_queue():
    async with gate_of(rows=1) as (gate, _):
        first = await clients_of(gate, 1)
        (late,) = await clients_of(gate, 1, timeout_s=0.05)
        assert isinstance(await late.end(), DeadlineError)
        assert gate.num_waiting == 0
        await leave(first)


async def test_who_is_let_in_and_goes_away_in_the_same_moment_leaves_its_place():
    async with gate_of(rows=1) as (gate, _):
        first, second, third = await clients_of(gate, 3)
        first.done.set()
        await asyncio.sleep(0)  # it has left, the second one is let in and does not know
        second.task.cancel()
        await until(lambda: third.is_in)
        await leave([first, third])


async def test_all_go_away_in_one_moment():
    async with gate_of(rows=2) as (gate, _):
        clients = await clients_of(gate, 6)
        for client in clients:
            client.task.cancel()
        await until(lambda: all(client.task.done() for client in clients))


async def test_room_that_appears_is_used():
    async with gate_of(rows=1) as (gate, servers):
        clients = await clients_of(gate, 3)
        servers.rows = 3
        await until(lambda: all(client.is_in for client in clients))
        await leave(clients)


async def test_without_servers_nobody_is_held_unless_told_to():
    async with gate_of(rows=1) as (gate, servers):
        clients = await clients_of(gate, 3)
        servers.rows = 0
        (new,) = await clients_of(gate, 1)
        for refused in (new, *clients[1:]):
            assert isinstance(await refused.end(), UnavailableError)
        await leave(clients[:1])


async def test_without_servers_requests_wait_and_are_let_in_by_priority_once_one_is_back():
    async with gate_of(rows=1, hold_s=20) as (gate, servers):
        servers.rows = 0
        late, early = await clients_of(gate, 1, priority=1) + await clients_of(gate, 1)
        assert (gate.num_held, gate.num_in_flight) == (2, 0)
        servers.rows = 1
        await until(lambda: early.is_in)
        assert not late.is_in
        assert gate.num_held == 0, "it waits for its turn now"
        await leave([early, late])


async def test_nobody_waits_for_servers_that_will_not_return():
    async with gate_of(rows=1, hold_s=20) as (gate, servers):
        clients = await clients_of(gate, 2)
        servers.rows = 0
        await until(lambda: gate.num_held == 1)
        servers.may_return = False
        (new,) = await clients_of(gate, 1)
        for refused in (clients[1], new):
            assert isinstance(await refused.end(), UnavailableError)
        await leave(clients[:1])


async def test_who_waits_for_the_first_server_takes_no_place():
    async with gate_of(rows=0, hold_s=20) as (gate, servers):
        deadline = asyncio.get_running_loop().time() + 20
        waiting = [asyncio.create_task(gate.wait_for_servers("", 0, deadline=deadline)) for _ in range(3)]
        await until(lambda: gate.num_held == 3)
        servers.rows = 1
        await asyncio.gather(*waiting)
        assert gate.num_in_flight == 0


async def test_a_full_queue_refuses_those_that_would_wait_for_servers():
    async with gate_of(rows=0, max_queue=1, hold_s=20) as (gate, servers):
        (held,) = await clients_of(gate, 1)
        with pytest.raises(OverloadedError):
            gate.refuse_early("", 0)
        (refused,) = await clients_of(gate, 1)
        assert isinstance(await refused.end(), OverloadedError)
        servers.rows = 1
        await until(lambda: held.is_in)
        await leave([held])
