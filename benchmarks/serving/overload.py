"""Five times as many requests as servers can answer: effects on the answers, the refusals and the router.

    python -m benchmarks.serving.overload --json benchmarks/results/overload.json     # stub workers
    python -m benchmarks.serving.overload --start "up --max-num-seqs 8 --cache-memory 0.1"      # real servers

Arrivals are Poisson: a while below capacity, a minute of overload, then the same while below capacity again.
Every answer is compared with the answer to the same prompt alone. It must be exact, or the request must be
refused with a 429, otherwise the run fails. Stub workers take a step every --step-ms over --rows rows, so
their capacity is known. The capacity of real servers is measured in a closed loop of as many requests as they
have rows.

| figure | is |
|---|---|
| TTFT | from sending to the first token: the queue, bounded by --max-queue, and the servers' time |
| TPOT | time of a token after the first: what overload must not touch |
| refusal | from sending to the whole 429 |
| memory | the router's resident set while it is overloaded, from the fifteenth second on |
| recovery | from the overload's last arrival until nobody waits; refusals in the seconds after it |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.router.stub_workers import MODEL
from benchmarks.serving.closed_load import milliseconds, percentile
from benchmarks.serving.open_load import Outcome, Phase, Question, ask, offer
from twinfang.bench.machine import machine, waited_s
from twinfang.flags.table import BUNDLED_MODEL
from twinfang.launch import launch
from twinfang.stack.ports import free_ports

NUM_QUESTIONS = 8
PROMPT_TOKENS = 64
SETTLING_S = 15.0
"""Seconds of overload before memory is measured: by then queue and buffers have their full size, and the log
of ended requests is full."""
START_TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Target:
    """A running router, and how many of this benchmark's requests it can answer per second."""

    address: str
    model: str
    router_pid: int
    rows: int
    capacity: float | None
    """None if it must be measured."""


