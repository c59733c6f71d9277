"""The cost of a router: Twinfang's compared with vllm-router and sglang-router, all with workers that answer
at once.

    python -m benchmarks.router.alone --peers /path/to/venv/bin --json benchmarks/results/router.json

All arrangements have the same load and two stub workers (``stub_workers.py``). Figures are measured for one
router process and for two.

| figure | is |
|---|---|
| added | time to first token minus that of a worker alone over HTTP, one request at a time |
| requests/s | closed loop, answers of one token |
| paced | many streams, a token of each every step, as from engines: CPU time a token once all stream |
| flat out | workers step as fast as the router takes it; events of a request may come together |

CPU time is that of all the router's processes and threads, from /proc. It stays valid on a machine whose
cores workers, clients and others use too. "/core-s" is requests or tokens divided by CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.router.stream_load import Load, Result, Shape
from benchmarks.router.stub_workers import MODEL
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL
from twinfang.stack.ports import free_ports

START_TIMEOUT_S = 60.0
NUM_WORKERS = 2
PROMPT = "The state of a sequence is handed from one server to another, and the answer goes on. " * 8

ONE_TOKEN = Shape(PROMPT, 1)
LATENCY_REQUESTS, RATE_REQUESTS, RATE_CONCURRENCY = 400, 2000, 32
PACED = ((64, 0.02), (256, 0.04))
"""Number of streams, and seconds between two tokens of each."""
PACED_S, MIN_PACED_S = 4.0, 3.0
"""Length of each stream; at least the second value, because hundreds of streams take a while to start."""
FLAT_OUT_STREAMS, FLAT_OUT_TOKENS = 64, 400


@dataclass(frozen=True)
class Arrangement:
    name: str
    note: str
    worker_kinds: tuple[tuple[str, str], ...]
    """Kind and role of each stub worker."""
    command: Callable[[int, Sequence[int], int], list[str]] | None
    """Returns a router's command line from its port, the workers' ports and the number of processes. None:
    the client calls the workers."""
    shares_port: bool = False
    """Whether one command starts several processes. Otherwise it is run several times, each with its own
    port."""
    ready_path: str = "/readyz"
    fields: tuple[tuple[str, object], ...] = ()
    checkout: Path | None = None
    """The checkout whose router and workers run. None: this one."""


USAGE = (("stream_options", {"include_usage": True}),)
"""Our events may hold several tokens, so the answer must say how many there were."""


def twinfang(roles: Sequence[str], port: int, workers: Sequence[int], num_processes: int) -> list[str]:
    flags = [f"--{role}=127.0.0.1:{w}" for role, w in zip(roles, workers, strict=True)]
    policies = ("--prefill-policy=round_robin", "--decode-policy=round_robin")
    model = ("--model", str(BUNDLED_MODEL), "--served-model-name", MODEL)
    quiet = ("--log-level=warning", f"--port={port}", f"--workers={num_processes}")
    return [sys.executable, "-m", "twinfang", "router", *model, *policies, *quiet, *flags]


def vllm_router(binary: Path, port: int, workers: Sequence[int], _num_processes: int) -> list[str]:
    urls = [f"http://127.0.0.1:{w}" for w in workers]
    metrics = ("--prometheus-port", str(free_ports(1)[0]))
    quiet = ("--log-level", "warning", "--policy", "round_robin", "--port", str(port))
    return [str(binary), *quiet, *metrics, "--worker-urls", *urls]


def sglang_router(binary: Path, port: int, workers: Sequence[int], _num_processes: int) -> list[str]:
    urls = [f"http://127.0.0.1:{w}" for w in workers]
    metrics = ("--prometheus-port", str(free_ports(1)[0]))
    quiet = ("--log-level", "warn", "--policy", "round_robin", "--port", str(port))
    return [str(binary), "launch", *quiet, *metrics, "--worker-urls", *urls]


def arrangements(peers: dict[str, Path], earlier: Path | None = None) -> list[Arrangement]:
    sse, both = (("sse", "both"),) * NUM_WORKERS, (("grpc", "both"),) * NUM_WORKERS
    pair = (("grpc", "prefill"), ("grpc", "decode"))
    found = [
        Arrangement("workers alone", "client → worker", sse, None),
        Arrangement(
            "twinfang",
            "tokenizes, detokenizes; servers of both roles",
            both,
            partial(twinfang, ("decode",) * NUM_WORKERS),
            shares_port=True,
            fields=USAGE,
        ),
        Arrangement(
            "twinfang, split",
            "the same with a prefill server's call before each request",
            pair,
            partial(twinfang, ("prefill", "decode")),
            shares_port=True,
            fields=USAGE,
        ),
    ]
    if earlier is not None:
        found += [
            replace(one, name=f"{one.name}, earlier", checkout=earlier)
            for one in found
            if one.name.startswith("twinfang")
        ]
    for name, command in (("vllm-router", vllm_router), ("sglang-router", sglang_router)):
        if name in peers:
            note = "passes bytes through; as many threads as cores"
            found.append(Arrangement(name, note, sse, partial(command, peers[name]), ready_path="/health"))
    return found


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def process(command: Sequence[str], folder: Path, checkout: Path | None = None) -> Iterator[psutil.Process]:
    environment = None if checkout is None else os.environ | {"PYTHONPATH": str(checkout)}
    with (folder / f"{time.monotonic_ns()}.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd=checkout, env=environment)
    try:
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_until_ready(port: int, path: str, times: int = 1) -> None:
    """Waits for ``times`` successes in a row, because several processes may answer at one port."""
    deadline = time.monotonic() + START_TIMEOUT_S
    num_ready = 0
    while num_ready < times:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).read()
            num_ready += 1
            continue
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"nothing is ready at port {port} after {START_TIMEOUT_S:g} s: {error}"
                ) from error
        num_ready = 0
        time.sleep(0.1)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Returns the CPU time so far of these processes and their children, over all threads."""
    every = [one for parent in processes for one in (parent, *parent.children(recursive=True))]
    return sum(sum(one.cpu_times()[:2]) for one in every)


