"""A decode step's host cost besides the model's run: CPU time by phase and thread.

    python -m benchmarks.steps.host_time                       # a look
    python -m benchmarks.steps.host_time --as after --publish  # into results/ and docs/performance.md

A decode server of both roles serves a model of the smallest size to one client process, which has 1 to 256
answers on its stream. For each step of that many decode rows, the benchmark measures CPU time of the engine's
thread by phase, of the event loop's thread, and of all other threads, which are gRPC's. What the model's run
still costs is measured too, and left out of the sums. Then it measures the router: its process's CPU time per
step of as many streams, with a stub worker (``router.py``). It uses CPU time, because other processes change
wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.router.alone import PROMPT, USAGE, Arrangement, running, twinfang
from benchmarks.router.stream_load import Shape
from benchmarks.steps.phase_clock import PhaseClock
from decode_server.config import DecodeConfig
from decode_server.service import DecodeService
from engine.config import EngineConfig
from engine.step.launched_step import LaunchedStep
from engine.step_result import StepResult
from telemetry.start_up import StartUp
from testing.checkpoints.random_checkpoint import CheckpointShape
from testing.checkpoints.random_model import BenchmarkModel, checkpoint
from testing.marked_section import replace_between
from testing.repository import DOCS, RESULTS
from twinfang.bench.machine import machine
from wire.server import GrpcServer

FIGURES = RESULTS / "host_time.json"
PAGE = DOCS / "performance.md"
MARKS = ("<!-- host time: begin, written by benchmarks.steps.host_time -->", "<!-- host time: end -->")
BATCH_SIZES = (1, 32, 128, 256)
DRAFTS = (0, 3)
WARM_UP_STEPS, STEPS = 20, 150
SPARE_STEPS = 800
"""Steps in which the first answers may run alone, while the client submits the others."""
MODEL = BenchmarkModel(
    name="nemotron-h-null",
    title="nearly nothing",
    shape=CheckpointShape(
        pattern="M*",
        vocab_size=512,
        hidden_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=16,
        mamba_num_heads=2,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=128,
        max_position_embeddings=4096,
    ),
)
"""A hybrid with one recurrent layer and one attention layer: its requests have blocks and states."""
STREAM_STEP_S, STREAM_S = 0.02, 4.0
START_TIMEOUT_S = 600.0

PHASES = {
    "schedule": "`Scheduler.schedule`",
    "launch": "launch: step buffers, batch",
    "read": "read the results",
    "land": "land: tokens, scheduler, measures, outputs",
    "step": "rest of `Engine.step`",
    "hand over": "hand over to the event loop",
    "event loop": "event loop: sort, encode, write",
    "grpc": "gRPC's threads",
}
"""The phases that count as host time, in the table's order."""
PROGRAM = "program"


# --- the decode server ----------------------------------------------------------------------------


class Window:
    """``STEPS`` steps that brought tokens for each of ``num_rows`` rows, after as many to warm up."""

    def __init__(self, clock: PhaseClock, num_rows: int) -> None:
        self._clock = clock
        self._num_rows = num_rows
        self._num_seen = 0
        self._begin: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self.is_over = asyncio.Event()
        self.us_per_step: dict[str, float] = {}
        self.tokens_per_step = 0.0

    def stepped(self, result: StepResult) -> None:
        """Records a step. Called on the engine's thread, before the result is passed on."""
        if self.us_per_step or len(result.outputs) != self._num_rows:
            return
        self._num_seen += 1
        if self._num_seen == WARM_UP_STEPS:
            self._begin = self._spent_ns()
        if self._num_seen > WARM_UP_STEPS:
            self.tokens_per_step += sum(map(len, result.outputs.token_ids.values())) / STEPS
        if self._num_seen == WARM_UP_STEPS + STEPS:
            spent = self._spent_ns()
            self.us_per_step = {name: (spent[name] - self._begin[name]) / STEPS / 1e3 for name in spent}
            self._loop.call_soon_threadsafe(self.is_over.set)

    def _spent_ns(self) -> Counter[str]:
        spent = self._clock.spent_ns.copy()
        engine = _thread_ns(threading.get_native_id())
        spent["event loop"] = _thread_ns(threading.main_thread().native_id)
        spent["grpc"] = sum(map(_thread_ns, _thread_ids())) - engine - spent["event loop"]
        return spent


