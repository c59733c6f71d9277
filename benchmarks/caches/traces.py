"""Generates logs of prompt hashes of four kinds, from a seed. The parameters of each kind are drawn from the
seed too, so that another seed is another service.

    python -m benchmarks.caches.traces chats --seed 1 --requests 2000 chats.jsonl

| kind | requests |
|---|---|
| chats | conversations behind a few system prompts; each turn repeats all before it |
| agents | long shared tool prompts and project contexts; steps that grow, retries and parallel branches |
| documents | a document, then a question; a document is asked about several times, some for long |
| mixed | all of them at once |
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from pathlib import Path

from twinfang.cache_sim.trace import TracedRequest, write_trace

BLOCK_TOKENS = 128
Segment = tuple[int, int]
"""A text's number, and its tokens."""


class Ids:
    """Numbers blocks by all text up to their ends."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._chains: dict[tuple[int, int], int] = {}

    def of(self, segments: list[Segment]) -> tuple[int, ...]:
        """Returns an id for each full block of the texts together."""
        ids: list[int] = []
        chain, position = 0, 0
        for text, num_tokens in segments:
            first = -(-(position + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
            for end in range(first, position + num_tokens + 1, BLOCK_TOKENS):
                key = (chain, text, end - position)
                ids.append(self._numbers.setdefault(key, len(self._numbers)))
            chain = self._chains.setdefault((chain, text), len(self._chains) + 1)
            position += num_tokens
        return tuple(ids)


class Writer:
    """Draws texts and makes requests of them."""

    def __init__(self, choose: random.Random, ids: Ids, first_text: int) -> None:
        self.choose = choose
        self._ids = ids
        self._next_text = first_text

    def text(self, mean: float, spread: float = 0.7, lowest: int = 8, highest: int = 60_000) -> Segment:
        """Draws a new text of log-normal length."""
        self._next_text += 1
        length = self.choose.lognormvariate(math.log(mean) - spread**2 / 2, spread)
        return self._next_text, max(lowest, min(highest, round(length)))

    def request(self, at_s: float, prompt: list[Segment], answer: Segment) -> TracedRequest:
        num_prompt = sum(num for _, num in prompt)
        return TracedRequest(at_s, num_prompt, answer[1], self._ids.of([*prompt, answer]))


def popular(choose: random.Random, count: int, skew: float) -> int:
    """Draws a number below ``count``; low ones are more popular (Zipf)."""
    return choose.choices(range(count), [1.0 / (rank + 1) ** skew for rank in range(count)])[0]


Session = Iterator[TracedRequest]


@dataclass(frozen=True)
class Load:
    """Sessions that begin at random, each with requests of its own."""

    session: Callable[[Writer, float], Session]
    per_s: float

    def requests(self, writer: Writer) -> Iterator[TracedRequest]:
        """Yields all sessions' requests in the order in which they come."""
        open_sessions: list[tuple[float, int, TracedRequest, Session]] = []
        next_s, number = 0.0, 0
        while True:
            while not open_sessions or open_sessions[0][0] >= next_s:
                session = self.session(writer, next_s)
                first = next(session)
                open_sessions.append((first.arrival_s, number, first, session))
                open_sessions.sort(key=lambda one: one[:2])
                number += 1
                next_s += writer.choose.expovariate(self.per_s)
            _, place, request, session = open_sessions.pop(0)
            yield request
            following = next(session, None)
            if following is not None:
                open_sessions.append((following.arrival_s, place, following, session))
                open_sessions.sort(key=lambda one: one[:2])


def chats(draw: random.Random, writer: Writer) -> Load:
    systems = [writer.text(draw.uniform(200, 2500)) for _ in range(draw.randint(1, 8))]
    skew, more = draw.uniform(0.8, 1.6), draw.uniform(0.6, 0.9)
    question, answer, think_s = draw.uniform(40, 300), draw.uniform(100, 600), draw.uniform(20, 200)

    def session(writer: Writer, at_s: float) -> Session:
        choose = writer.choose
        history = [systems[popular(choose, len(systems), skew)]]
        while True:
            history.append(writer.text(question))
            reply = writer.text(answer)
            yield writer.request(at_s, list(history), reply)
            if choose.random() > more:
                return
            if choose.random() < 0.05:  # asked again, with other words
                history.pop()
            else:
                history.append(reply)
            at_s += choose.expovariate(1 / think_s)

    return Load(session, draw.uniform(0.5, 3.0))


