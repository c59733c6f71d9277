"""Load on an OpenAI-compatible server, each request streamed to its end.

Closed-loop: a fixed number of requests is in flight. Open-loop: requests are sent when they are due. In a
conversation, each prompt has the earlier ones and their answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from benchmarks.serving.event_stream import EventStream, RefusedError, StreamError

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Workload:
    """The common properties of a run's requests. Their prompts are random and differ, unless ``shared_len``
    or ``prompts`` say otherwise."""

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
    shared_len: int = 0
    """Tokens at the beginning that all prompts share, whatever the seed; ``input_len`` counts them too."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """If any, requests take these in turn instead of random ones; ``seed`` says where they begin."""

    def prompt(self, index: int) -> list[int]:
        if self.prompts:
            return list(self.prompts[(self.seed + index) % len(self.prompts)])
        shared = self._random("shared", self.shared_len)
        return shared + self._random(f"{self.seed} {index}", self.input_len - self.shared_len)

    def _random(self, seed: str, num_tokens: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randint(self.first_token_id, self.last_token_id) for _ in range(num_tokens)]


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
    """One run at one concurrency, or at one rate of arrivals."""

    concurrency: int
    """The most requests that were in flight."""
    duration_s: float
    timings: list[Timing]
    num_refused: int = 0
    """Requests that the server refused because it had too many."""

    @property
    def output_tokens_per_s(self) -> float:
        return sum(timing.num_tokens for timing in self.timings) / self.duration_s


class LoadError(Exception):
    """A request failed, or its answer was not what was asked for."""


async def run_load(url: str, model: str, workload: Workload, *, concurrency: int, num_requests: int) -> Run:
    """Sends ``num_requests`` requests, ``concurrency`` of them at a time. Raises :class:`LoadError`."""

    async def ask(stream: EventStream, index: int) -> list[Timing]:
        return [await timed_request(stream, model, workload, index)]

    return await _closed_loop(url, ask, concurrency, num_requests)


async def run_conversations(
    url: str, model: str, workload: Workload, *, turns: int, concurrency: int, num_conversations: int
) -> Run:
    """Holds conversations of ``turns`` requests, ``concurrency`` of them at a time.

    Each prompt is the whole conversation so far, answers included, and ``input_len`` new tokens. The server
    must return the token ids of its answers. Raises :class:`LoadError`.
    """

    async def converse(stream: EventStream, number: int) -> list[Timing]:
        timings, history = [], list[int]()
        for turn in range(turns):
            history += workload.prompt(number * turns + turn)
            events: list[bytes] = []
            timings.append(await timed_prompt(stream, model, workload, history, keep=events))
            history += token_ids(events, workload.output_len)
        return timings

    return await _closed_loop(url, converse, concurrency, num_conversations)


async def run_open_load(url: str, model: str, workload: Workload, *, rate: float, num_requests: int) -> Run:
    """Sends requests as a Poisson process, ``rate`` a second on average, whether or not earlier ones ended.

    Arrivals depend only on seed and rate. A request's time runs from when it was due, so that a client or
    server that lags does not hide it. Raises :class:`LoadError`.
    """
    rng = random.Random(f"{workload.seed} {rate}")
    timings: list[Timing] = []
    idle = [await EventStream.connect(url)]
    in_flight = most_in_flight = num_refused = 0

    async def one(index: int, due: float) -> None:
        nonlocal in_flight, most_in_flight, num_refused
        in_flight += 1
        most_in_flight = max(most_in_flight, in_flight)
        stream = idle.pop() if idle else await EventStream.connect(url)
        try:
            timings.append(await timed_prompt(stream, model, workload, workload.prompt(index), sent=due))
        except RefusedError:
            num_refused += 1
            stream.close()
        else:
            idle.append(stream)
        in_flight -= 1

    started = due = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as requests:
            for index in range(num_requests):
                due += rng.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                requests.create_task(one(index, due))
        return Run(most_in_flight, time.perf_counter() - started, timings, num_refused)
    finally:
        for stream in idle:
            stream.close()


async def _closed_loop(
    url: str,
    work: Callable[[EventStream, int], Coroutine[Any, Any, list[Timing]]],
    concurrency: int,
    num_pieces: int,
) -> Run:
    """Does ``work`` for each number below ``num_pieces``, ``concurrency`` at a time, each on a connection of
    its own."""
    numbers = iter(range(num_pieces))
    timings: list[Timing] = []
    streams = [await EventStream.connect(url) for _ in range(min(concurrency, num_pieces))]

    async def go_on(stream: EventStream) -> None:
        for number in numbers:
            timings.extend(await work(stream, number))

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as workers:
            for stream in streams:
                workers.create_task(go_on(stream))
        return Run(concurrency, time.perf_counter() - started, timings)
    finally:
        for stream in streams:
            stream.close()


async def timed_request(stream: EventStream, model: str, workload: Workload, index: int) -> Timing:
    """Sends the workload's prompt number ``index`` and reads the answer. Raises :class:`LoadError`."""
    return await timed_prompt(stream, model, workload, workload.prompt(index))