@contextmanager
def running(arrangement: Arrangement, num_routers: int, folder: Path) -> Iterator[Target]:
    with ExitStack() as exits:
        workers = free_ports(len(arrangement.worker_kinds))
        stubs = []
        for (kind, role), port in zip(arrangement.worker_kinds, workers, strict=True):
            stub = f"-m benchmarks.router.stub_workers {kind} --port {port} --role {role}"
            stubs.append(
                exits.enter_context(process([sys.executable, *stub.split()], folder, arrangement.checkout))
            )
            if kind == "sse":
                wait_until_ready(port, "/health")
        if arrangement.command is None:
            yield Target(arrangement, workers, stubs, stubs)
            return
        num_commands = 1 if arrangement.shares_port else num_routers
        ports = free_ports(num_commands)
        commands = [arrangement.command(port, workers, num_routers // num_commands) for port in ports]
        routers = [
            exits.enter_context(process(command, folder, arrangement.checkout)) for command in commands
        ]
        for port in ports:
            wait_until_ready(port, arrangement.ready_path, times=1 if num_routers == num_commands else 20)
        yield Target(arrangement, ports, routers, stubs)


# --- measurements ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The destination of the load, and the processes whose time is measured."""

    arrangement: Arrangement
    ports: Sequence[int]
    routers: Sequence[psutil.Process]
    workers: Sequence[psutil.Process]

    def run(
        self, shape: Shape, *, concurrency: int, num_requests: int, warm_up: int
    ) -> tuple[Result, dict[str, float]]:
        shape = Shape(shape.prompt, shape.num_tokens, shape.step_s, self.arrangement.fields)
        load = Load(self.ports, MODEL, shape, concurrency=concurrency)
        try:
            if warm_up:
                load.run(warm_up)
            steady: list[float] = []
            router_before, workers_before = cpu_s(self.routers), cpu_s(self.workers)
            result = load.run(num_requests, lambda: steady.append(cpu_s(self.routers)))
            router_s, workers_s = cpu_s(self.routers) - router_before, cpu_s(self.workers) - workers_before
        finally:
            load.close()
        cores = {
            "router": router_s / result.duration_s,
            "workers": workers_s / result.duration_s,
            "client": result.client_cpu_s / result.duration_s,
        }
        times = {"router_cpu_s": router_s, "steady_cpu_s": steady[-1] - steady[0] if steady else 0.0}
        return result, times | {f"{k}_cores": round(v, 3) for k, v in cores.items()}


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(target: Target, scale: float) -> dict[str, Any]:
    def scaled(number: float) -> int:
        return max(1, round(number * scale))

    num_alone = scaled(LATENCY_REQUESTS)
    alone, _ = target.run(ONE_TOKEN, concurrency=1, num_requests=num_alone, warm_up=scaled(50))
    figures: dict[str, Any] = {
        "first_token_ms": {"p50": ms(percentile(alone.first_s, 50)), "p99": ms(percentile(alone.first_s, 99))}
    }
    rate, cores = target.run(
        ONE_TOKEN, concurrency=RATE_CONCURRENCY, num_requests=scaled(RATE_REQUESTS), warm_up=scaled(100)
    )
    num = len(rate.total_s)
    del cores["steady_cpu_s"]
    figures["requests"] = {
        "per_s": round(num / rate.duration_s),
        "per_router_core_s": round(num / cores.pop("router_cpu_s")),
        "p50_ms": ms(percentile(rate.total_s, 50)),
        "p99_ms": ms(percentile(rate.total_s, 99)),
        **cores,
    }
    figures["paced"] = []
    for streams, step_s in PACED:
        shape = Shape(PROMPT, round(max(MIN_PACED_S, PACED_S * scale) / step_s), step_s)
        result, cores = target.run(shape, concurrency=streams, num_requests=streams, warm_up=0)
        steady_s = cores["steady_cpu_s"]
        if not steady_s:
            raise SystemExit(
                f"{streams} streams did not all start within {PACED_S:g} s: is the machine busy?"
            )
        figures["paced"].append(
            {
                "streams": streams,
                "step_ms": ms(step_s),
                "steady_us_per_token": round(steady_s / result.steady_events * 1e6, 2),
                "steady_tokens_per_router_core_s": round(result.steady_events / steady_s),
                **streamed(result, cores),
            }
        )
    shape = Shape(PROMPT, FLAT_OUT_TOKENS)
    streams = FLAT_OUT_STREAMS
    result, cores = target.run(shape, concurrency=streams, num_requests=scaled(2 * streams), warm_up=0)
    figures["flat_out"] = {"streams": streams, **streamed(result, cores)}
    return figures


def streamed(result: Result, cores: dict[str, float]) -> dict[str, Any]:
    router_cpu_s = cores.pop("router_cpu_s")
    del cores["steady_cpu_s"]
    return {
        "tokens_per_s": round(result.num_tokens / result.duration_s),
        "tokens_per_router_core_s": round(result.num_tokens / router_cpu_s),
        "router_us_per_token": round(router_cpu_s / result.num_tokens * 1e6, 2),
        "tokens_per_event": round(result.num_tokens / result.num_events, 2),
        "gap_ms": {"p50": ms(percentile(result.gaps_s, 50)), "p99": ms(percentile(result.gaps_s, 99))},
        **cores,
    }


# --- report ---------------------------------------------------------------------------------------

HEADER = (
    f"{'':26} {'added p50':>9} {'p99 ms':>7} {'req/s':>6} {'/core-s':>8}"
    + "".join(f" {f'{n}x{s * 1e3:.0f}ms: us/token':>20} {'/core-s':>8}" for n, s in PACED)
    + f" {'flat out tok/s':>15} {'/core-s':>8}"
)


def row(name: str, figures: dict[str, Any], base: dict[str, Any]) -> str:
    first, base_first = figures["first_token_ms"], base["first_token_ms"]
    cells = f"{first['p50'] - base_first['p50']:>9.2f} {first['p99'] - base_first['p99']:>7.2f}"
    cells += f" {figures['requests']['per_s']:>6} {figures['requests']['per_router_core_s']:>8}"
    for paced in figures["paced"]:
        cells += f" {paced['steady_us_per_token']:>20.1f} {paced['steady_tokens_per_router_core_s']:>8}"
    flat = figures["flat_out"]
    return f"{name:26} {cells} {flat['tokens_per_s']:>15} {flat['tokens_per_router_core_s']:>8}"


def find_peers(folder: Path | None) -> dict[str, Path]:
    """Returns executables by name, from ``folder`` or the PATH; reports missing ones."""
    found = {}
    for name in ("vllm-router", "sglang-router"):
        path = shutil.which(name, path=None if folder is None else str(folder))
        if path is None:
            print(
                f"{name} is missing and left out: install it into a venv of its own (pip install {name}) "
                "and name its bin folder with --peers",
                file=sys.stderr,
            )
        else:
            found[name] = Path(path)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="folder of the other routers' executables; default: PATH")
    parser.add_argument(
        "--earlier", type=Path, help="a checkout of an earlier commit, whose router is measured as well"
    )
    parser.add_argument("--only", default="", help="names of arrangements to run, with commas; default: all")
    parser.add_argument("--routers", default="1,2", help="numbers of router processes; default: 1,2")
    parser.add_argument("--scale", type=float, default=1.0, help="of the amount of work; default: 1")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    return parser.parse_args()


def main() -> None:
    options = parse()
    report: dict[str, Any] = {"machine": machine(), "scale": options.scale, "results": []}
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    base: dict[str, Any] = {"first_token_ms": {"p50": 0.0, "p99": 0.0}}
    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="twinfang-") as folder:
        for num_routers in map(int, options.routers.split(",")):
            for arrangement in arrangements(find_peers(options.peers), options.earlier):
                is_base = arrangement.command is None
                if (wanted and arrangement.name not in wanted) or (is_base and report["results"]):
                    continue
                with running(arrangement, num_routers, Path(folder)) as target:
                    figures = measure(target, options.scale)
                if is_base:
                    base = figures
                name = arrangement.name if is_base else f"{arrangement.name} × {num_routers}"
                print(row(name, figures, base), flush=True)
                about = {"name": arrangement.name, "note": arrangement.note, "routers": num_routers}
                report["results"].append(about | figures)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
