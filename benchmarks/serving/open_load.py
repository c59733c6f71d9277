"""Open-loop load: requests are sent when they are due, whether or not earlier ones have ended.

Each has its own connection over plain asyncio streams, cheap enough to share two cores with the measured
servers.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

TIMEOUT_S = 120.0
EVENT = re.compile(rb"data: (\{.*?\})\n\n", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A prompt and, once known, its only right answer."""

    token_ids: tuple[int, ...]
    num_tokens: int
    step_s: float = 0.0
    """Time between two steps of stub workers. Real workers take it as a seed, which a greedy answer does not
    use."""
    answer: tuple[int, ...] | None = None

    def request(self, host: str, model: str) -> bytes:
        body = {
            "model": model,
            "prompt": self.token_ids,
            "max_tokens": self.num_tokens,
            "temperature": 0.0,
            "seed": round(self.step_s * 1e6),
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


@dataclass
class Outcome:
    """One request's outcome. Times in seconds, by the monotonic clock."""

    sent: float
    status: int = 0
    retry_after_s: int = 0
    first: float = 0.0
    """Time of the first event, or of a complete refusal."""
    last: float = 0.0
    token_ids: tuple[int, ...] = ()
    is_exact: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def tpot_s(self) -> float:
        return (self.last - self.first) / max(1, len(self.token_ids) - 1)


@dataclass
class Phase:
    """The requests of one period."""

    name: str
    rate: float
    """Requests per second that were due."""
    duration_s: float
    began: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def accepted(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == 200]

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == 429]

    @property
    def wrong(self) -> list[Outcome]:
        """The outcomes that are neither an exact answer nor a refusal."""
        return [one for one in self.outcomes if one.status != 429 and not one.is_exact]


async def ask(address: str, model: str, question: Question) -> Outcome:
    """Sends one request and reads the answer. Errors are recorded, not raised."""
    host, _, port = address.rpartition(":")
    outcome = Outcome(time.monotonic())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(question.request(address, model))
                await _read(reader, outcome)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        outcome.status = 0
    outcome.is_exact = outcome.status == 200 and outcome.token_ids == (question.answer or outcome.token_ids)
    return outcome


async def _read(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    outcome.status = int(head.split(None, 2)[1])
    retry_after = re.search(rb"(?i)retry-after: (\d+)", head)
    outcome.retry_after_s = int(retry_after[1]) if retry_after else 0
    content = b""
    while data := await reader.read(1 << 16):
        content += data
        if b"data: {" in data or outcome.status != 200:
            outcome.last = time.monotonic()
            outcome.first = outcome.first or outcome.last
    if outcome.status != 200:
        return
    if not content.rstrip().endswith(b"0") or b"data: [DONE]" not in content:
        raise ValueError("the stream was cut short")
    choices = [json.loads(event)["choices"][0] for event in EVENT.findall(content)]
    outcome.token_ids = tuple(token_id for choice in choices for token_id in choice["token_ids"] or ())


async def offer(
    phase: Phase, address: str, model: str, questions: Sequence[Question], rng: random.Random
) -> Phase:
    """Sends Poisson arrivals at the phase's rate; returns once all of them have ended."""
    phase.began = time.monotonic()
    due, end = phase.began, phase.began + phase.duration_s
    asking: set[asyncio.Task[Outcome]] = set()

    def ended(task: asyncio.Task[Outcome]) -> None:
        asking.discard(task)
        phase.outcomes.append(task.result())

    while (due := due + rng.expovariate(phase.rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(ask(address, model, rng.choice(questions)))
        asking.add(task)
        task.add_done_callback(ended)
    if asking:
        await asyncio.wait(asking)
    await asyncio.sleep(0)  # the last callbacks
    return phase
