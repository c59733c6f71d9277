"""Connections between the ranks of a group: who may join, and how a rank that is gone or silent is
noticed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent import futures
from contextlib import contextmanager

import pytest

from engine.group import connections as group_connections
from engine.group import mesh as group_mesh
from engine.group.connections import Reception, call, connect_all
from engine.group.lockstep import GroupLockstep
from engine.group.mesh import GroupMesh, Listener
from wire.errors import ConfigError, DeadlineError, GroupLostError
from wire.messages.group import NOTHING, Hello, StepShape, Wish

NAMES = [f"data-parallel rank {i}" for i in range(3)]
SOON_S = 20.0


class Taker(Listener):
    """Takes down what it is told."""

    def __init__(self):
        self.told = []
        self.changed = threading.Condition()

    def heard(self, rank, wish):
        self._note(("heard", rank, wish.number))

    def leaving(self, rank):
        self._note(("leaving", rank))

    def lost(self, error):
        self._note(("lost", error.message))

    def _note(self, what):
        with self.changed:
            self.told.append(what)
            self.changed.notify_all()

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.told), SOON_S), self.told


def pairs(size):
    """For each rank its connections to the others."""
    connections = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            connections[low][high], connections[high][low] = socket.socketpair()
    return connections


@contextmanager
def meshes(size, listeners, each=1):
    made = [GroupMesh(rank, own, names=NAMES, each=each) for rank, own in enumerate(pairs(size))]
    for mesh, listener in zip(made, listeners, strict=True):
        mesh.start(listener)
    try:
        yield made
    finally:
        for mesh in made:
            mesh.leave()
        for mesh in made:
            mesh.close()


def meet(terms, secrets=("s", "s"), within_s=SOON_S):
    """Two ranks with these terms connect; what each got, or its error."""
    found, deadline_s = {}, time.monotonic() + within_s
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()

        def join(rank):
            hello = Hello(secrets[rank], rank, terms[rank], NAMES[rank])
            own = listening if rank == 0 else None
            try:
                found[rank] = connect_all(
                    rank,
                    own,
                    lambda _: address,
                    hello,
                    names=NAMES[:2],
                    deadline_s=deadline_s,
                )
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON_S)
    return found


def hello(rank):
    return Hello("s", rank, {}, NAMES[rank])


def test_ranks_with_equal_terms_are_connected():
    found = meet([{"`num_speculative`": "3"}] * 2)
    assert set(found[0]) == {1}
    assert set(found[1]) == {0}


def test_a_term_that_differs_is_named_with_both_values():
    found = meet([{"`num_speculative`": "3"}, {"`num_speculative`": "2"}])
    for error in found.values():
        assert isinstance(error, ConfigError)
    assert "`num_speculative` is 2 on data-parallel rank 1 and 3 on data-parallel rank 0" in found[0].message


def test_a_caller_who_does_not_know_the_secret_is_not_let_in():
    found = meet([{}, {}], secrets=("s", "t"), within_s=2)
    assert isinstance(found[0], DeadlineError)
    assert "data-parallel rank 1 did not come" in found[0].message


def test_strangers_who_say_nothing_or_nonsense_keep_no_rank_waiting():
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as strangers:
        for said in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5hello"):
            stranger = strangers.enter_context(socket.create_connection(listening.getsockname()))
            stranger.sendall(said)
        with Reception(listening, hello(0)) as reception:
            calling = threading.Thread(target=call, args=(listening.getsockname(), hello(1)))
            calling.start()
            rank, connection = reception.next({1: NAMES[1]}, deadline_s=time.monotonic() + 5)
            calling.join()
    connection.close()
    assert rank == 1


def test_a_stranger_who_says_nothing_is_let_go_in_the_end(monkeypatch):
    monkeypatch.setattr(group_connections, "GREETING_TIMEOUT_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname(), SOON_S) as stranger,
        Reception(listening, hello(0)) as reception,
    ):
        with pytest.raises(DeadlineError, match="data-parallel rank 1 did not come"):
            reception.next({1: NAMES[1]}, deadline_s=time.monotonic() + 1.5)
        assert stranger.recv(1) == b""


def test_a_rank_that_is_there_already_is_refused_and_told_why():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        Reception(listening, hello(0)) as reception,
        futures.ThreadPoolExecutor() as callers,
    ):
        twice = callers.submit(call, listening.getsockname(), hello(1))
        awaited = callers.submit(reception.next, {2: NAMES[2]}, deadline_s=time.monotonic() + SOON_S)
        with pytest.raises(ConfigError, match="data-parallel rank 1 is not missing: it was started twice"):
            twice.result(SOON_S)
        with call(listening.getsockname(), hello(2)), awaited.result(SOON_S)[1]:
            pass


def test_a_rank_that_ends_is_noticed_by_all_and_named():
    takers = [Taker() for _ in range(3)]
    with meshes(3, takers) as made:
        made[1].close()  # without a word
        for taker in (takers[0], takers[2]):
            taker.wait_for(
                lambda told: any(what[0] == "lost" and "rank 1 has ended" in what[1] for what in told)
            )


def test_a_rank_that_falls_silent_is_noticed(monkeypatch):
    monkeypatch.setattr(group_mesh, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(group_mesh, "SILENCE_S", 0.5)
    taker = Taker()
    connections = pairs(2)
    mesh = GroupMesh(0, connections[0], names=NAMES, each=1)
    mesh.start(taker)
    mesh.watch_closely()
    taker.wait_for(lambda told: any("has said nothing for" in str(what[-1]) for what in told))
    mesh.close()
    connections[1][0].close()


def test_bytes_that_are_no_message_end_the_group():
    taker = Taker()
    connections = pairs(2)
    mesh = GroupMesh(0, connections[0], names=NAMES, each=1)
    mesh.start(taker)
    connections[1][0].sendall(b"\xff" * 64)
    taker.wait_for(lambda told: any("a message that can't be read" in str(what[-1]) for what in told))
    mesh.close()
    connections[1][0].close()


def test_ranks_that_have_all_left_may_close_in_any_order():
    takers = [Taker() for _ in range(3)]
    with meshes(3, takers) as made:
        for mesh in made:
            mesh.leave()
        assert all(mesh.wait_until_all_left(SOON_S) for mesh in made)
    assert not any(what[0] == "lost" for taker in takers for what in taker.told)


def lockstep(mesh, errors):
    return GroupLockstep(mesh, (0, 1), on_lost=errors.append, on_leaving=lambda rank: None)


@contextmanager
def two_in_lockstep():
    errors = []
    made = [GroupMesh(rank, own, names=NAMES, each=1) for rank, own in enumerate(pairs(2))]
    steps = [lockstep(mesh, errors) for mesh in made]
    for mesh, one in zip(made, steps, strict=True):
        mesh.start(one)
    try:
        yield steps, made, errors
    finally:
        for mesh in made:
            mesh.leave()
        for mesh in made:
            mesh.close()


def test_ranks_without_work_exchange_nothing():
    with two_in_lockstep() as (steps, _, _):
        assert steps[0].agree(NOTHING) is NOTHING
        assert steps[1].agree(NOTHING) is NOTHING


def test_a_wish_wakes_a_sleeping_rank_and_all_agree_on_the_largest():
    with two_in_lockstep() as (steps, _, _):
        woken, agreed = threading.Event(), []
        steps[1].on_wake(woken.set)
        for number in (1, 2, 3):
            wish = StepShape(number, 4 * number, number == 2)
            asking = threading.Thread(target=lambda wish=wish: agreed.append(steps[0].agree(wish)))
            asking.start()
            assert woken.wait(SOON_S)
            woken.clear()
            assert steps[1].agree(NOTHING) == wish
            asking.join(SOON_S)
            assert agreed.pop() == wish


def test_a_wish_that_came_before_anybody_could_be_woken_is_not_missed():
    with two_in_lockstep() as (steps, made, _):
        made[0].tell(Wish(0, StepShape(1, 1, False)))
        limit = time.monotonic() + SOON_S
        while not steps[1]._heard and time.monotonic() < limit:
            time.sleep(0.01)
        woken = threading.Event()
        steps[1].on_wake(woken.set)
        assert woken.is_set()


def test_a_rank_that_waits_for_one_that_ends_gets_an_error():
    with two_in_lockstep() as (steps, made, errors):
        ends = threading.Timer(0.2, made[1].close)
        ends.start()
        with pytest.raises(GroupLostError, match="data-parallel rank 1 has ended"):
            steps[0].agree(StepShape(1, 1, False))
        assert "data-parallel rank 1 has ended" in errors[0].message


def test_ranks_settle_once_all_have_come():
    with two_in_lockstep() as (steps, _, _):
        computed = []

        def late():
            for number in (1, 2):
                steps[1].agree(StepShape(number, number, False))
            steps[1].settle(computed.append)

        thread = threading.Thread(target=late)
        thread.start()
        steps[0].settle(computed.append)
        thread.join(SOON_S)
        assert [shape.num_rows for shape in computed] == [1, 2]