def agents(draw: random.Random, writer: Writer) -> Load:
    tools = [writer.text(draw.uniform(2000, 9000), 0.3) for _ in range(draw.randint(2, 6))]
    projects = [writer.text(draw.uniform(1000, 10_000)) for _ in range(draw.randint(5, 40))]
    result, action = draw.uniform(200, 2000), draw.uniform(40, 250)
    more, retries, forks = draw.uniform(0.8, 0.95), draw.uniform(0.0, 0.15), draw.uniform(0.0, 0.1)
    pause_s = draw.uniform(3, 30)

    def steps(writer: Writer, at_s: float, history: list[Segment], depth: int) -> Session:
        choose = writer.choose
        while True:
            history.append(writer.text(result))
            act = writer.text(action)
            yield writer.request(at_s, list(history), act)
            history.append(act)
            if choose.random() > more:
                return
            at_s += choose.expovariate(1 / pause_s)
            if choose.random() < retries and len(history) > 6:
                del history[-2 * choose.randint(1, 2) :]
            elif depth < 1 and choose.random() < forks:
                branches = [
                    steps(writer, at_s + choose.random(), list(history), depth + 1)
                    for _ in range(choose.randint(2, 4))
                ]
                for request in merge(*branches, key=lambda one: one.arrival_s):
                    at_s = max(at_s, request.arrival_s)
                    yield request

    def session(writer: Writer, at_s: float) -> Session:
        choose = writer.choose
        begin = [tools[popular(choose, len(tools), 1.0)], projects[popular(choose, len(projects), 0.8)]]
        yield from steps(writer, at_s, [*begin, writer.text(200)], 0)

    return Load(session, draw.uniform(0.1, 0.6))


def documents(draw: random.Random, writer: Writer) -> Load:
    system = writer.text(draw.uniform(100, 1000))
    library = [writer.text(draw.uniform(4000, 25_000)) for _ in range(draw.randint(20, 150))]
    question, answer = draw.uniform(20, 250), draw.uniform(50, 400)
    more, known, pause_s = draw.uniform(0.4, 0.85), draw.uniform(0.1, 0.7), draw.uniform(10, 120)
    length = draw.uniform(4000, 25_000)

    def session(writer: Writer, at_s: float) -> Session:
        choose = writer.choose
        is_known = choose.random() < known
        text = library[popular(choose, len(library), 0.9)] if is_known else writer.text(length)
        while True:
            yield writer.request(at_s, [system, text, writer.text(question)], writer.text(answer))
            if choose.random() > more:
                return
            at_s += choose.expovariate(1 / pause_s)

    return Load(session, draw.uniform(0.2, 1.5))


KINDS = {"chats": chats, "agents": agents, "documents": documents}


def generate(kind: str, seed: int, num_requests: int, redraw: int = 0) -> list[TracedRequest]:
    """Returns a log of ``kind``: equal arguments, equal logs.

    With another ``redraw``, the seed's parameters are the same and the requests others.
    """
    ids = Ids()
    kinds = list(KINDS) if kind == "mixed" else [kind]
    loads = []
    for number, name in enumerate(kinds):
        draw = random.Random(f"{kind} {name} {seed}")
        writer = Writer(draw, ids, number << 32)
        load = KINDS[name](draw, writer)
        if redraw:
            writer.choose = random.Random(f"{kind} {name} {seed} {redraw}")
        loads.append(load.requests(writer))
    return list(islice(merge(*loads, key=lambda one: one.arrival_s), num_requests))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*KINDS, "mixed"])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    write_trace(generate(options.kind, options.seed, options.requests), options.output)


if __name__ == "__main__":
    main()
