"""The attacks: what each client does again and again, and the number of clients."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.hostile import bodies
from benchmarks.hostile.bodies import Requests
from benchmarks.hostile.connection import connected, post_unfinished

REFUSALS = (400, 413, 422)
WAVE = 200
TRICKLE_S = 0.5
SLOW_READ_BYTES, SLOW_READ_S = 256, 0.5
SMALL_BUFFER = 4096
RESPONSE_ID = re.compile(rb"resp_[0-9a-f]+")


@dataclass
class Tally:
    """The results of an attack's requests."""

    counts: Counter[str] = field(default_factory=Counter)
    """Results by HTTP status; "broken" if the connection broke."""
    longest_s: float = 0.0
    """Longest time that a connection was held, or that an answer took."""
    bytes_read: int = 0
    noted: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Target:
    """The router that is attacked."""

    address: str
    model: str
    source: str = ""
    """Loopback address from which requests come. A router without keys distinguishes clients by it."""


Rounds = Callable[[Target, int, Tally], AsyncIterator[None]]
"""What one client does: target, the client's number, tally. Each round ends with a ``yield``."""


@dataclass(frozen=True)
class Attack:
    """One kind of hostile client."""

    name: str
    does: str
    num_clients: int
    num_peers: int
    """Number of well-behaved clients in its place in the baseline: the requests that the attack has in
    flight."""
    rounds: Rounds
    as_long: str = "ordinary"
    """The attack of :data:`WELL_BEHAVED` whose answers are as long as this attack's."""
    every_s: float = 0.25
    """Least time between two rounds of a client: the attack is in what it asks for, not in how often."""


BUILT_BEFORE = 4
"""Number of each client's requests that are built before an attack begins."""


def sending(requests: Callable[[str, int], Requests]) -> Rounds:
    """Makes rounds of one request each; the answer is read to its end."""

    def rounds(target: Target, client: int, tally: Tally) -> AsyncIterator[None]:
        further = requests(target.model, client)
        return send(target, tally, itertools.chain(list(itertools.islice(further, BUILT_BEFORE)), further))

    async def send(target: Target, tally: Tally, built: Iterable[bytes]) -> AsyncIterator[None]:
        for request in built:
            began = time.monotonic()
            async with connected(target.address, source=target.source) as connection:
                await connection.send(request)
                tally.counts[str(await connection.status())] += 1
                tally.bytes_read += await connection.drain()
            tally.longest_s = max(tally.longest_s, time.monotonic() - began)
            yield

    return rounds


async def many_choices(target: Target, client: int, tally: Tally) -> AsyncIterator[None]:
    """Asks for the most that is admitted. After a refusal it asks for less."""
    rung = 0
    while True:
        async with connected(target.address, source=target.source) as connection:
            await connection.send(bodies.many_choices(target.model, rung))
            status = await connection.status()
            tally.counts[str(status)] += 1
            if status == 200:
                tally.noted.add(" ".join(f"{name} {value}" for name, value in bodies.LADDER[rung].items()))
            elif status in REFUSALS:
                rung = min(rung + 1, len(bodies.LADDER) - 1)
            tally.bytes_read += await connection.drain()
        yield


async def fill_store(target: Target, client: int, tally: Tally) -> AsyncIterator[None]:
    """Stores a response with each request. Each continues the one before, until that is refused: then its
    conversation is too long, and another one begins."""
    previous_id = None
    for number in itertools.count():
        began = time.monotonic()
        async with connected(target.address, source=target.source) as connection:
            await connection.send(bodies.stored_turn(target.model, number, previous_id))
            answer = await connection.read_until(b"}")
            status = answer.split(None, 2)[1].decode()
            tally.counts[status] += 1
            found = RESPONSE_ID.search(answer)
            previous_id = found[0].decode() if status == "200" and found else None
            tally.bytes_read += len(answer) + await connection.drain()
        tally.longest_s = max(tally.longest_s, time.monotonic() - began)
        yield


