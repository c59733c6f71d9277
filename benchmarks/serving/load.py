"""Closed-loop load on an OpenAI-compatible server: a fixed number of requests in flight, each streamed to its
end."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

from benchmarks.serving.event_stream import EventStream, StreamError

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Workload:
    """The common properties of a run's requests; their prompts are random and different."""

    input_len: int
    """Tokens of a prompt, exactly."""
    output_len: int
    """Tokens of an answer, exactly: end of sequence is ignored."""
    first_token_id: int
    last_token_id: int
    seed: int = 0
    """Of the prompts."""
    temperature: float = 0.0
    top_p: float = 1.0

    def prompt(self, index: int) -> list[int]:
        rng = random.Random(f"{self.seed} {index}")
        return [rng.randint(self.first_token_id, self.last_token_id) for _ in range(self.input_len)]


@dataclass
class Timing:
    """Clock readings of one request, in seconds."""

    sent: float
    events: list[float] = field(default_factory=list)
    """Arrival time of each event with text; an event may hold several tokens."""
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.events[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first."""
        return (self.events[-1] - self.events[0]) / max(1, self.num_tokens - 1)

    @property
    def inter_event_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.events, self.events[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """One run at one concurrency."""

    concurrency: int
    duration_s: float
    timings: list[Timing]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(timing.num_tokens for timing in self.timings) / self.duration_s


class LoadError(Exception):
    """A request failed, or its answer was not what was asked for."""


async def run_load(url: str, model: str, workload: Workload, *, concurrency: int, num_requests: int) -> Run:
    """Sends ``num_requests`` requests, ``concurrency`` of them at a time. Raises :class:`LoadError`."""
    indexes = iter(range(num_requests))
    timings: list[Timing] = []
    streams = [await EventStream.connect(url) for _ in range(min(concurrency, num_requests))]

    async def work(stream: EventStream) -> None:
        for index in indexes:
            timings.append(await timed_request(stream, model, workload, index))

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as workers:
            for stream in streams:
                workers.create_task(work(stream))
        return Run(concurrency, time.perf_counter() - started, timings)
    finally:
        for stream in streams:
            stream.close()


async def timed_request(stream: EventStream, model: str, workload: Workload, index: int) -> Timing:
    """Sends the workload's prompt number ``index`` and reads the answer. Raises :class:`LoadError`."""
    body = {
        "model": model,
        "prompt": workload.prompt(index),
        "max_tokens": workload.output_len,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "ignore_eos": True,
        "skip_special_tokens": False,  # tokens without text would not show as events
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timing = Timing(time.perf_counter())
    broken: list[str] = []

    def take(event: bytes, now: float) -> None:
        _take(event, now, timing, broken)

    try:
        await stream.post("/v1/completions", body, take, REQUEST_TIMEOUT_S)
    except (StreamError, TimeoutError) as error:
        raise LoadError(str(error) or f"no answer within {REQUEST_TIMEOUT_S:g} s") from error
    if broken:
        raise LoadError(f"the stream broke: {broken[0]}")
    if timing.num_tokens != workload.output_len or not timing.events:
        raise LoadError(f"asked for {workload.output_len} tokens, got {timing.num_tokens}")
    return timing


def _take(event: bytes, now: float, timing: Timing, broken: list[str]) -> None:
    """Records one server-sent event that arrived at ``now``.

    Events of tokens are counted without parsing them, because the client shares the cores with the measured
    servers.
    """
    if b'"choices":[{' in event or b'"choices": [{' in event:
        timing.events.append(now)
    elif event.startswith(b"data: {"):
        data = json.loads(event.removeprefix(b"data: "))
        if "error" in data:
            broken.append(str(data["error"]))
        else:
            timing.num_tokens = data["usage"]["completion_tokens"]
