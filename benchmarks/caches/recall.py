"""The recall task in every configuration, as one table: a damaged state shows as a different number.

    python -m benchmarks.caches.recall --prompts 50 --json benchmarks/results/recall.json

Rows are {monolithic, disaggregated} x cache modes x drafts per step (MTP). Each cell is the share of exactly
right values over both forms of the task (plain, and chat, which depends on the SSM state) at that prompt
length. All values, right or wrong, must be equal in all rows. After the value the model continues to write;
there drafts are tried, accepted and rejected, so this text is also compared with the first row's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from testing.oracles.recall_task import (
    ANSWER_TOKENS,
    RecallPrompt,
    make_chat_recall_prompt,
    make_recall_prompt,
)
from twinfang.bench.machine import machine
from twinfang.launch import launch

LENGTHS = (64, 128, 256, 512, 1024)
CONFIGURATIONS = {
    f"{name}, {mode}, k = {k}": (command, "--cache-mode", mode, "--speculative", str(k))
    for name, command in (("monolithic", "serve"), ("disaggregated", "up"))
    for mode in ("none", "align", "all")
    for k in (0, 1, 3)
}
COMPLETION_TOKENS = 32
"""The value, then queries that the model asks itself: enough for several steps with three drafts."""
CONCURRENCY = 32
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0


def questions(num_prompts: int) -> dict[int, list[RecallPrompt]]:
    """Return questions, half plain, half chat, the same for every configuration."""
    forms = (make_recall_prompt, make_chat_recall_prompt)
    return {length: [forms[i % 2](50_000 + i, length) for i in range(num_prompts)] for length in LENGTHS}


async def ask(url: str, prompts: list[RecallPrompt]) -> list[str]:
    """The greedy completions; each begins with the value."""
    gate = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:

        async def one(prompt: RecallPrompt) -> str:
            body = {"prompt": prompt.prompt, "max_tokens": COMPLETION_TOKENS, "temperature": 0}
            async with gate:
                response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            text: str = response.json()["choices"][0]["text"]
            return text

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def values(answers: dict[int, list[str]]) -> dict[int, list[str]]:
    """Return the value in each completion; a value's characters are tokens."""
    return {length: [text[:ANSWER_TOKENS] for text in texts] for length, texts in answers.items()}


def num_different(answers: dict[int, list[str]], others: dict[int, list[str]]) -> int:
    """Return the number of completions that are not identical, character for character."""
    return sum(a != b for length in LENGTHS for a, b in zip(answers[length], others[length], strict=True))


def measure(flags: tuple[str, ...], asked: dict[int, list[RecallPrompt]]) -> dict[int, list[str]]:
    """Start a stack and ask everything twice: the second time the prefix cache is warm."""
    with tempfile.TemporaryDirectory(prefix="twinfang-") as folder:
        stack = launch(Path(folder), *flags)
        try:
            stack.wait_until_ready(timeout_s=START_TIMEOUT_S)
            answers = {length: asyncio.run(ask(stack.url, prompts)) for length, prompts in asked.items()}
            again = {length: asyncio.run(ask(stack.url, prompts)) for length, prompts in asked.items()}
        finally:
            stack.stop(timeout_s=STOP_TIMEOUT_S)
    if values(again) != values(answers):
        raise SystemExit(f"{' '.join(flags)}: a warm cache changed an answer")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=50, help="prompts of each length")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    asked = questions(options.prompts)
    rows: dict[str, dict[str, Any]] = {}
    reference: dict[int, list[str]] | None = None
    width = max(map(len, CONFIGURATIONS)) + 2
    print(f"{'configuration':{width}}" + "".join(f"{length:>8}" for length in LENGTHS) + "   differ behind")
    for name, flags in CONFIGURATIONS.items():
        answers = measure(flags, asked)
        reference = reference or answers
        shares = {
            length: sum(p.is_correct(a) for p, a in zip(prompts, answers[length], strict=True)) / len(prompts)
            for length, prompts in asked.items()
        }
        different = num_different(answers, reference)
        rows[name] = {"accuracy": shares, "completions_different": different}
        print(
            f"{name:{width}}" + "".join(f"{shares[n]:8.1%}" for n in LENGTHS) + f"{different:16}", flush=True
        )
        if values(answers) != values(reference):
            raise SystemExit(f"{name}: values differ from the first row's")
    if options.json:
        figures: dict[str, Any] = {
            "machine": machine(),
            "prompts": options.prompts,
            "completion_tokens": COMPLETION_TOKENS,
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