@dataclass
class Memory:
    """The router's memory over time: seconds by the monotonic clock, bytes."""

    samples: list[tuple[float, int]]

    def figures(self, since: float, until: float) -> dict[str, object]:
        sizes = [size / 2**20 for at, size in self.samples if since <= at <= until] or [0.0]
        third = max(1, len(sizes) // 3)
        return {
            "first_mib": round(sizes[0], 1),
            "last_mib": round(sizes[-1], 1),
            "max_mib": round(max(sizes), 1),
            "by_tenth_mib": [round(sizes[i * len(sizes) // 10], 1) for i in range(10)],
            "growth_of_medians_mib": round(percentile(sizes[-third:], 50) - percentile(sizes[:third], 50), 2),
        }


@contextmanager
def stubs(options: argparse.Namespace) -> Iterator[Target]:
    """Runs a stub worker and a router in front of it until the end of the block."""
    worker_port, port = free_ports(2)
    worker = [
        "-m",
        "benchmarks.router.stub_workers",
        "grpc",
        "--port",
        str(worker_port),
        "--rows",
        str(options.rows),
    ]
    router = ["-m", "twinfang", "router", "--model", str(BUNDLED_MODEL), "--served-model-name", MODEL]
    router += ["--decode", f"127.0.0.1:{worker_port}", "--port", str(port), "--log-level", "warning"]
    router += ["--max-queue", str(options.max_queue)]
    processes = [subprocess.Popen([sys.executable, *command]) for command in (worker, router)]
    try:
        _await_ready(f"127.0.0.1:{port}")
        capacity = options.rows / (options.output_len * options.step_ms / 1000)
        yield Target(f"127.0.0.1:{port}", MODEL, processes[1].pid, options.rows, capacity)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


@contextmanager
def stack(options: argparse.Namespace) -> Iterator[Target]:
    """Runs ``twinfang up`` or ``serve`` until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="twinfang-bench-") as folder:
        flags = ("--log-level", "warning", "--max-queue", str(options.max_queue))
        started = launch(Path(folder), *shlex.split(options.start), *flags)
        try:
            started.wait_until_ready(START_TIMEOUT_S)
            router = started.processes()["router"]
            rows = int(metrics_of(router.address)["twinfang_places"])
            yield Target(router.address, started.model, router.pid, rows, None)
        finally:
            if started.supervisor.poll() is None:
                started.stop(START_TIMEOUT_S)


def _await_ready(address: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"http://{address}/readyz", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_INTERVAL_S)


def metrics_of(address: str) -> dict[str, float]:
    """Returns the metrics by name; series with different labels are added."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


# --- a run -----------------------------------------------------------------------------------------


async def run(target: Target, options: argparse.Namespace) -> dict[str, object]:
    rng = random.Random(options.seed)
    questions = await _learn(target, options, rng)
    capacity = target.capacity or await _measured_capacity(target, questions, options)
    memory = Memory([])
    watching = asyncio.create_task(_watch(target, memory))
    calm = options.calm * capacity

    def offered(name: str, rate: float, duration_s: float) -> Awaitable[Phase]:
        return offer(Phase(name, rate, duration_s), target.address, target.model, questions, rng)

    await offered("warm up", calm, min(5.0, options.calm_s))
    before = await offered("below capacity", calm, options.calm_s)
    overloading = asyncio.ensure_future(offered("overload", options.factor * capacity, options.overload_s))
    waited_before_s = waited_s([target.router_pid])
    await asyncio.sleep(options.overload_s)
    router_waited_s = waited_s([target.router_pid]) - waited_before_s
    recovering = asyncio.create_task(_until_nobody_waits(target))
    after = await offered("after it", calm, options.calm_s)  # the last answers to the overload still come
    over, recovery_s = await overloading, await recovering
    idle_s = await _until_idle(target)
    watching.cancel()
    late = [one for one in after.outcomes if one.sent > after.began + 1]
    return {
        "capacity_requests_per_s": round(capacity, 2),
        "rows": target.rows,
        "max_queue": options.max_queue,
        "phases": [summary(phase, capacity) for phase in (before, over, after)],
        "memory": memory.figures(over.began + SETTLING_S, over.began + over.duration_s),
        "router_waited_for_a_core_s": round(router_waited_s, 2),
        "recovery": {
            "queue_empty_after_s": round(recovery_s, 2),
            "refused_later_than_1_s": sum(one.status == 429 for one in late),
            "ttft_ms_later_than_1_s": milliseconds([one.ttft_s for one in late if one.is_exact] or [0.0]),
            "idle_after_s": round(idle_s, 2),
        },
    }


async def _learn(target: Target, options: argparse.Namespace, rng: random.Random) -> list[Question]:
    """Returns prompts and their answers when asked alone. Raises :class:`RuntimeError` if one gets none."""
    questions = []
    for _ in range(NUM_QUESTIONS):
        token_ids = tuple(rng.randint(300, 700) for _ in range(PROMPT_TOKENS))
        question = Question(token_ids, options.output_len, options.step_ms / 1000)
        outcome = await ask(target.address, target.model, question)
        if outcome.status != 200 or len(outcome.token_ids) != options.output_len:
            raise RuntimeError(f"no answer to a request alone: {outcome}")
        questions.append(replace(question, answer=outcome.token_ids))
    return questions


async def _measured_capacity(
    target: Target, questions: Sequence[Question], options: argparse.Namespace
) -> float:
    """Returns requests per second of a closed loop with as many requests in flight as the router has
    places."""
    end = time.monotonic() + options.calm_s

    async def work(index: int) -> int:
        num_done = 0
        while time.monotonic() < end:
            num_done += (await ask(target.address, target.model, questions[index % NUM_QUESTIONS])).is_exact
        return num_done

    started = time.monotonic()
    done = await asyncio.gather(*(work(index) for index in range(target.rows)))
    return sum(done) / (time.monotonic() - started)


async def _watch(target: Target, memory: Memory) -> None:
    router = psutil.Process(target.router_pid)
    while True:
        memory.samples.append((time.monotonic(), router.memory_info().rss))
        await asyncio.sleep(0.5)


async def _until_nobody_waits(target: Target) -> float:
    started = time.monotonic()
    while (await asyncio.to_thread(metrics_of, target.address))["twinfang_requests_queued"]:
        await asyncio.sleep(LOOK_INTERVAL_S)
    return time.monotonic() - started


async def _until_idle(target: Target) -> float:
    """Waits until nothing is queued, in flight or assigned. Raises :class:`TimeoutError`."""
    started = time.monotonic()
    names = ("requests_queued", "requests_in_flight", "places_taken", "assigned_tokens")
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            figures = await asyncio.to_thread(metrics_of, target.address)
            if not any(figures[f"twinfang_{name}"] for name in names):
                return time.monotonic() - started
            await asyncio.sleep(LOOK_INTERVAL_S)


# --- figures ---------------------------------------------------------------------------------------


def summary(phase: Phase, capacity: float) -> dict[str, object]:
    def times(values: list[float]) -> dict[str, float]:
        return milliseconds(values or [0.0])

    # Answers that ended while requests still came: what ends later says nothing of a rate.
    end = phase.began + phase.duration_s
    in_time = [one for one in phase.accepted if one.last <= end]
    retry_after_s = sorted(one.retry_after_s for one in phase.refused) or [0]
    return {
        "name": phase.name,
        "duration_s": phase.duration_s,
        "offered": len(phase.outcomes),
        "times_capacity": round(len(phase.outcomes) / phase.duration_s / capacity, 2),
        "answered": len(phase.accepted),
        "answered_of_capacity": round(len(in_time) / phase.duration_s / capacity, 3),
        "refused": len(phase.refused),
        "wrong": len(phase.wrong),
        "ttft_ms": times([one.ttft_s for one in phase.accepted]),
        "tpot_ms": times([one.tpot_s for one in phase.accepted]),
        "refusal_ms": times([one.ttft_s for one in phase.refused]) | {"max": _worst(phase.refused)},
        "retry_after_s": {"min": retry_after_s[0], "max": retry_after_s[-1]},
    }


def _worst(outcomes: Sequence[Outcome]) -> float:
    return round(1000 * max((one.ttft_s for one in outcomes), default=0.0), 3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", help="a command of twinfang whose stack to overload; else stub workers")
    parser.add_argument("--rows", type=int, default=8, help="rows of the stub worker")
    parser.add_argument("--step-ms", type=float, default=20.0, help="between two of its steps")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--max-queue", type=int, default=8)
    parser.add_argument("--factor", type=float, default=5.0, help="overload, times capacity")
    parser.add_argument("--calm", type=float, default=0.8, help="load before and after it, times capacity")
    parser.add_argument("--overload-s", type=float, default=60.0)
    parser.add_argument("--calm-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = machine()
    with stack(options) if options.start else stubs(options) as target:
        result = asyncio.run(run(target, options))
    print(json.dumps(result, indent=2))
    if options.json is not None:
        report = {"machine": about, "command": sys.argv[1:], **result}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    phases: list[dict[str, object]] = result["phases"]  # type: ignore[assignment]
    return int(any(phase["wrong"] for phase in phases))


if __name__ == "__main__":
    sys.exit(main())