async def timed_prompt(
    stream: EventStream,
    model: str,
    workload: Workload,
    prompt: list[int],
    *,
    sent: float | None = None,
    keep: list[bytes] | None = None,
    fields: Mapping[str, object] = MappingProxyType({}),
) -> Timing:
    """Sends a prompt and reads the answer.

    The request's time runs from ``sent``, by default from now. If ``keep`` is given, the server is asked for
    token ids, and all events go there. ``fields`` are further ones of the body. Raises :class:`LoadError`,
    and :class:`RefusedError`.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": workload.output_len,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "ignore_eos": True,
        "skip_special_tokens": False,  # tokens without text would not show as events
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    if keep is not None:
        body["return_token_ids"] = True
    timing = Timing(time.perf_counter() if sent is None else sent)
    broken: list[str] = []

    def take(event: bytes, now: float) -> None:
        if keep is not None:
            keep.append(event)
        _take(event, now, timing, broken)

    try:
        await stream.post("/v1/completions", body, take, REQUEST_TIMEOUT_S)
    except RefusedError:
        raise
    except (StreamError, TimeoutError) as error:
        raise LoadError(str(error) or f"no answer within {REQUEST_TIMEOUT_S:g} s") from error
    if broken:
        raise LoadError(f"the stream broke: {broken[0]}")
    if timing.num_tokens != workload.output_len or not timing.events:
        raise LoadError(f"asked for {workload.output_len} tokens, got {timing.num_tokens}")
    return timing


def token_ids(events: list[bytes], num_tokens: int) -> list[int]:
    """Returns the token ids of an answer from its events. Raises :class:`LoadError` if any is missing."""
    found: list[int] = []
    for event in events:
        if event.startswith(b"data: {"):
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                found += choice.get("token_ids") or ()
    if len(found) != num_tokens:
        raise LoadError(f"the server returned the ids of {len(found)} tokens, not of {num_tokens}")
    return found


def cached_tokens(events: list[bytes]) -> int:
    """Returns the prompt's tokens that were not computed, by the usage in these events; 0 if it says
    nothing."""
    for event in reversed(events):
        if event.startswith(b"data: {") and b'"usage"' in event:
            usage = json.loads(event.removeprefix(b"data: ")).get("usage") or {}
            return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return 0


def _take(event: bytes, now: float, timing: Timing, broken: list[str]) -> None:
    """Records one server-sent event that arrived at ``now``.

    Events of tokens are counted without parsing them, because the client shares the cores with the measured
    servers. Some servers send the usage in an event of its own, others in the last one, which has no text.
    """
    has_usage = b'"usage":{' in event or b'"usage": {' in event
    if not has_usage and (b'"choices":[{' in event or b'"choices": [{' in event):
        timing.events.append(now)
    elif event.startswith(b"data: {"):
        data = json.loads(event.removeprefix(b"data: "))
        if "error" in data:
            broken.append(str(data["error"]))
        else:
            timing.num_tokens = data["usage"]["completion_tokens"]
            if any(choice["text"] for choice in data["choices"]):
                timing.events.append(now)
