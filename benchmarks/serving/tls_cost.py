"""What mutual TLS costs: the same requests to a stack with it and to one without, in turns.

    python -m benchmarks.serving.tls_cost --rounds 20

Both stacks run at the same time, one idle while the other works. Figures are medians of the rounds: time to
first token and tokens per second as a client sees them, and the CPU time of the stack's processes, which a
busy machine disturbs least. The stack with TLS speaks HTTPS, on one connection that is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field

import httpx
import psutil

from testing.fleets.clients import http_client
from testing.fleets.stack import Stack, running_stack

NUM_TOKENS = 64
NUM_PROMPT_TOKENS = 200
CONCURRENCY = (1, 8)


@dataclass
class Figures:
    ttft_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        ttft_ms, cpu_ms = (1e3 * statistics.median(one) for one in (self.ttft_s, self.cpu_s))
        return f"{name:<10} {ttft_ms:8.2f} {statistics.median(self.tokens_per_s):10.1f} {cpu_ms:9.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each stack (default: 20)")
    rounds = parser.parse_args().rounds
    with running_stack("up") as clear, running_stack("up", "--tls") as secure:
        for concurrency in CONCURRENCY:
            figures = asyncio.run(measure({"clear": clear, "tls": secure}, rounds, concurrency))
            print(f"{concurrency} at a time   TTFT ms   tokens/s  CPU ms a token")
            for name, one in figures.items():
                print(one.row(name), flush=True)


async def measure(stacks: dict[str, Stack], rounds: int, concurrency: int) -> dict[str, Figures]:
    figures = {name: Figures() for name in stacks}
    clients = {name: http_client(stack) for name, stack in stacks.items()}
    try:
        for turn in range(rounds + 1):  # the first is not counted
            for name, stack in stacks.items():
                kept = figures[name] if turn else Figures()
                await _round(stack, clients[name], kept, concurrency, turn)
    finally:
        for client in clients.values():
            await client.aclose()
    return figures


async def _round(
    stack: Stack, client: httpx.AsyncClient, figures: Figures, concurrency: int, turn: int
) -> None:
    pids = [process.pid for process in stack.processes().values()]
    before_s, started_s = _cpu_s(pids), time.perf_counter()
    first_s = await asyncio.gather(*(_ask(client, turn * concurrency + i) for i in range(concurrency)))
    took_s = time.perf_counter() - started_s
    figures.ttft_s.append(statistics.median(first_s))
    figures.tokens_per_s.append(concurrency * NUM_TOKENS / took_s)
    figures.cpu_s.append((_cpu_s(pids) - before_s) / (concurrency * NUM_TOKENS))


async def _ask(client: httpx.AsyncClient, seed: int) -> float:
    """Return the time to the first token of one streamed answer, which is read to its end."""
    body = {
        "prompt": [(seed * 7919 + i * 31) % 250 + 1 for i in range(NUM_PROMPT_TOKENS)],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    asked_s, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_lines():
            first_s = first_s or time.perf_counter() - asked_s
    return first_s


def _cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    main()
