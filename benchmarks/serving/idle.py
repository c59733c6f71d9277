"""The share of a core that a stack without requests takes: just started, after a burst of requests, with
states lent.

    python -m benchmarks.serving.idle --json benchmarks/results/idle.json --publish     # six minutes

It measures the CPU time of every thread (``schedstat``). Other processes' load changes it little: caches
become colder, and so the few wake-ups of an idle process cost more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from testing.marked_section import replace_between
from twinfang.bench.machine import machine
from twinfang.launch import LaunchedStack, launch
from wire.messages.generation import GetStats, ServerStats
from wire.rpc import GET_STATS, call, open_channel

STACKS = {
    "1 prefill, 1 decode": ("--prefill", "1", "--decode", "1"),
    "2 prefill, 2 decode, 2 router processes": ("--prefill", "2", "--decode", "2", "--workers", "2"),
}
LENDING = ("--cache-mode", "all", "--conversation-return")
"""With these flags, every answer's state is kept under a lease, for a prefill server that may read it at the
next turn."""
START_TIMEOUT_S, STOP_TIMEOUT_S, REQUEST_TIMEOUT_S = 300.0, 40.0, 60.0
"""Long, because the first start on a machine compiles kernels, which takes minutes if others use the cores
too."""
SETTLE_S = 10.0
"""Longer than a server polls after it has met a new peer."""
NUM_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 200, 40
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900
LIMIT_PERCENT = 3.0

DOCUMENT = Path("docs/performance.md")
BEGIN = "<!-- written by: python -m benchmarks.serving.idle --publish -->"
END = "<!-- end of what the idle benchmark writes -->"

Threads = dict[int, float]
"""CPU seconds so far by thread id."""


@dataclass(frozen=True)
class ProcessShare:
    """One process's share."""

    name: str
    percent: float
    """Percent of one core."""
    threads_percent: tuple[float, ...]
    """Percent of each thread, the busiest first."""


def threads_of(pid: int) -> Threads:
    found: Threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found[int(task.name)] = int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    return found


def measured(stack: LaunchedStack, seconds: float) -> list[ProcessShare]:
    """Measures all processes of a stack, including its supervisor, without any requests."""
    names = {process.pid: name for name, process in stack.processes().items()}
    parent = psutil.Process(stack.supervisor.pid)
    pids = {parent.pid: "supervisor"}
    for child in parent.children(recursive=True):
        pids[child.pid] = names.get(child.pid) or _name_of(child)
    before = {pid: threads_of(pid) for pid in pids}
    started = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - started
    shares = []
    for pid, name in pids.items():
        took = [100 * (now - before[pid].get(tid, 0.0)) / elapsed for tid, now in threads_of(pid).items()]
        busiest_first = tuple(round(one, 4) for one in sorted(took, reverse=True))
        shares.append(ProcessShare(name, round(sum(took), 4), busiest_first))
    return shares


def _name_of(process: psutil.Process) -> str:
    """Returns the name of one of several router processes, from its ``--name``."""
    words = process.cmdline()
    return words[words.index("--name") + 1] if "--name" in words else process.name()


async def burst(url: str) -> None:
    choose = random.Random(0)
    prompts = [
        [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(PROMPT_TOKENS)]
        for _ in range(NUM_REQUESTS)
    ]
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        bodies = [
            {"prompt": one, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            for one in prompts
        ]
        for response in await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies)):
            response.raise_for_status()


async def leases_held(stack: LaunchedStack) -> int:
    total = 0
    for name, process in stack.processes().items():
        if not name.startswith("router"):
            async with open_channel(process.address) as channel:
                stats: ServerStats = await call(channel, GET_STATS, GetStats(), timeout_s=10.0)
                total += stats.leases_held
    return total


def situations(flags: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Measures two stacks with ``flags``, one of which lends states. Returns results by situation."""
    found: dict[str, dict[str, Any]] = {}

    def look(name: str, stack: LaunchedStack) -> None:
        time.sleep(SETTLE_S)
        leases, load = asyncio.run(leases_held(stack)), os.getloadavg()[0]
        shares = measured(stack, seconds)
        found[name] = {
            "percent_of_a_core": round(sum(share.percent for share in shares), 3),
            "leases_held": leases,
            "load_average": load,
            "processes": [vars(share) for share in shares],
        }
        print(f"  {name}: {found[name]['percent_of_a_core']:.2f} %, {leases} leases held", flush=True)

    with running(flags) as stack:
        look("fresh", stack)
        asyncio.run(burst(stack.url))
        look("after a burst", stack)
    with running((*flags, *LENDING)) as stack:
        asyncio.run(burst(stack.url))
        look("states lent", stack)
    return found


@contextmanager
def running(flags: Sequence[str]) -> Iterator[LaunchedStack]:
    """Runs ``twinfang up``, ready inside the block."""
    with tempfile.TemporaryDirectory(prefix="twinfang-idle-") as folder:
        stack = launch(Path(folder), "up", *flags)
        try:
            stack.wait_until_ready(START_TIMEOUT_S)
            yield stack
        finally:
            if stack.supervisor.poll() is None:
                stack.stop(STOP_TIMEOUT_S)


def table(report: dict[str, Any]) -> str:
    """Returns Markdown: a line for each stack and situation."""
    lines = [
        "| stack | situation | leases held | processes | threads | busiest process | sum, % of one core |",
        "|---|---|---|---|---|---|---|",
    ]
    for stack, found in report["stacks"].items():
        for number, (name, one) in enumerate(found.items()):
            busiest = max(one["processes"], key=lambda process: process["percent"])
            threads = sum(len(process["threads_percent"]) for process in one["processes"])
            cells = [
                "" if number else stack,
                name,
                str(one["leases_held"]),
                str(len(one["processes"])),
                str(threads),
                f"{busiest['name']}: {busiest['percent']:.2f}",
                f"{one['percent_of_a_core']:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(report: dict[str, Any]) -> str:
    loads = [one["load_average"] for found in report["stacks"].values() for one in found.values()]
    return (
        f"{table(report)}\n\nCPU time over {report['seconds']:g} s, bundled model, "
        f"{report['machine']['processor']}, {report['machine']['cores']} cores, load {min(loads):.1f} to "
        f"{max(loads):.1f} from others meanwhile."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement; default: 30")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--publish", action="store_true", help=f"the table into {DOCUMENT}")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "seconds": options.seconds, "stacks": {}}
    for name, flags in STACKS.items():
        print(name, flush=True)
        report["stacks"][name] = situations(flags, options.seconds)
    print(f"\n{table(report)}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.publish:
        replace_between(DOCUMENT, BEGIN, END, section(report))
    sums = [one["percent_of_a_core"] for found in report["stacks"].values() for one in found.values()]
    return 1 if max(sums) > LIMIT_PERCENT else 0


if __name__ == "__main__":
    raise SystemExit(main())
