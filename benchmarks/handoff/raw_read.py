"""Handoffs of small and large states, compared with a raw NIXL read, and the idle load of both sides.

    python -m benchmarks.handoff.raw_read                        # the transport that UCX picks
    UCX_TLS=tcp python -m benchmarks.handoff.raw_read            # one whose target takes part in a READ
    python -m benchmarks.handoff.raw_read --json result.json
    twinfang bench transfer                              # prompts of several lengths, of a model's shape

:mod:`twinfang.bench.handoff` measures them. Medians are shown; `ratio` and `extra` are medians of each
round's ratio and difference. Only the half of the rounds in which this process waited least for a core
counts. Below that, the table shows what both processes take of a core while nothing moves.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from engine.memory.caches import CacheSpec
from engine.models import read_config
from twinfang.bench.case import Case, prompt_case
from twinfang.bench.handoff import End, measure, open_sink
from twinfang.bench.machine import machine
from twinfang.bench.prefill_side import Ask, Source, prefill_side
from twinfang.bench.row import HEADER
from twinfang.flags.table import BUNDLED_MODEL
from wire.messages.handoff import EndLease, Ticket

IDLE_S = 3.0
CONNECT_WINDOW_S = 6.0
"""After a handshake the source polls for a while, so that the peer can connect."""


def _spec(*, attn_layers: int, kv_heads: int, mamba_layers: int, mamba_heads: int) -> CacheSpec:
    return CacheSpec(
        attn_layers=attn_layers,
        kv_heads=kv_heads,
        head_dim=64,
        kv_dtype=torch.bfloat16,
        mamba_layers=mamba_layers,
        conv_channels=256,
        conv_width=4,
        mamba_heads=mamba_heads,
        mamba_head_dim=32,
        state_size=64,
        conv_dtype=torch.bfloat16,
        ssm_dtype=torch.float32,
    )


SMALL = _spec(attn_layers=1, kv_heads=2, mamba_layers=3, mamba_heads=4)
LARGE = _spec(attn_layers=6, kv_heads=2, mamba_layers=23, mamba_heads=32)


ONE_BLOCK = Case("one block of 8 KB, state of 100 KB", SMALL, 16, 1, scattered=False, rounds=400)


def _cases() -> list[Case]:
    """Returns prompts of the bundled model and of a larger one, contiguous and scattered over the pools."""
    bundled = read_config(BUNDLED_MODEL, "auto", "cpu").cache_spec()
    cases = [ONE_BLOCK]
    for name, spec in (("bundled", bundled), ("48 KB blocks, 6 MB state", LARGE)):
        for prompt_len, rounds in ((16, 400), (1024, 400), (4096, 400), (16384, 120)):
            case = prompt_case(spec, block_size=16, prompt_len=prompt_len, rounds=rounds)
            cases.append(replace(case, name=f"{name}: {case.name}"))
            if prompt_len >= 4096:
                cases.append(replace(cases[-1], name=f"{cases[-1].name}, scattered", scattered=True))
    return cases


def _main(json_path: Path | None) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    print(HEADER, flush=True)
    rows = measure(_cases(), lambda row: print(row, flush=True))
    with prefill_side() as ask:
        idle = _measure_idle(ask)
    for name, share in idle.items():
        print(f"{name:<50} {share:>8.2%} of a core")
    if json_path is not None:
        result = {
            "machine": facts,
            "handoffs": [row.figures() for row in rows],
            "idle_core_share": idle,
        }
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _measure_idle(ask: Ask) -> dict[str, float]:
    """Returns each process's share of a core with a connected peer and nothing to move."""
    case = ONE_BLOCK
    ask(Source.open, case)
    thread, _ = open_sink(case.caches(), End(), ask)
    ticket = ask(Source.grant, case.block_ids)
    shares = {"prefill side, one lease held and not read": ask(_cpu_share_there, IDLE_S)}
    ask(_end_lease, ticket)
    time.sleep(CONNECT_WINDOW_S)
    shares["prefill side, no lease"] = ask(_cpu_share_there, IDLE_S)
    shares["decode side, no read"] = _cpu_share(IDLE_S)
    thread.close()
    return shares


def _end_lease(source: Source, ticket: Ticket) -> None:
    assert source.lender is not None
    source.lender.end(EndLease(ticket.request_id, ticket.lease_id, ticket.epoch))


def _cpu_share_there(_source: Source, wall_s: float) -> float:
    return _cpu_share(wall_s)


def _cpu_share(wall_s: float) -> float:
    """Returns the share of a core that this process takes while it does nothing for ``wall_s``."""
    wall, cpu = time.perf_counter(), time.process_time()
    time.sleep(wall_s)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    _main(parser.parse_args().json)
