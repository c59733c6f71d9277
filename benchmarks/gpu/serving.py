"""Serves Nemotron-H 8B with `twinfang up` on one GPU, prefill and decode server beside each other, and
measures TTFT and TPOT over HTTP.

    python -m benchmarks.gpu.serving [--concurrency 1 8 64] [--seconds 130] [--json FILE]

Weights are random (``--load-format dummy``). Each kind of sampling is measured at each number of requests in
flight. ``limit_ms`` is the time for the bytes of one decode step of as many rows, at the rate of a copy.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stage import SKIPPED, UNFINISHED
from benchmarks.json_file import write_json
from benchmarks.steps.machine_rates import measured_bytes_per_s
from benchmarks.steps.measured_steps import SAMPLING
from benchmarks.steps.model_shape import TITLES, write_configuration
from benchmarks.steps.step_bytes import decode_bytes
from engine.cost.step_size import StepSize
from engine.models import read_config

NEEDED = ("nixl", "grpc", "grpc_health", "fastapi", "uvicorn", "orjson", "opentelemetry", "prometheus_client")
INPUT_LEN, OUTPUT_LEN = 512, 128
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 500
MAX_MODEL_LEN = 2048
KINDS = ("greedy", "temperature", "top-p")
CACHE_GIB = {"cuda": 14.0, "cpu": 0.25}
"""Of each server: 64 rows' states are 6.5 GiB. Both servers and both copies of the weights fit 80 GB."""
STOP_TIMEOUT_S = 30.0


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with a word for every token id, so that every token is an event with text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab_size = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    words = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


def limit_ms(directory: Path, device: torch.device, num_rows: int, bytes_per_s: float) -> float:
    """Returns the time for the bytes of one decode step in the middle of the answers."""
    size = StepSize.of(read_config(directory, device=device.type))
    moved = decode_bytes(size, num_rows, num_rows * (INPUT_LEN + OUTPUT_LEN // 2))
    return 1e3 * moved.total / bytes_per_s


def measure(options: argparse.Namespace, directory: Path, folder: Path) -> dict[str, Any]:
    """Starts the stack, measures and stops it. Returns the figures, and writes them as they come."""
    from benchmarks.serving.closed_load import summary
    from benchmarks.serving.load import Workload, run_load
    from twinfang.launch import launch

    until_s = time.monotonic() + options.seconds
    device = torch.device(options.device)
    bytes_per_s = measured_bytes_per_s(device)
    figures: dict[str, Any] = {"bytes_per_s": bytes_per_s, "input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
    figures["rows"] = []
    flags = {
        "--model": directory,
        "--load-format": "dummy",
        "--device": options.device,
        "--cache-memory": CACHE_GIB[options.device],
        "--cache-mode": "none",
        "--max-num-seqs": max(options.concurrency),
        "--log-level": "warning",
    }
    began = time.monotonic()
    stack = launch(folder, "up", *(str(one) for pair in flags.items() for one in pair))
    try:
        stack.wait_until_ready(options.seconds)
        figures["ready_s"] = time.monotonic() - began
        for number, (kind, concurrency) in enumerate(itertools.product(KINDS, options.concurrency)):
            if time.monotonic() > until_s:
                break
            load = Workload(
                INPUT_LEN,
                OUTPUT_LEN,
                FIRST_TOKEN_ID,
                LAST_TOKEN_ID,
                seed=number,
                **SAMPLING[kind],
            )
            count = max(options.least_requests, 2 * concurrency)
            run = asyncio.run(
                run_load(stack.url, stack.model, load, concurrency=concurrency, num_requests=count)
            )
            limit = limit_ms(directory, device, concurrency, bytes_per_s)
            figures["rows"].append({"sampling": kind, **summary(run), "limit_ms": limit})
            print(figures["rows"][-1], flush=True)
            if options.json is not None:
                write_json(options.json, figures)
    except BaseException:
        print(stack.log_tail, flush=True)
        raise
    finally:
        if stack.supervisor.poll() is None:
            stack.stop(STOP_TIMEOUT_S)
    return figures


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--device", choices=list(CACHE_GIB), default="cuda")
    parser.add_argument("--model", choices=list(TITLES), default="8b")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--least-requests", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="no measurement is begun after this")
    parser.add_argument("--json", type=Path, help="figures, written anew as they come")
    return parser


def main() -> None:
    options = parser().parse_args()
    logging.basicConfig(level=logging.WARNING)
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser().exit(
            SKIPPED, f"no servers: {', '.join(absent)} not installed (benchmarks/gpu/requirements.txt)\n"
        )
    with tempfile.TemporaryDirectory(prefix="twinfang-gpu-serving-") as folder:
        directory = write_configuration(options.model, Path(folder), max_model_len=MAX_MODEL_LEN)
        write_tokenizer(directory)
        figures = measure(options, directory, Path(folder))
    num_wanted = len(KINDS) * len(options.concurrency)
    if len(figures["rows"]) < num_wanted:
        parser().exit(UNFINISHED, f"{len(figures['rows'])} of {num_wanted} measurements\n")


if __name__ == "__main__":
    main()
