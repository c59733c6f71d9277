"""Compares decode and prefill steps of the real engine with the machine's limits of bytes and FLOP per
second.

    python -m benchmarks.steps.limit [--models 8b] [--batches 1 8 64] [--drafts 0 3] [--contexts 1024 8192]
                                    [--sampling greedy] [--prompts 8192] [--chunks 2048 8192] [--json FILE]
                                    [--weight-dtype bfloat16] [--speculative-state replay] [--publish]
    python -m benchmarks.steps.limit --from FILE --publish        # the table once more

It needs no checkpoint: models have random weights (``--load-format dummy``). ``--publish`` writes
``results/step-gpu.json``, on a CPU ``step-cpu.json``, and the table in docs/performance.md.

| figure | is |
|---|---|
| limit | the step's bytes (:mod:`engine.cost.step_size`) over the bytes a second that a copy reaches here |
| device | a decode step's captured graph on the GPU, from event to event |
| step | one of many calls of ``Engine.step``: schedule, upload, launch, read back, unless hidden |
| prompt | one alone, to its first token; its limit is its FLOP over the rate of a large product |

Greedy rows are measured at every context, other ``--sampling`` only at the shortest: its cost does not depend
on the context. On a CPU a step is no graph, and a single thread is timed in CPU time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.json_file import write_json
from benchmarks.steps.limit_report import publish, table
from benchmarks.steps.measured_steps import SAMPLING, MeasuredSteps
from benchmarks.steps.model_shape import TITLES, write_configuration
from engine.checkpoint.weight_dtype import WeightDtype
from engine.config import EngineConfig
from engine.cost.speculative_state import SpeculativeState
from twinfang.bench.machine import machine

ON_GPU = {"models": ["8b"], "contexts": [1024, 8192], "prompts": [8192], "chunks": [2048, 8192]}
ON_CPU = {"models": ["120m", "2m"], "contexts": [256, 1024], "prompts": [1024], "chunks": [256, 2048]}
CPU_CACHE_BYTES = 3 << 30
ANSWER_ROOM = 4096
"""More than the tokens that the first rows decode until the last prompt of a batch has run."""


def measure(name: str, directory: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures decode steps in the engines of the largest chunk, and prompts in one engine for each chunk
    size. Reports all figures so far after each, so that an interrupted run has shown something."""
    found: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": [], "start_up": []}
    for k, chunk in _engines(options):
        steps = MeasuredSteps(TITLES[name], _config(directory, options, k, chunk))
        found["start_up"].append({"num_drafts": k, "chunk": chunk, **steps.engine.start_up.figures()})
        if chunk == max(options.chunks):
            for sampling, context, batch in _loads(options):
                found["decode"].append(asdict(steps.decode(batch, context, sampling)))
                print(_seen(found["decode"][-1]), flush=True)
                yield found
        if k == 0:
            for num_tokens in options.prompts:
                found["prefill"].append(asdict(steps.prefill(num_tokens)))
                print(_seen(found["prefill"][-1]), flush=True)
                yield found
        del steps  # its memory is the next one's
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _loads(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Yields kind of sampling, context and batch of the decode steps, those that take long to set up last."""
    shortest, *longer = sorted(options.contexts)
    yield from itertools.product(options.sampling, [shortest], options.batches)
    yield from itertools.product(["greedy"], longer, options.batches)


def _engines(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yields drafts and largest chunk of each engine."""
    for k in options.drafts:
        yield k, max(options.chunks)
    for chunk in options.chunks:
        if chunk != max(options.chunks) or 0 not in options.drafts:
            yield 0, chunk


def _config(directory: Path, options: argparse.Namespace, k: int, chunk: int) -> EngineConfig:
    return EngineConfig(
        directory,
        "both",
        load_format="dummy",
        weight_dtype=options.weight_dtype,
        device=options.device,
        max_num_seqs=max(options.batches),
        max_batch_tokens=chunk,
        cache_mode="none",
        cache_memory_bytes=_cache_bytes(options),
        num_speculative=k,
        drafter="ngram" if k else None,
        speculative_state=options.speculative_state if k else "auto",
        num_threads=options.threads,
        stream_interval_s=0.0,
    )


def _cache_bytes(options: argparse.Namespace) -> int | None:
    if options.cache_memory is not None:
        return int(options.cache_memory * (1 << 30))
    return None if options.device == "cuda" else CPU_CACHE_BYTES


def _seen(row: dict[str, Any]) -> str:
    """Returns a line to print during the run."""
    return " ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if name not in ("kernels", "bytes")
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--models", nargs="+", choices=list(TITLES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--speculative-state", choices=get_args(SpeculativeState), default="auto")
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=["greedy"])
    parser.add_argument("--contexts", nargs="+", type=int)
    parser.add_argument("--prompts", nargs="*", type=int)
    parser.add_argument("--chunks", nargs="+", type=int)
    parser.add_argument(
        "--cache-memory", type=float, metavar="GIB", help="default: like a server's; 3 on a CPU"
    )
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--weight-dtype", choices=get_args(WeightDtype), default="auto", help="on a CPU")
    parser.add_argument("--json", type=Path, help="machine and figures, written anew after each")
    parser.add_argument("--from", type=Path, dest="source", help="shows the figures of a --json")
    parser.add_argument("--publish", action="store_true", help="into results/ and docs/performance.md")
    return parser


def _options() -> argparse.Namespace:
    options = parser().parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (ON_GPU if options.device == "cuda" else ON_CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options = _options()
    if options.source is not None:
        report = json.loads(options.source.read_text(encoding="utf-8"))
    else:
        torch.set_num_threads(options.threads)
        report = {"machine": machine(), "device": options.device, "threads": options.threads, "models": {}}
        report["weight_dtype"] = options.weight_dtype
        max_model_len = max([*options.contexts, *options.prompts]) + ANSWER_ROOM
        with tempfile.TemporaryDirectory(prefix="twinfang-step-limit-") as folder:
            for name in options.models:
                directory = write_configuration(name, Path(folder), max_model_len=max_model_len)
                for found in measure(name, directory, options):
                    report["models"][name] = found
                    if options.json is not None:
                        write_json(options.json, report)
    print(table(report))
    if options.publish:
        publish(report)


if __name__ == "__main__":
    main()
