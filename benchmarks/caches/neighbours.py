"""Prompts that another prefill server has cached, beside computing them.

    python -m benchmarks.caches.neighbours --json benchmarks/results/neighbours.json

Two prefill servers, a decode server and a router. Prompts of several lengths are sent to one prefill
server, and then to the other one, which reads them from the first. Measured is the time to the first token at
the client, in turn with prompts of the same length that no server has. Then the first server is drained, with
other prompts, and they are asked for at the server that stays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.json_file import write_json
from router.policies.policy import Candidate
from router.policies.session_affinity import home_of
from twinfang.bench.machine import machine
from twinfang.launch import LaunchedStack, launch

LENGTHS, NUM_EACH = (256, 512, 1024, 2048), 8
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900
NAMES = ("prefill-0", "prefill-1")
FLAGS = (
    *("--prefill", "2", "--session-header", "X-Chat", "--host-cache-size", "1", "--max-model-len", "4096"),
    *("--threads", "1"),
)
READY_S, KNOWN_S, STOP_S = 400.0, 60.0, 40.0
TOKEN = "a-token-for-the-benchmark-of-neighbours"


class Client:
    """Sends prompts to a prefill server of choice."""

    def __init__(self, stack: LaunchedStack, url: str) -> None:
        self._stack = stack
        self._http = httpx.Client(base_url=url, timeout=120.0)
        self.addresses = {name: stack.processes()[name].address for name in NAMES}
        candidates = [Candidate(address) for address in self.addresses.values()]
        homes = {home_of(str(i), candidates).address: str(i) for i in range(64)}
        self._chats = {name: homes[address] for name, address in self.addresses.items()}

    def ask(self, prompt: list[int], server: str) -> tuple[float, int, tuple[int, ...]]:
        """Return the milliseconds to the first token, the cached tokens, and the answer."""
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"X-Chat": self._chats[server]}
        began_s, first_s = time.perf_counter(), 0.0
        tokens: list[int] = []
        cached = 0
        with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = first_s or time.perf_counter()
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return (first_s - began_s) * 1000, cached, tuple(tokens)

    def published(self, server: str) -> float:
        page = self._http.get("/metrics").text
        address = re.escape(self.addresses[server])
        found = re.search(rf'^twinfang_published_prefixes{{.*server="{address}".*}} (\S+)$', page, re.M)
        return 0.0 if found is None else float(found[1])

    def figure(self, server: str, name: str) -> float:
        url = self._stack.processes()[server].metrics_url
        assert url is not None
        found = re.search(rf"^twinfang_neighbour_cache_{name} (\S+)$", httpx.get(url).text, re.M)
        assert found is not None
        return float(found[1])

    def drain(self, server: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        workers = self._http.get("/admin/v1/workers", headers=headers).json()["workers"]
        (worker,) = (one["id"] for one in workers if one["address"] == self.addresses[server])
        self._http.post(f"/admin/v1/workers/{worker}/drain", headers=headers).raise_for_status()


def wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + KNOWN_S
    while not condition():
        assert time.monotonic() < until_s, "not in time"
        time.sleep(0.05)


def prompts(choose: random.Random) -> dict[int, list[list[int]]]:
    return {
        length: [
            [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length)] for _ in range(NUM_EACH)
        ]
        for length in LENGTHS
    }


def fill(client: Client, known: dict[int, list[list[int]]]) -> dict[int, list[tuple[int, ...]]]:
    """Let the first server compute prompts, until the router knows what it has. Return the answers."""
    before = client.published(NAMES[0])
    answers = {length: [client.ask(one, NAMES[0])[2] for one in ones] for length, ones in known.items()}
    wait(lambda: client.published(NAMES[0]) >= before + len(LENGTHS) * NUM_EACH)
    time.sleep(1.0)
    return answers


def measure(
    client: Client, known: dict[int, list[list[int]]], answers: dict[int, list[tuple[int, ...]]], seed: int
) -> list[dict[str, object]]:
    """Return a row for each length, with the medians of prompts that were found and of others in turn."""
    others = prompts(random.Random(seed))
    rows: list[dict[str, object]] = []
    for length, ones in known.items():
        computed: list[float] = []
        found: list[float] = []
        cached = 0
        for prompt, other, answer in zip(ones, others[length], answers[length], strict=True):
            computed.append(client.ask(other, NAMES[1])[0])
            ms, num_cached, same = client.ask(prompt, NAMES[1])
            assert same == answer, "the servers say different things"
            found.append(ms)
            cached += num_cached
        row: dict[str, object] = {
            "prompt_tokens": length,
            "found_tokens": cached / NUM_EACH,
            "computed_ms": statistics.median(computed),
            "found_ms": statistics.median(found),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def run(seed: int) -> dict[str, object]:
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(TOKEN)
        token_file.chmod(0o600)
        stack = launch(Path(folder), "up", *FLAGS, "--admin-token-file", str(token_file), environment={})
        try:
            stack.wait_until_ready(READY_S)
            client = Client(stack, stack.url)
            warm = [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(1024)]
            for name in NAMES:
                client.ask(warm, name)
            known = prompts(choose)
            read = measure(client, known, fill(client, known), seed + 1)
            figures = {
                name: client.figure(NAMES[1], name)
                for name in ("read_prefixes_total", "read_bytes_total", "computed_prefixes_total")
            }
            known = prompts(choose)
            answers = fill(client, known)
            began_s = time.monotonic()
            client.drain(NAMES[0])
            wait(lambda: client.figure(NAMES[0], "handed_over_prefixes_total") > 0)
            last, at_s = 0.0, time.monotonic()
            while time.monotonic() < at_s + 2.0:
                now = client.figure(NAMES[0], "handed_over_prefixes_total")
                if now != last:
                    last, at_s = now, time.monotonic()
                time.sleep(0.05)
            handed = {"prefixes": last, "seconds": at_s - began_s}
            print(figures, handed, flush=True)
            inherited = measure(client, known, answers, seed + 2)
            return {"read": read, **figures, "handed_over": handed, "inherited": inherited}
        finally:
            stack.stop(STOP_S)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    os.environ.setdefault("TWINFANG_LOG_LEVEL", "warning")
    figures = run(options.seed)
    if options.json:
        write_json(options.json, {"machine": machine(), **figures})


if __name__ == "__main__":
    main()
