"""Hands 1,000 prompts from one process to another on the same GPU, while the reading process decodes.

    python -m benchmarks.gpu.handoffs [--handoffs 1000] [--seconds 150] [--json FILE]

One process prefills and lends, the other reads with NIXL and decodes; both have Nemotron-H 8B's shape with
random weights, and pools in the GPU's memory. Every ticket carries digests of its blocks and its state, which
are compared with what has arrived. Requests in flight decode all the time, so reads share the GPU with steps.
At the end the reading engine answers some prompts again, prefilled by itself.

| figure | is |
|---|---|
| reads | which transport carries which kind of read, from UCX's log |
| transfer_ms | from the order to read until the validated end of a transfer |
| wrong | transfers whose bytes differ from their digests |
| different | answers that differ from those of the same engine alone; in bfloat16 ties may fall otherwise |
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.stage import SKIPPED, UNFINISHED
from benchmarks.json_file import write_json
from benchmarks.steps.model_shape import TITLES, write_configuration
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from wire.messages.handoff import Role

NEEDED = ("nixl", "grpc")
if all(importlib.util.find_spec(name) for name in NEEDED):
    from benchmarks.gpu.handoff_reader import PARAMS, HandoffReader
    from benchmarks.gpu.prefill_process import PrefillProcess

PROMPT_TOKENS = (16, 512)
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 5, 500
ROWS = 32
PREFILL_ROWS = 8
CACHE_BYTES = 8 << 30
CPU_CACHE_BYTES = 256 << 20
MAX_MODEL_LEN = 1024
COMPARED = 32
REPORT_EVERY = 50
READ = re.compile(r"remote memory read by [^|]*?\s(into .*?)\s*\|")
ROW = re.compile(r"\|\s*(\S+\.\.\S+)\s*\|\s*(.*?)\s*\|\s*(.*?)\s*\|")
MAX_READS = 12


def config_of(directory: Path, role: Role, options: argparse.Namespace) -> EngineConfig:
    """Returns an engine's configuration. The prefill engine sanitizes: its tickets have digests."""
    return EngineConfig(
        directory,
        role,
        load_format="dummy",
        device=options.device,
        batch_invariant=options.batch_invariant,
        max_num_seqs=PREFILL_ROWS if role == "prefill" else ROWS,
        cache_mode="none",
        cache_memory_bytes=CACHE_BYTES if options.device == "cuda" else CPU_CACHE_BYTES,
        sanitize=role == "prefill",
    )


def prompts(count: int) -> list[list[int]]:
    choose = random.Random(0)
    return [
        [choose.randrange(NUM_TOKEN_IDS) + FIRST_TOKEN_ID for _ in range(choose.randint(*PROMPT_TOKENS))]
        for _ in range(count)
    ]


def hand_over(reader: HandoffReader, asked: list[list[int]], until_s: float) -> Iterator[int]:
    """Keeps twice as many requests under way as there are rows: all rows decode, and others are handed over.
    Yields the number of ended requests from time to time; after ``until_s`` no further one is begun."""
    num_asked = reported = 0
    while reader.num_ended < num_asked or (num_asked < len(asked) and time.monotonic() < until_s):
        while (
            num_asked < len(asked) and num_asked - reader.num_ended < 2 * ROWS and time.monotonic() < until_s
        ):
            reader.ask(f"handed-{num_asked}", asked[num_asked])
            num_asked += 1
        reader.turn()
        if reader.num_ended >= reported + REPORT_EVERY:
            reported = reader.num_ended
            yield reported


def answers_alone(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    """Returns the answers of an engine that prefills by itself, in batches as before."""
    found: dict[str, list[int]] = {}
    for i, prompt in enumerate(asked):
        engine.add(Request(f"alone-{i}", list(prompt), PARAMS))
    while not (result := engine.step()).did_nothing:
        for output in result.outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return [found.get(f"alone-{i}", []) for i in range(len(asked))]


def read_methods(log: str) -> dict[str, list[str]]:
    """Returns the method of each kind of read from a peer (``into cuda memory from cuda/GPU0``), by size."""
    found: dict[str, list[str]] = {}
    rows: list[str] | None = None
    before = ""
    for line in log.splitlines():
        if kind := READ.search(line):
            rows = [] if " self cfg#" in before else found.setdefault(kind.group(1), [])
            rows.clear()
        elif "cfg#" in line or ("+-" in line and rows):  # the next table, or this one's end
            rows = None
        elif rows is not None and (row := ROW.search(line)):
            rows.append(", ".join(row.groups()))
        before = line
    return dict(list(found.items())[:MAX_READS])


@contextlib.contextmanager
def ucx_log() -> Iterator[Path]:
    """Has UCX, which has to be not loaded yet, log its choices to a file."""
    with tempfile.TemporaryDirectory(prefix="twinfang-ucx-") as folder:
        path = Path(folder) / "ucx-%p.log"
        os.environ |= {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(path)}
        yield path.with_name(f"ucx-{os.getpid()}.log")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", choices=list(TITLES), default="8b")
    parser.add_argument("--handoffs", type=int, default=1000)
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="no row's bits depend on the batch: `different` is a fault",
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="in all; fewer handoffs if they are over"
    )
    parser.add_argument("--json", type=Path, help="figures, written anew as they come")
    return parser


def main() -> None:
    options = parser().parse_args()
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser().exit(
            SKIPPED, f"no handoffs: {' and '.join(absent)} not installed (benchmarks/gpu/requirements.txt)\n"
        )
    until_s = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="twinfang-handoffs-") as folder, ucx_log() as log:
        directory = write_configuration(options.model, Path(folder), max_model_len=MAX_MODEL_LEN)
        there = PrefillProcess(config_of(directory, "prefill", options))
        try:
            reader = HandoffReader(config_of(directory, "decode", options), there)
            figures = measure(reader, options, until_s, log)
            reader.close()
        finally:
            there.close()
    print({name: value for name, value in figures.items() if name != "reads"})
    print("\n".join(f"{kind}: {'; '.join(rows)}" for kind, rows in figures["reads"].items()))
    if figures["num_wrong"] or figures["num_failed"]:
        raise SystemExit(
            f"{figures['num_wrong']} transfers were wrong, {figures['num_failed']} requests failed"
        )
    if options.batch_invariant and figures["different"]:
        raise SystemExit(f"{figures['different']} answers differ from those of one engine")
    if figures["handoffs"] < options.handoffs:
        parser().exit(
            UNFINISHED, f"{figures['handoffs']} of {options.handoffs} handoffs in {options.seconds:.0f} s\n"
        )


def measure(reader: HandoffReader, options: argparse.Namespace, until_s: float, log: Path) -> dict[str, Any]:
    """Returns the figures, and writes them as they come."""
    asked, began_s = prompts(options.handoffs), time.monotonic()
    figures: dict[str, Any] = {}

    def report(more: dict[str, Any]) -> None:
        nonlocal figures
        ctypes.CDLL(None).fflush(None)  # UCX buffers its log
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        figures = {**figures, "reads": read_methods(text), **more}
        if options.json is not None:
            write_json(options.json, figures)

    for _ in hand_over(reader, asked, until_s):
        report(reader.figures(began_s))
    report(reader.figures(began_s))
    compared = [i for i in range(min(COMPARED, len(asked))) if f"handed-{i}" in reader.answers]
    alone = answers_alone(reader.engine, [asked[i] for i in compared])
    num_different = sum(reader.answers[f"handed-{i}"] != one for i, one in zip(compared, alone, strict=True))
    report({"compared": len(compared), "different": num_different})
    return figures


if __name__ == "__main__":
    main()