async def trickle(target: Target, client: int, tally: Tally) -> AsyncIterator[None]:
    """Sends a body byte by byte, long after its request was answered."""
    requests = [
        post_unfinished("/v1/completions", 900_000_000),
        post_unfinished("/v1/responses", 900_000_000),
        post_unfinished("/v1/messages", 900_000_000),
        post_unfinished("/v1/nothing", 1_000_000),
        post_unfinished("/healthz", 1_000_000),
    ]
    for request in itertools.islice(itertools.cycle(requests), client % len(requests), None):
        async with connected(target.address, source=target.source) as connection:
            await connection.send(request)
            tally.counts[str(await connection.status())] += 1
            answered = time.monotonic()
            try:
                while True:
                    await asyncio.sleep(TRICKLE_S)
                    await connection.send(b" ")
            except OSError:
                pass  # the server had enough
            finally:
                tally.longest_s = max(tally.longest_s, time.monotonic() - answered)
        yield


async def read_slowly(target: Target, client: int, tally: Tally) -> AsyncIterator[None]:
    """Reads an answer of megabytes at some hundred bytes per second."""
    while True:
        began = time.monotonic()
        async with connected(target.address, source=target.source, receive_buffer=SMALL_BUFFER) as connection:
            await connection.send(bodies.long_answer(target.model))
            tally.counts[str(await connection.status())] += 1
            try:
                while count := await connection.read(SLOW_READ_BYTES):
                    tally.bytes_read += count
                    await asyncio.sleep(SLOW_READ_S)
            finally:
                tally.longest_s = max(tally.longest_s, time.monotonic() - began)
        yield


async def drop(target: Target, client: int, tally: Tally) -> AsyncIterator[None]:
    """Disconnects after the first token: every second client properly, the others by a reset."""
    for request in bodies.ordinary(target.model, client):
        async with connected(target.address, source=target.source) as connection:
            await connection.send(request)
            found = await connection.read_until(b"\n\n")
            tally.counts[found.split(None, 2)[1].decode()] += 1
            if client % 2:
                connection.reset()
        yield


ORDINARY = Attack("ordinary", "well-behaved", 8, 0, sending(bodies.ordinary), every_s=0.0)
WELL_BEHAVED = (
    ORDINARY,
    Attack("choices-read", "n 28 and 2,000 tokens, all read", 2, 0, sending(bodies.plain_choices)),
    Attack("streams-read", "3,000 tokens, all read", 16, 0, sending(bodies.plain_answers)),
)
"""The clients in the attackers' place in the baseline."""
ATTACKS = (
    Attack("grammar", "8 × an ambiguous guided_grammar, 400 tokens", 8, 8, sending(bodies.grammar)),
    Attack("regex", "8 × guided_regex (a{1000}){1000}", 8, 8, sending(bodies.regex)),
    Attack("schema", "8 × guided_json with eight patterns (.*a.{100})+", 8, 8, sending(bodies.schema)),
    Attack("tools", "8 × a tool whose argument has such a pattern", 8, 8, sending(bodies.tools)),
    Attack("compile", "8 × response_format with ^(a{1000}){1000}$", 8, 8, sending(bodies.compiling)),
    Attack("texts", "3 × bodies of 7.8 MB, six endpoints in turns", 3, 3, sending(bodies.big_texts)),
    Attack("items", "3 × long conversations of items and blocks", 3, 3, sending(bodies.big_conversations)),
    Attack("store", "16 × responses stored, each continues the last", 16, 16, fill_store, every_s=0.0),
    Attack(
        "choices", "2 × n 128, logprobs 20, or the most that is admitted", 2, 60, many_choices, "choices-read"
    ),
    Attack(
        "logprobs",
        "2 × n 28, logprobs 20, beside the victim",
        2,
        56,
        sending(bodies.alternatives),
        "choices-read",
    ),
    Attack("trickle", "32 bodies trickled after a 404, 405 or 413", 32, 8, trickle),
    Attack("slow", "16 streams of megabytes read at 500 bytes/s", 16, 16, read_slowly, "streams-read"),
    Attack("scrape", "100 × /metrics, one after the other", 100, 16, sending(bodies.scrapes), every_s=0.0),
    Attack("drop", f"{WAVE} clients gone after a token, every 5 s", WAVE, 16, drop, every_s=5.0),
)
BY_NAME = {attack.name: attack for attack in (*ATTACKS, *WELL_BEHAVED)}
