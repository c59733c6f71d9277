"""Feeds a sink handshakes and tickets in which bits are wrong, in a process that may crash."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection

import numpy as np

from kv_transfer.handshake import introduce
from kv_transfer.nixl.agent import region_of
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener, TransferResult
from testing.kv_transfer.pools import PoolShape
from testing.kv_transfer.source_process import ADDRESS, CONTEXT, DEADLINE_S
from wire.codec import decode, encode
from wire.errors import TransferError, TwinfangError
from wire.messages.handoff import Done, HandshakeReply, HandshakeRequest, Ticket

Outcomes = Counter[str]
READ_DEADLINE_S = 2.0


def flips(data: bytes, masks: Iterable[int] = (1, 2, 4, 8, 16, 32, 64, 128, 255)) -> Iterator[bytes]:
    """Yields the data with one byte changed: each byte, by each mask."""
    for index in range(len(data)):
        for mask in masks:
            yield data[:index] + bytes([data[index] ^ mask]) + data[index + 1 :]


def some_flips(data: bytes, count: int) -> list[bytes]:
    """Returns ``count`` of :func:`flips` with all bits of a byte, evenly from the data's start to its end."""
    every = list(flips(data, [255]))
    return [every[round(i)] for i in np.linspace(0, len(every) - 1, count)]


class Victim(TransferListener):
    """A reading server's sink that gets damaged messages."""

    def __init__(self, name: str) -> None:
        self.results: queue.Queue[TransferResult] = queue.Queue()
        self.faults: queue.Queue[BaseException] = queue.Queue()
        self.caches = PoolShape().caches()
        self.thread = TransferThread(self.caches, name, self.faults.put)
        self.sink = TransferSink(self.thread, introduce(self.caches, name, "fp"), self)
        self.thread.start(self.sink)

    def transferred(self, result: TransferResult) -> None:
        self.results.put(result)

    def connect(self, data: bytes) -> str:
        """Takes the bytes of a handshake's reply; returns ``accepted`` or why they were refused."""
        try:
            self.sink.add_peer(ADDRESS, decode(data, HandshakeReply))
        except TwinfangError as error:
            return error.cause if isinstance(error, TransferError) else error.code
        return "accepted"

    def read(self, data: bytes, local_blocks: list[int], local_slot: int) -> str:
        """Takes the bytes of a ticket and reads what it names."""
        try:
            ticket = decode(data, Ticket)
        except TwinfangError as error:
            return error.code
        self.sink.read(
            ticket,
            block_ids=local_blocks[: len(ticket.block_ids)],
            state_slot=local_slot,
            deadline_s=READ_DEADLINE_S,
        )
        result = self.results.get(timeout=DEADLINE_S)
        if result.error is None:
            return "read"
        return result.error.cause if isinstance(result.error, TransferError) else result.error.code

    def notify(self, incarnation: str, data: bytes) -> None:
        """Sends a notification to the source."""
        sent: queue.Queue[None] = queue.Queue()

        def send() -> None:
            self.thread.agent.notify(incarnation, data)
            sent.put(None)

        self.thread.post(send)
        sent.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self.thread.close()
        assert self.faults.empty(), self.faults.get()


def introduction(name: str) -> HandshakeRequest:
    """Returns the introduction of the :class:`Victim` of that name."""
    return introduce(PoolShape().caches(), name, "fp")


def take_handshakes(pipe: Connection, name: str, replies: list[bytes], sound: bytes) -> None:
    """Sends how often each outcome was seen with ``replies``, then that with the ``sound`` one."""
    with contextlib.closing(Victim(name)) as victim:
        outcomes = Counter(map(victim.connect, replies))
        pipe.send((outcomes, victim.connect(sound)))


def take_tickets(pipe: Connection, name: str, handshake: bytes, ticket: Ticket) -> None:
    """Reads by tickets and notifies by messages in which one bit or byte is wrong; then by the sound ones."""
    with contextlib.closing(Victim(name)) as victim:
        assert victim.connect(handshake) == "accepted"
        blocks, slot = list(range(1, 2 + len(ticket.block_ids))), 2
        sound = encode(ticket)
        outcomes = Counter(victim.read(one, blocks, slot) for one in flips(sound, [1, 64, 255]))
        done = encode(Done(ticket.lease_id + 1, ticket.epoch))
        for one in flips(done, [1, 64, 255]):
            victim.notify(ticket.incarnation, one)
        pipe.send((outcomes, victim.read(sound, blocks, slot)))


def take_metadata(
    pipe: Connection, todo: list[tuple[int, bytes]], name: bytes, reply: HandshakeReply
) -> None:
    """Gives metadata to NIXL as release 0.2.0 did, without a digest, and reads once by each.

    Before each, sends its number: the receiver then knows which one ended the process. ``name`` is the
    peer's in the metadata; NIXL remembers a name that came with nonsense, so each gets another.
    """
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # UCX prints a stack for each crash
    caches = PoolShape().caches()
    agent = TransferThread(caches, f"victim-{os.getpid()}", print).agent
    own, there = region_of(caches.kv), reply.ranks[0].kv_region
    ranges = np.array([(own.address, there.address, 64)], dtype=np.uint64)
    for number, metadata in todo:
        pipe.send(number)
        with contextlib.suppress(TransferError):
            peer = agent.add_peer(metadata.replace(name, b"%0*d" % (len(name), number)))
            read = agent.read(peer, ranges, local=own, remote=there)
            for _ in range(10_000):
                if read.poll() != "busy":
                    break
            agent.remove_peer(peer)
    pipe.send(None)
    os._exit(0)


def num_deaths(reply: HandshakeReply, masks: Iterable[int]) -> tuple[int, int]:
    """Returns how many of the metadata's flips there are, and how many of them end a process that gives them
    to NIXL."""
    metadata, name = reply.ranks[0].agent_metadata, reply.incarnation.encode()
    todo = list(enumerate(flips(metadata, masks)))
    total, deaths = len(todo), 0
    while todo:
        for number in _numbers(take_metadata, todo, name, reply):
            last = number
        if last is None:
            break
        deaths += 1
        todo = [one for one in todo if one[0] > last]
    return total, deaths


def _numbers(target: Callable[..., None], *arguments: object) -> Iterator[int | None]:
    with sacrificed(target, *arguments) as pipe, contextlib.suppress(EOFError):
        number: int | None = 0
        while number is not None:
            assert pipe.poll(DEADLINE_S), "the process hangs"
            number = pipe.recv()
            yield number


@contextlib.contextmanager
def sacrificed(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Runs ``target(pipe, *arguments)`` in a process that may crash, and yields the other end of the pipe."""
    pipe, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield pipe
        process.join(DEADLINE_S)
    finally:
        process.kill()
        process.join()
        pipe.close()


def outcome_of(target: Callable[..., None], *arguments: object) -> tuple[Outcomes, str]:
    """Returns what ``target`` sends from a process of its own. Raises EOFError if that process crashed."""
    with sacrificed(target, *arguments) as pipe:
        assert pipe.poll(2 * DEADLINE_S), "the process hangs"
        outcomes, sound = pipe.recv()
    return outcomes, sound


def without_digest(reply: HandshakeReply) -> HandshakeReply:
    """Returns the reply as release 0.2.0 sends it."""
    return dataclasses.replace(reply, digest=b"")
