"""A load like that of `vllm bench serve`, in which every answer is compared with the right one.

    python -m benchmarks.serving.exact_load --start "up --prefill 2 --decode 2" --json result.json
    python -m benchmarks.serving.exact_load --base-url http://127.0.0.1:8000 --requests 1000 --concurrency 64

First some requests are sent alone; their answers are the right ones. Then all are sent, ``--concurrency`` at
a time and streamed, with mixed prompts and lengths; two of three are greedy, the others have a temperature
and a seed. Exits with 1 if an answer differs, fails or is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.closed_load import milliseconds, served_model, server
from benchmarks.serving.load import REQUEST_TIMEOUT_S
from twinfang.bench.machine import machine

FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900


@dataclass(frozen=True)
class Answer:
    """One streamed answer, and the times of its parts."""

    token_ids: tuple[int, ...]
    text: str
    ttft_s: float
    duration_s: float


def bodies(num_prompts: int, model: str, max_input: int, max_output: int, seed: int) -> list[dict[str, Any]]:
    """Returns different requests: two of three greedy, the others sampled with a seed."""
    rng = random.Random(seed)
    made = []
    for i in range(num_prompts):
        length = max(1, int(max_input * rng.random() ** 2))  # many short ones, few long ones
        made.append(
            {
                "model": model,
                "prompt": [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length)],
                "max_tokens": rng.randint(1, max_output),
                "temperature": 0.8 if i % 3 == 2 else 0,
                "seed": i,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
            }
        )
    return made


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Sends a request. Raises :class:`httpx.HTTPError` for anything except a whole answer."""
    sent = time.perf_counter()
    token_ids: list[int] = []
    text, ttft_s, is_done = "", 0.0, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise httpx.HTTPError(f"the stream broke: {event['error']}")
                ttft_s = ttft_s or time.perf_counter() - sent
                for choice in event["choices"]:
                    token_ids += choice["token_ids"]
                    text += choice["text"]
    if not is_done or len(token_ids) != body["max_tokens"]:
        raise httpx.HTTPError(f"the answer has {len(token_ids)} of {body['max_tokens']} tokens")
    return Answer(tuple(token_ids), text, ttft_s, time.perf_counter() - sent)


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Asks, compares, and counts."""
    limits = httpx.Limits(max_connections=arguments.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        model = served_model(url)
        kinds = bodies(arguments.prompts, model, arguments.max_input, arguments.max_output, arguments.seed)
        expected = [await ask(client, body) for body in kinds]
        order = [i % len(kinds) for i in range(arguments.requests)]
        random.Random(arguments.seed).shuffle(order)
        waiting, answers, outcomes = iter(order), [], Counter[str]()

        async def work() -> None:
            for kind in waiting:
                try:
                    answer = await ask(client, kinds[kind])
                except httpx.HTTPError as error:
                    outcomes["failed"] += 1
                    print(f"request failed: {error}", file=sys.stderr)
                    continue
                right = (answer.token_ids, answer.text) == (expected[kind].token_ids, expected[kind].text)
                outcomes["exact" if right else "different"] += 1
                answers.append(answer)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(arguments.concurrency)))
        duration_s = time.perf_counter() - began
    return {
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "different_prompts": len(kinds),
        **{name: outcomes[name] for name in ("exact", "different", "failed")},
        "duration_s": round(duration_s, 3),
        "requests_per_s": round(len(answers) / duration_s, 2),
        "output_tokens_per_s": round(sum(len(a.token_ids) for a in answers) / duration_s, 1),
        "ttft_ms": milliseconds([answer.ttft_s for answer in answers] or [0.0]),
        "request_ms": milliseconds([answer.duration_s for answer in answers] or [0.0]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="of a server that runs")
    where.add_argument("--start", metavar="COMMAND", help='a stack to start: "up --decode 2"')
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument(
        "--prompts", type=int, default=50, help="different requests; each is asked alone first"
    )
    parser.add_argument("--max-input", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--max-output", type=int, default=64, help="tokens of the longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    with server(arguments) as url:
        result = {"machine": machine(), "start": arguments.start, **asyncio.run(measure(url, arguments))}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0 if result["exact"] == arguments.requests else 1


if __name__ == "__main__":
    sys.exit(main())
