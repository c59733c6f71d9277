"""One visit to a running server: the load at each concurrency, and an answer to compare."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.serving.closed_load import summary
from benchmarks.serving.load import Workload, run_load
from benchmarks.side_by_side.arrangement import Server
from benchmarks.side_by_side.cores import CoreTimes
from benchmarks.side_by_side.plan import Visit, num_requests

FIRST_TOKEN_ID = 5
"""Token ids below it are special."""
WARM_UP_TOKENS = 8
COMPARED_TOKENS = 32
TIMEOUT_S = 120.0


def measure(
    server: Server,
    visit: Visit,
    workload: Workload,
    scale: float,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Passes each concurrency's figures to ``done`` as soon as they are measured.

    All arrangements get the same prompts in a round. Within a visit all prompts differ, so that no cache
    helps.
    """
    for concurrency in visit.model.requests:
        seed = 1000 * visit.round + concurrency
        prompts = dataclasses.replace(workload, seed=seed)
        warm_up = dataclasses.replace(workload, seed=-seed, output_len=WARM_UP_TOKENS)
        asyncio.run(
            run_load(server.url, visit.model.name, warm_up, concurrency=concurrency, num_requests=concurrency)
        )
        num = num_requests(visit.model, concurrency, scale)
        before = CoreTimes.now(server.pids)
        run = asyncio.run(
            run_load(server.url, visit.model.name, prompts, concurrency=concurrency, num_requests=num)
        )
        cores = before.figures(
            CoreTimes.now(server.pids), run.duration_s, sum(timing.num_tokens for timing in run.timings)
        )
        done(summary(run) | {"cores": cores})


def workload(model_vocabulary: int, input_len: int, output_len: int) -> Workload:
    """Returns prompts of any tokens except special ones."""
    return Workload(input_len, output_len, FIRST_TOKEN_ID, model_vocabulary - 1)


def answer(server: Server, model: str, prompt: list[int]) -> str:
    """Returns the greedy answer's text. Raises :class:`httpx.HTTPError`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": COMPARED_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
    }
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += choices[0]["text"] if choices else ""
    return text
