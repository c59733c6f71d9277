"""One measurement of a running server, and an answer to compare."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.load import LoadError, run_load
from benchmarks.side_by_side.contenders.arrangement import Server
from benchmarks.side_by_side.cores import CoreTimes
from benchmarks.side_by_side.loads import LOADS, WARM_UP_SEED, WARM_UP_TOKENS, seed_of
from benchmarks.side_by_side.plan import Point

COMPARED_TOKENS = 32
TIMEOUT_S = 120.0


def measure(
    server: Server, directory: Path, point: Point, round_number: int, num_requests: int
) -> dict[str, Any]:
    """Sends some short requests to warm up, then the load; returns its figures.

    All contenders get the same prompts in a round. Raises :class:`benchmarks.serving.load.LoadError`.
    """
    load, at, model = point.load, point.at, directory.name
    prompts = load.workload(directory, seed_of(load, round_number, at))
    warm_up = dataclasses.replace(prompts, seed=prompts.seed + WARM_UP_SEED, output_len=WARM_UP_TOKENS)
    num_warm_up = load.num_warm_up(at)
    asyncio.run(run_load(server.url, model, warm_up, concurrency=num_warm_up, num_requests=num_warm_up))
    before = CoreTimes.now(server.pids)
    run = asyncio.run(load.run(server.url, model, prompts, at, num_requests))
    cores = before.figures(
        CoreTimes.now(server.pids), run.duration_s, sum(timing.num_tokens for timing in run.timings)
    )
    return {"load": load.name, "at": at} | load.figures(run) | {"cores": cores}


def answer(server: Server, directory: Path) -> str:
    """Returns the text of a greedy answer. Raises :class:`httpx.HTTPError`, and
    :class:`benchmarks.serving.load.LoadError` if the stream breaks."""
    body = {
        "model": directory.name,
        "prompt": LOADS["short"].workload(directory, 0).prompt(0),
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
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise LoadError(f"the stream broke: {event['error']}")
                text += "".join(choice["text"] for choice in event["choices"])
    return text
