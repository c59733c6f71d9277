"""``twinfang bench transfer``: prompts of several lengths, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.models import read_config
from twinfang.bench.case import prompt_case
from twinfang.bench.handoff import measure
from twinfang.bench.machine import machine
from twinfang.bench.row import HEADER, Row

PROMPT_LENS = (16, 256, 1024, 4096, 16384)


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Returns the function that ``twinfang bench`` runs."""
    return partial(
        run,
        values.model,
        values.dtype,
        block_size=values.block_size,
        prompt_lens=values.prompt_len or PROMPT_LENS,
        rounds=values.rounds,
        as_json=bool(values.json),
    )


def run(
    model_dir: Path, dtype: str, *, block_size: int, prompt_lens: tuple[int, ...], rounds: int, as_json: bool
) -> None:
    """Prints a row for each prompt length as soon as it is measured, or JSON at the end. Times are in
    microseconds."""
    torch.set_num_threads(1)
    spec = read_config(model_dir, dtype, "cpu").cache_spec()
    cases = [
        prompt_case(spec, block_size=block_size, prompt_len=length, rounds=rounds) for length in prompt_lens
    ]
    facts = {
        **machine(),
        "model": model_dir.name,
        "block_bytes": spec.kv_layout(1, block_size).unit_bytes,
        "state_bytes": spec.slot_bytes,
        "UCX_TLS": os.environ.get("UCX_TLS"),
    }
    if as_json:
        rows = measure(cases)
        figures = [{"prompt_len": n, **row.figures()} for n, row in zip(prompt_lens, rows, strict=True)]
        print(json.dumps({"machine": facts, "handoffs": figures}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    print(HEADER, flush=True)
    measure(cases, _print_row)


def _print_row(row: Row) -> None:
    print(row, flush=True)
