"""What a key finds out by the time to the first token: whether another key has just sent the same prompt.

    python -m benchmarks.caches.isolation --json benchmarks/results/isolation.json

Two routers serve the same servers and keys, one with `--cache-isolation key` (the default), one with `none`.
At each, alice sends a prompt that nobody has sent, then bob sends the same one. The routers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.caches.conversation import FIRST_TOKEN_ID, LAST_TOKEN_ID, prefill_stats
from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from testing.fleets.stack import running_router
from twinfang.bench.machine import machine
from twinfang.launch import LaunchedStack, launch

KEYS = {name: new_key() for name in ("alice", "bob")}
PROMPT_TOKENS = 1200
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0


async def ask(stack: LaunchedStack, url: str, name: str, prompt: list[int]) -> tuple[float, int]:
    """Return the TTFT in ms and the prompt tokens that the prefill server computed."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    before = await prefill_stats(stack)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, headers=headers) as client:
        (await client.get("/v1/models")).raise_for_status()  # the connection is there
        start = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            lines = response.aiter_lines()
            await anext(lines)
            ttft_ms = (time.perf_counter() - start) * 1000
            async for _ in lines:
                pass
    after = await prefill_stats(stack)
    return ttft_ms, after.prefill_tokens - before.prefill_tokens


def measure(
    stack: LaunchedStack, urls: dict[str, str], repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians by isolation and key. The first turn warms up and is left out."""
    choose = random.Random(1)
    found: dict[str, dict[str, list[tuple[float, int]]]] = {
        isolation: {name: [] for name in KEYS} for isolation in urls
    }
    for _ in range(repeats + 1):
        for isolation, url in urls.items():
            prompt = [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(PROMPT_TOKENS)]
            for name in KEYS:
                found[isolation][name].append(asyncio.run(ask(stack, url, name, prompt)))
    return {
        isolation: {
            name: {
                "ttft_ms": round(statistics.median(ttft_ms for ttft_ms, _ in asked[1:]), 1),
                "ttft_ms_least": round(min(ttft_ms for ttft_ms, _ in asked[1:]), 1),
                "ttft_ms_most": round(max(ttft_ms for ttft_ms, _ in asked[1:]), 1),
                "computed_tokens": statistics.median(computed for _, computed in asked[1:]),
            }
            for name, asked in by_name.items()
        }
        for isolation, by_name in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20, help="prompts at each router")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="twinfang-") as text:
        folder = Path(text)
        keys = folder / "keys"
        keys.write_text("\n".join(key_line(ApiKey(name, digest_of(key))) for name, key in KEYS.items()))
        stack = launch(folder, "up", "--cache-mode", "all")
        try:
            stack.wait_until_ready(timeout_s=START_TIMEOUT_S)
            processes = [one for one in stack.processes().values() if one.name != "router"]
            flags = [f"--{one.name.partition('-')[0]}={one.address}" for one in processes]
            flags += ["--api-keys-file", str(keys)]
            with (
                running_router(*flags) as isolated,
                running_router(*flags, "--cache-isolation", "none") as shared,
            ):
                figures = measure(stack, {"key": isolated, "none": shared}, options.repeats)
        finally:
            stack.stop(timeout_s=STOP_TIMEOUT_S)
    for isolation, by_name in figures.items():
        for name, row in by_name.items():
            print(f"--cache-isolation {isolation:5} {name:6} {row}")
    if options.json:
        report = {
            "machine": machine(),
            "prompt_tokens": PROMPT_TOKENS,
            "repeats": options.repeats,
            "isolation": figures,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
