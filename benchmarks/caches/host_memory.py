"""Conversations of more clients than the device has room for: with host memory, and without.

    python -m benchmarks.caches.host_memory --json benchmarks/results/host_memory.json

32 sessions take 12 turns each, in a new random order each turn. A turn's prompt is the last one, an answer
and some new tokens. The device has room for four sessions at their full length. Measured is the engine's time
from a prompt to the first token, without HTTP. Engines take turns prompt by prompt, so that all of them see
the same machine. All give the same first tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.json_file import write_json
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import read_config
from engine.request import Request
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL
from wire.messages.sampling_params import SamplingParams

NUM_SESSIONS, NUM_TURNS = 32, 12
FIRST_PROMPT, TURN_TOKENS = 400, 160
ROOM_FOR_SESSIONS = 4
STATES_EACH = 3
MOST_TOKENS = FIRST_PROMPT + NUM_TURNS * TURN_TOKENS
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900


def make_engine(model_dir: Path, num_sessions: int, **settings: object) -> Engine:
    """Make an engine whose device has room for so many sessions at their full length."""
    config = EngineConfig(
        model_dir,
        "both",
        device="cpu",
        max_num_seqs=num_sessions,
        max_model_len=MOST_TOKENS + 1,
        cached_states=STATES_EACH * num_sessions,
        num_threads=1,
        **settings,  # type: ignore[arg-type]
    )
    demand = config.demand(read_config(model_dir))
    most_bytes = demand.slots_bytes + demand.max_blocks * demand.block_bytes
    return Engine(replace(config, cache_memory_bytes=most_bytes))


def first_token(engine: Engine, prompt: list[int], name: str) -> tuple[float, float, int, Request]:
    """Return milliseconds until the first token, those of them in which the process computed, the token, and
    the request."""
    request = Request(name, list(prompt), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    start, start_cpu = time.perf_counter(), time.process_time()
    engine.add(request)
    while not (outputs := list(engine.step().outputs)):
        pass
    spent_ms, cpu_ms = (time.perf_counter() - start) * 1000, (time.process_time() - start_cpu) * 1000
    while not engine.step().did_nothing:
        pass
    assert outputs[0].error is None, outputs[0].error
    return spent_ms, cpu_ms, outputs[0].token_ids[0], request


def measure(engines: dict[str, Engine], seed: int) -> list[dict[str, object]]:
    """Return a row for each turn: its prompts' length, and median time and cached tokens of each engine."""
    choose = random.Random(seed)

    def new_tokens(count: int) -> list[int]:
        return [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]

    sessions = [new_tokens(FIRST_PROMPT) for _ in range(NUM_SESSIONS)]
    rows: list[dict[str, object]] = []
    for turn in range(NUM_TURNS):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        cached: dict[str, int] = dict.fromkeys(engines, 0)
        order = list(range(NUM_SESSIONS))
        choose.shuffle(order)
        for index in order:
            tokens = set()
            turns = list(engines.items())
            choose.shuffle(turns)
            for name, engine in turns:
                spent_ms, cpu_ms, token, request = first_token(engine, sessions[index], f"{turn}-{index}")
                times[name].append((spent_ms, cpu_ms))
                cached[name] += request.measured.num_cached
                tokens.add(token)
            assert len(tokens) == 1, "the engines say different things"
            sessions[index] += new_tokens(TURN_TOKENS)
        row: dict[str, object] = {"turn": turn + 1, "prompt_tokens": FIRST_PROMPT + turn * TURN_TOKENS}
        for name in engines:
            row[name] = {
                "ttft_ms": statistics.median(spent_ms for spent_ms, _ in times[name]),
                "cpu_ms": statistics.median(cpu_ms for _, cpu_ms in times[name]),
                "cached_tokens": cached[name] / NUM_SESSIONS,
            }
        rows.append(row)
        shown = "  ".join(f"{name} {row[name]['cpu_ms']:6.1f} ms" for name in engines)  # type: ignore[index]
        print(f"turn {turn + 1:2}  {row['prompt_tokens']:5} tokens  {shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--host-cache-bytes", type=int, default=2 << 30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    engines = {
        "no cache": make_engine(options.model, ROOM_FOR_SESSIONS, cache_mode="none"),
        "device": make_engine(options.model, ROOM_FOR_SESSIONS),
        "device and host": make_engine(
            options.model, ROOM_FOR_SESSIONS, host_cache_bytes=options.host_cache_bytes
        ),
        "device for all": make_engine(options.model, NUM_SESSIONS),
    }
    rows = measure(engines, options.seed)
    figures = engines["device and host"].measures.host_cache
    print(figures)
    if options.json:
        write_json(options.json, {"machine": machine(), "turns": rows, "host_memory": vars(figures)})


if __name__ == "__main__":
    main()
