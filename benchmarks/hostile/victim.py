"""The client that must not suffer: a few steady streams, and the answer times of an operator's probes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from benchmarks.hostile.attacks import Target
from benchmarks.hostile.connection import connected, get
from benchmarks.serving.event_stream import EventStream, StreamError
from benchmarks.serving.load import Workload

NUM_STREAMS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 64, 128
FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 900
REQUEST_TIMEOUT_S = 120.0
RETRY_S = 0.2
PROBED = ("/healthz", "/v1/models")
PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 60.0
LAG_INTERVAL_S = 0.02
NUM_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
MAX_EXAMPLES = 5


@dataclass
class Stream:
    """The present request of one stream."""

    sent: float
    last: float | None = None
    """When its last event came."""
    num_tokens: int = 0


@dataclass
class Seen:
    """The results of a period. Times in seconds by ``time.perf_counter``."""

    began: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    worst_gap_s: float = 0.0
    ttfts_s: list[float] = field(default_factory=list)
    ended: int = 0
    errors: list[str] = field(default_factory=list)
    probes_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PROBED, 0.0))
    """The slowest answer by path."""
    probe_errors: list[str] = field(default_factory=list)
    lag_s: float = 0.0
    """The largest delay of this process itself; the other figures can't be better."""


class Victim:
    """Streams and probes that run until they are cancelled; :meth:`stretch` returns their results."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._seen = Seen()
        self._streams: dict[int, Stream] = {}
        self._probes: dict[str, float] = {}
        """When the present probe was sent, by path."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs streams and probes inside the block. Must be entered on the event loop."""
        tasks = [asyncio.create_task(self._stream(i)) for i in range(NUM_STREAMS)]
        tasks += [asyncio.create_task(self._probe(path)) for path in PROBED]
        tasks.append(asyncio.create_task(self._watch_own_lag()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def stretch(self, seconds: float) -> dict[str, object]:
        """Returns the results of the next ``seconds``. A wait that has not ended counts with its time so
        far."""
        seen = self._seen = Seen()
        await asyncio.sleep(seconds)
        now = time.perf_counter()
        gaps = [now - max(one.last, seen.began) for one in self._streams.values() if one.last is not None]
        ttfts = [now - max(one.sent, seen.began) for one in self._streams.values() if one.last is None]
        probes = {path: now - max(sent, seen.began) for path, sent in self._probes.items()}
        ttfts = sorted([*ttfts, *seen.ttfts_s])
        return {
            "worst_gap_s": round(max([seen.worst_gap_s, *gaps]), 3),
            "tokens_per_s": round(seen.tokens / (now - seen.began), 1),
            "ttft_p50_s": round(ttfts[len(ttfts) // 2], 3) if ttfts else None,
            "ttft_max_s": round(ttfts[-1], 3) if ttfts else None,
            "answers": seen.ended,
            "errors": len(seen.errors),
            "examples": seen.errors[:MAX_EXAMPLES],
            "probes_max_s": {
                path: round(max(slowest, probes.get(path, 0.0)), 3) for path, slowest in seen.probes_s.items()
            },
            "probe_errors": len(seen.probe_errors),
            "probe_examples": seen.probe_errors[:MAX_EXAMPLES],
            "own_lag_s": round(seen.lag_s, 3),
        }

    # --- streams ----------------------------------------------------------------------------------

    async def _stream(self, index: int) -> None:
        workload = Workload(PROMPT_TOKENS, ANSWER_TOKENS, FIRST_TOKEN_ID, LAST_TOKEN_ID, seed=index)
        connection: EventStream | None = None
        number = 0
        try:
            while True:
                number += 1
                try:
                    if connection is None:
                        connection = await EventStream.connect(f"http://{self._target.address}")
                    await self._ask(connection, index, workload.prompt(number))
                except (OSError, StreamError, TimeoutError, ValueError) as error:
                    self._seen.errors.append(f"{type(error).__name__}: {str(error)[-300:]}")
                    if connection is not None:
                        connection.close()
                    connection = None
                    await asyncio.sleep(RETRY_S)
        finally:
            if connection is not None:
                connection.close()

    async def _ask(self, connection: EventStream, index: int, prompt: list[int]) -> None:
        body = {
            "model": self._target.model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,  # tokens without text would not show as events
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        stream = self._streams[index] = Stream(time.perf_counter())
        failed: list[str] = []

        def take(event: bytes, now: float) -> None:
            if found := NUM_TOKENS.search(event):
                self._take_tokens(stream, int(found[1]), now)
            elif event.startswith(b'data: {"error"'):
                failed.append(event.decode(errors="replace"))

        try:
            await connection.post("/v1/completions", body, take, REQUEST_TIMEOUT_S)
        finally:
            del self._streams[index]
        if failed or stream.num_tokens != ANSWER_TOKENS:
            raise StreamError(failed[0] if failed else f"{stream.num_tokens} tokens of {ANSWER_TOKENS}")
        self._seen.ended += 1

    def _take_tokens(self, stream: Stream, num_tokens: int, now: float) -> None:
        seen = self._seen
        if stream.last is None:
            if stream.sent >= seen.began:
                seen.ttfts_s.append(now - stream.sent)
        else:
            seen.worst_gap_s = max(seen.worst_gap_s, now - max(stream.last, seen.began))
        seen.tokens += num_tokens - stream.num_tokens
        stream.num_tokens, stream.last = num_tokens, now

    # --- probes -----------------------------------------------------------------------------------

    async def _probe(self, path: str) -> None:
        """Probes a path, each time on a new connection, as a kubelet or a new client does."""
        while True:
            sent = self._probes[path] = time.perf_counter()
            problem = ""
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S), connected(self._target.address) as connection:
                    await connection.send(get(path))
                    status = await connection.status()
                    await connection.drain()
                problem = "" if status == 200 else f"{path}: HTTP {status}"
            except (OSError, TimeoutError, ValueError) as error:
                problem = f"{path}: {type(error).__name__}: {error}"
            took_s = time.perf_counter() - max(sent, self._seen.began)
            self._seen.probes_s[path] = max(self._seen.probes_s[path], took_s)
            if problem:
                self._seen.probe_errors.append(problem)
            with suppress(KeyError):
                del self._probes[path]
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _watch_own_lag(self) -> None:
        while True:
            due = time.perf_counter() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._seen.lag_s = max(self._seen.lag_s, time.perf_counter() - due)
