"""How long ``twinfang up`` takes until it is ready, and where the time and the memory go.

    python -m benchmarks.serving.start --rounds 7 --json benchmarks/results/start.json
    python -m benchmarks.serving.start --model DIR --at before=../other after=.    # two checkouts in turns

Beside it, the time of ``cat`` of the weights. The files are in the page cache: each round reads them first.
Compare versions only within one run, on a quiet machine: the load average is in the result.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.json_file import write_json
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL

READY = "Serving "
"""How the line begins that says that the stack is ready."""
TIMEOUT_S = 300.0
MIB = 1 << 20


def one_start(checkout: Path, command: str, flags: Sequence[str]) -> dict[str, Any]:
    """Starts a stack, measures it at the moment when it is ready, and stops it."""
    with tempfile.TemporaryFile("w+") as log:
        load, started = os.getloadavg()[0], time.monotonic()
        stack = subprocess.Popen(
            [str(checkout / ".venv/bin/python"), "-m", "twinfang", command, "--port", "0", *flags],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert stack.stdout is not None
            if not any(line.startswith(READY) for line in stack.stdout):
                log.seek(0)
                raise SystemExit(f"{command} in {checkout} was not ready:\n{log.read()}")
            ready_s = time.monotonic() - started
            family = psutil.Process(stack.pid)
            cpu = family.cpu_times()
            ended_s = cpu.children_user + cpu.children_system
            processes = [_measured(one) for one in (family, *family.children(recursive=True))]
        finally:
            stack.send_signal(signal.SIGTERM)
            stack.communicate(timeout=TIMEOUT_S)
    return {
        "ready_s": round(ready_s, 3),
        "cpu_s": round(ended_s + sum(one["cpu_s"] for one in processes), 3),
        "ended_processes_cpu_s": round(ended_s, 3),
        "load_average": load,
        "processes": processes,
    }


def _measured(process: psutil.Process) -> dict[str, Any]:
    words = process.cmdline()
    cpu, memory = process.cpu_times(), process.memory_full_info()
    return {
        "name": words[words.index("--name") + 1] if "--name" in words else "supervisor",
        "cpu_s": round(cpu.user + cpu.system, 3),
        "rss_mib": round(memory.rss / MIB, 1),
        "pss_mib": round(memory.pss / MIB, 1),
        "private_mib": round(memory.uss / MIB, 1),
    }


def cat_s(files: Sequence[Path]) -> float:
    """Returns the seconds of ``cat FILES > /dev/null``."""
    started = time.monotonic()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def summary(rounds: Sequence[dict[str, Any]]) -> str:
    """Returns a line with medians, then a line for each process."""

    def median(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f}"

    ready = [one["ready_s"] for one in rounds]
    lines = [
        f"ready after {median(ready)} s (least {min(ready):.2f}), {median([one['cpu_s'] for one in rounds])} "
        f"CPU-s, load {median([one['load_average'] for one in rounds])}"
    ]
    for name in {process["name"]: None for process in rounds[0]["processes"]}:
        same = [process for one in rounds for process in one["processes"] if process["name"] == name]
        lines.append(
            f"  {name:<12} {median([one['cpu_s'] for one in same])} CPU-s, RSS "
            f"{median([one['rss_mib'] for one in same])} MiB, PSS {median([one['pss_mib'] for one in same])} "
            f"MiB, private {median([one['private_mib'] for one in same])} MiB"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", nargs="+", default=["now=."], metavar="NAME=DIR", help="checkouts, in turns")
    parser.add_argument("--command", choices=("up", "serve"), default="up")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--flags", default="", help="further flags of the command, in one word")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    files = sorted(given.model.glob("*.safetensors"))
    flags = ("--model", str(given.model.resolve()), *given.flags.split())
    checkouts = {name: Path(path).resolve() for name, _, path in (at.partition("=") for at in given.at)}
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    cats: list[float] = []
    for checkout in checkouts.values():
        one_start(checkout, given.command, flags)  # fills the caches: files, byte code, kernels
    for number in range(given.rounds):
        for name, checkout in checkouts.items():
            cats.append(cat_s(files))
            one = one_start(checkout, given.command, flags)
            starts[name].append(one)
            print(f"round {number + 1}, {name}: {one['ready_s']:.2f} s, {one['cpu_s']:.2f} CPU-s", flush=True)
    size = sum(file.stat().st_size for file in files)
    print(f"\ncat of {size / 1e9:.2f} GB: {statistics.median(cats):.3f} s")
    for name, rounds in starts.items():
        print(f"{name}: {summary(rounds)}")
    if given.json is not None:
        report = {
            "machine": machine(),
            "command": f"{given.command} --model {given.model.name} {given.flags}".strip(),
            "weights_bytes": size,
            "cat_s": [round(one, 4) for one in cats],
            "starts": starts,
        }
        write_json(given.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