def _thread_ids() -> list[int]:
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


def _thread_ns(thread_id: int | None) -> int:
    """Returns the CPU time of one of this process's threads so far; 0 if it has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/self/task/{thread_id}/schedstat").read_text(encoding="ascii").split()[0])
    return 0


class MeasuredServer:
    """A decode server in this process whose engine's phases are timed."""

    def __init__(self, model_dir: Path, num_drafts: int) -> None:
        engine = EngineConfig(
            model_dir,
            "both",
            max_num_seqs=max(BATCH_SIZES),
            num_speculative=num_drafts,
            cache_memory_bytes=1 << 28,
            num_threads=1,
            stream_interval_s=0.0,  # otherwise several steps share a plan and a message
        )
        self._num_drafts = num_drafts
        self._server = GrpcServer("127.0.0.1", 0)
        config = DecodeConfig(engine, "127.0.0.1", self._server.port, "host-time")
        self._service = DecodeService(config, self._server, incarnation="host-time", start_up=StartUp())
        self._clock = PhaseClock("hand over")
        self._window = Window(self._clock, 0)
        self._time()

    def _time(self) -> None:
        host: Any = self._service._host
        engine, wrap = host.engine, self._clock.wrap
        wrap(engine, "step", "step")
        wrap(engine, "_land_all", "land")
        wrap(engine.scheduler, "schedule", "schedule")
        wrap(LaunchedStep, "read", "read")
        wrap(engine._runner, "launch", "launch")
        wrap(engine._runner._program, "run", PROGRAM)
        if engine._runner._recorded is not None:
            wrap(engine._runner._recorded, "replay", PROGRAM)
        wrap(engine._runner._buffers, "_prepare_rows", PROGRAM)
        on_step = host._loop._on_step

        def observed(result: StepResult) -> None:
            self._window.stepped(result)
            on_step(result)

        host._loop._on_step = observed

    async def measure(self, num_rows: int) -> Window:
        """Measures one window of steps; a separate process sends the requests."""
        self._window = Window(self._clock, num_rows)
        num_tokens = (WARM_UP_STEPS + STEPS + SPARE_STEPS) * (1 + self._num_drafts)
        of_client = map(str, (self._server.port, num_rows, num_tokens))
        command = (sys.executable, "-m", "benchmarks.router.decode_client", *of_client)
        client = await asyncio.create_subprocess_exec(*command)
        try:
            waits = [asyncio.ensure_future(one) for one in (self._window.is_over.wait(), client.wait())]
            await asyncio.wait(waits, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
        if not self._window.us_per_step:
            raise SystemExit(f"{num_rows} rows were not decoded together for {WARM_UP_STEPS + STEPS} steps")
        return self._window

    async def __aenter__(self) -> MeasuredServer:
        self._service.start()
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._clock.unwrap()
        await self._service.close()
        self._server.health.close()
        await self._server._server.stop(0)


async def measure_server(
    model_dir: Path, num_drafts: int, rounds: int, batch_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    found = []
    async with MeasuredServer(model_dir, num_drafts) as server:
        await server.measure(batch_sizes[0])
        for num_rows in batch_sizes:
            windows = [await server.measure(num_rows) for _ in range(rounds)]
            names = (*PHASES, PROGRAM)
            phases = {
                name: statistics.median(window.us_per_step.get(name, 0.0) for window in windows)
                for name in names
            }
            print(f"{num_rows} rows, k = {num_drafts}:", phases, flush=True)
            found.append(
                {
                    "rows": num_rows,
                    "drafts": num_drafts,
                    "tokens_per_step": round(windows[0].tokens_per_step, 1),
                    "us": {name: round(us, 1) for name, us in phases.items()},
                }
            )
    return found


# --- the router -----------------------------------------------------------------------------------


def measure_router() -> dict[str, float]:
    """Returns µs of CPU time per step, by number of streams, one token each."""
    one_worker = Arrangement(
        "twinfang", "", (("grpc", "both"),), partial(twinfang, ("decode",)), shares_port=True, fields=USAGE
    )
    found = {}
    with tempfile.TemporaryDirectory() as logs, running(one_worker, 1, Path(logs)) as target:
        for streams in BATCH_SIZES:
            shape = Shape(PROMPT, round(STREAM_S / STREAM_STEP_S), STREAM_STEP_S)
            result, cores = target.run(shape, concurrency=streams, num_requests=streams, warm_up=streams)
            found[str(streams)] = round(cores["steady_cpu_s"] / result.steady_events * streams * 1e6, 1)
    return found


# --- report ---------------------------------------------------------------------------------------


def host_us(row: dict[str, Any]) -> float:
    """Returns the decode server's host time per step."""
    return sum(row["us"][name] for name in PHASES)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Returns a table of µs per step, a column for each batch size and k; before and after in one cell."""
    columns = [(row["rows"], row["drafts"]) for row in next(iter(runs.values()))["steps"]]
    heads = [f"{rows} rows, k = {drafts}" for rows, drafts in columns]
    lines = ["| µs a step | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]

    def line(name: str, of: Any) -> str:
        cells = [
            " → ".join(of(run, i) for run in (runs[one] for one in ("before", "after") if one in runs))
            for i in range(len(columns))
        ]
        return f"| {name} | " + " | ".join(cells) + " |"

    for phase, title in PHASES.items():
        lines.append(line(title, lambda run, i, phase=phase: f"{run['steps'][i]['us'][phase]:.0f}"))
    lines.append(line("**decode server**", lambda run, i: f"**{host_us(run['steps'][i]):.0f}**"))
    lines.append(line("… a row", lambda run, i: f"{host_us(run['steps'][i]) / run['steps'][i]['rows']:.1f}"))
    if all(run["router"] for run in runs.values()):

        def of_router(run: dict[str, Any], i: int) -> str:
            rows, drafts = columns[i]
            return "" if drafts else f"{run['router'][str(rows)]:.0f}"

        lines.append(line("router", of_router))
    lines.append(line("(the model's run)", lambda run, i: f"{run['steps'][i]['us'][PROGRAM]:.0f}"))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="windows of steps for each figure; default: 3")
    parser.add_argument("--rows", type=int, nargs="+", default=BATCH_SIZES, help="batch sizes; default: all")
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS, help="default: 0 and 3")
    parser.add_argument("--as", dest="label", choices=("before", "after"), help="keep the figures as these")
    parser.add_argument("--publish", action="store_true", help="write the table into docs/performance.md")
    parser.add_argument("--no-router", action="store_true", help="leave the router out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = checkpoint(MODEL, Path(folder))
        steps = [
            row
            for drafts in options.drafts
            for row in asyncio.run(measure_server(model_dir, drafts, options.rounds, options.rows))
        ]
    run = {
        "machine": machine(),
        "commit": subprocess.check_output(("git", "rev-parse", "--short", "HEAD"), text=True).strip(),
        "date": time.strftime("%Y-%m-%d"),
        "steps": steps,
        "router": {} if options.no_router else measure_router(),
    }
    print(table({options.label or "after": run}))
    if options.label is None:
        return
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    kept[options.label] = run
    FIGURES.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    if options.publish:
        replace_between(PAGE, *MARKS, table(kept))


if __name__ == "__main__":
    main()
