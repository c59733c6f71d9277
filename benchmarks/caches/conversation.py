"""A conversation of six turns, with and without conversation return: tokens computed and TTFT of each turn.

    python -m benchmarks.caches.conversation --json benchmarks/results/conversation.json \\
        --plot docs/conversation_return.png

Each turn's prompt is the previous turn's prompt and answer, and some new tokens. Without conversation return
the prefill server's prefix cache still has the earlier prompt, but not the answer. Both variants give the
same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from twinfang.bench.machine import machine
from twinfang.launch import LaunchedStack, launch
from wire.messages.generation import GetStats, ServerStats
from wire.rpc import GET_STATS, call, open_channel

CONFIGURATIONS = {
    "no caching": ("--cache-mode", "none"),
    "prefix cache": ("--cache-mode", "all"),
    "conversation return": ("--cache-mode", "all", "--conversation-return"),
}
NUM_TURNS = 6
FIRST_PROMPT = 400
NEW_TOKENS = 40
ANSWER_TOKENS = 120
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Turn:
    """The cost of one turn."""

    prompt_tokens: int
    computed_tokens: int
    ttft_ms: float
    answer: list[int]


async def prefill_stats(stack: LaunchedStack) -> ServerStats:
    async with open_channel(stack.processes()["prefill-0"].address) as channel:
        stats: ServerStats = await call(channel, GET_STATS, GetStats(), timeout_s=10.0)
        return stats


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> tuple[float, list[int]]:
    """Return TTFT in ms, and the answer's tokens."""
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    answer: list[int] = []
    first: float | None = None
    start = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter()
                answer += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
    assert first is not None, "an answer has at least one event"
    return (first - start) * 1000, answer


async def converse(stack: LaunchedStack, seed: int) -> list[Turn]:
    choose = random.Random(seed)

    def new_tokens(count: int) -> list[int]:
        return [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]

    prompt = new_tokens(FIRST_PROMPT)
    turns: list[Turn] = []
    async with httpx.AsyncClient(base_url=stack.url, timeout=120.0) as client:
        for _ in range(NUM_TURNS):
            before = await prefill_stats(stack)
            ttft_ms, answer = await ask(client, prompt)
            after = await prefill_stats(stack)
            turns.append(Turn(len(prompt), after.prefill_tokens - before.prefill_tokens, ttft_ms, answer))
            prompt = prompt + answer + new_tokens(NEW_TOKENS)
    return turns


def measure(flags: tuple[str, ...], repeats: int) -> list[list[Turn]]:
    """Run conversations one after the other on a fresh stack. The first one warms up and is left out."""
    with tempfile.TemporaryDirectory(prefix="twinfang-") as folder:
        stack = launch(Path(folder), "up", *flags)
        try:
            stack.wait_until_ready(timeout_s=START_TIMEOUT_S)
            return [asyncio.run(converse(stack, seed)) for seed in range(repeats + 1)][1:]
        finally:
            stack.stop(timeout_s=STOP_TIMEOUT_S)


def plot(figures: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (("computed_tokens", "tokens computed by prefill"), ("ttft_ms", "TTFT, ms (median)"))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, panels, strict=True):
        for name, turns in figures.items():
            axis.plot(range(1, NUM_TURNS + 1), [turn[key] for turn in turns], marker="o", label=name)
        axis.set(title=title, xlabel="turn", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="conversations of each configuration")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--plot", type=Path, help="draw them there")
    options = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {}
    answers: dict[str, list[list[list[int]]]] = {}
    for name, flags in CONFIGURATIONS.items():
        runs = measure(flags, options.repeats)
        answers[name] = [[turn.answer for turn in run] for run in runs]
        figures[name] = [
            {
                "prompt_tokens": run_turns[0].prompt_tokens,
                "computed_tokens": run_turns[0].computed_tokens,
                "ttft_ms": statistics.median(turn.ttft_ms for turn in run_turns),
            }
            for run_turns in zip(*runs, strict=True)
        ]
        print(f"{name:20}  prompt " + "".join(f"{t['prompt_tokens']:7.0f}" for t in figures[name]))
        print(f"{'':20}computed " + "".join(f"{t['computed_tokens']:7.0f}" for t in figures[name]))
        print(f"{'':20} TTFT ms " + "".join(f"{t['ttft_ms']:7.1f}" for t in figures[name]), flush=True)
    if any(other != answers["no caching"] for other in answers.values()):
        raise SystemExit("the configurations answered differently")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(), "repeats": options.repeats, "turns": figures}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(figures, options.plot)


if __name__ == "__main__":
    main()
