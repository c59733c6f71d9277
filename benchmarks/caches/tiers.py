"""Conversations of 32 clients on a device with room for four: time to first token with host memory, with
files, without both, and with vLLM.

    python -m benchmarks.caches.tiers --vllm /path/to/venv --publish
    python -m benchmarks.caches.tiers --sessions 6 --turns 4 --models bundled       # a look

Each client has 12 turns. A prompt is all that was said before, and new tokens. Clients take turns in a new
random order each time, one request at a time, over HTTP. All contenders get the same prompts: the answers in
them are those of the first contender. After half of the turns our servers are killed (SIGKILL) and start
again. Started again with the same code and settings, a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.caches.tier_contenders import FAILURES, OURS, REFERENCE, Contender, Running, contenders
from benchmarks.caches.tier_load import NUM_SESSIONS, NUM_TURNS, Answers, Asked, TierLoad, hold, warm_up
from benchmarks.caches.tier_report import missing, publish, section
from benchmarks.gpu.source import commit, source_hash
from benchmarks.json_file import read_json, write_json
from benchmarks.side_by_side.contenders.vllm import Vllm
from benchmarks.side_by_side.cores import CoreTimes
from benchmarks.side_by_side.models import MODELS, last_token_id
from benchmarks.side_by_side.options import several
from benchmarks.side_by_side.progress import BusyError, only_run_in
from twinfang.bench.machine import machine

SIZES = {"bundled": (400, 120, 40), "120m": (128, 32, 8)}
"""Tokens of the first prompt, new ones of each turn, and of each answer, by model. A prompt of the large
model takes 1.2 ms of two cores a token."""


@dataclass
class Run:
    """What has been measured, and where it is kept."""

    file: Path
    visits: dict[str, dict[str, Any]]
    """By model and contender."""
    answers: dict[str, Answers]
    """Of the reference, by model."""
    failures: list[str]

    @classmethod
    def kept_in(cls, folder: Path, key: dict[str, Any]) -> Run:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
        file = folder / f"tiers-{digest}.json"
        content = read_json(file) or {}
        return cls(file, content.get("visits", {}), content.get("answers", {}), [])

    def write(self) -> None:
        write_json(self.file, {"visits": self.visits, "answers": self.answers})


def visit(
    contender: Contender, model: Path, load: TierLoad, folder: Path, reference: Answers
) -> dict[str, Any]:
    """Lets a contender hold all conversations. Raises one of ``FAILURES``."""
    began_s = time.monotonic()
    pace_s = contender.pace_s(model, load)
    half = load.num_turns // 2
    cores: list[dict[str, float]] = []
    asked: list[Asked] = []
    with contender.running(model, load, folder) as server:
        asyncio.run(warm_up(server.url, model.name, load))
        for turns in (range(half), range(half, load.num_turns)):
            if turns.start:
                server.restart()
            asked += _measured(server, model, load, turns, reference, pace_s, cores)
        tiers, uses, refusals = server.figures(), server.uses, server.refusals
    return {
        "title": contender.title,
        "command": contender.command(model, load),
        "uses": uses,
        "refusals": refusals,
        "pace_s": round(pace_s, 3),
        "seconds": round(time.monotonic() - began_s, 1),
        "answers_equal": sum(one.answer == reference[one.session][one.turn] for one in asked),
        "answers": len(asked),
        "cores": cores,
        "tiers": tiers,
        "turns": [_row(turn, load, asked) for turn in range(load.num_turns)],
    }


def _measured(
    server: Running,
    model: Path,
    load: TierLoad,
    turns: range,
    reference: Answers,
    pace_s: float,
    cores: list[dict[str, float]],
) -> list[Asked]:
    before, began_s = CoreTimes.now(server.pids), time.monotonic()
    asked = asyncio.run(hold(server.url, model.name, load, turns, reference, pace_s=pace_s))
    num_tokens = sum(len(one.answer) for one in asked)
    cores.append(before.figures(CoreTimes.now(server.pids), time.monotonic() - began_s, num_tokens))
    return asked


def _row(turn: int, load: TierLoad, asked: Iterable[Asked]) -> dict[str, Any]:
    own = [one for one in asked if one.turn == turn]
    times = sorted(one.ttft_ms for one in own)
    return {
        "turn": turn + 1,
        "prompt_tokens": load.prompt_tokens(turn),
        "cached_tokens": round(statistics.mean(one.cached_tokens for one in own), 1),
        "ttft_ms": round(statistics.median(times), 2),
        "ttft_ms_p90": round(times[int(0.9 * (len(times) - 1))], 2),
    }


def measure(options: argparse.Namespace, run: Run, everybody: dict[str, Contender]) -> None:
    for name in options.models:
        model = MODELS[name].directory(options.folder)
        load = replace(
            TierLoad(*SIZES[name], last_token_id(model)),
            num_sessions=options.sessions,
            num_turns=options.turns,
        )
        reference = run.answers.setdefault(name, [[] for _ in range(load.num_sessions)])
        visits = run.visits.setdefault(name, {})
        for contender, one in everybody.items():
            if contender in visits:
                continue
            print(f"{MODELS[name].title}, {one.title}", flush=True)
            if contender == REFERENCE:
                reference[:] = [[] for _ in range(load.num_sessions)]
            try:
                visits[contender] = visit(one, model, load, options.folder, reference)
            except FAILURES as error:
                message = "; ".join(map(str, getattr(error, "exceptions", [error])))
                print(f"  failed: {message}", file=sys.stderr, flush=True)
                run.failures.append(f"{name}, {contender}: {message}")
                if contender == REFERENCE:
                    break
                continue
            _tell(visits[contender])
            run.write()
        run.failures += _differing(name, visits)


def _differing(model: str, visits: dict[str, dict[str, Any]]) -> list[str]:
    """Returns those of our contenders that did not give the reference's answers."""
    return [
        f"{model}, {name}: {one['answers_equal']} of {one['answers']} answers are those of {REFERENCE}"
        for name, one in visits.items()
        if name in OURS and one["answers_equal"] != one["answers"]
    ]


def _tell(one: dict[str, Any]) -> None:
    for row in one["turns"]:
        print(
            f"  turn {row['turn']:2}  {row['prompt_tokens']:5} tokens  found {row['cached_tokens']:7.1f}  "
            f"TTFT {row['ttft_ms']:8.2f} ms",
            flush=True,
        )
    others = ", ".join(f"{one['other_cores']:.2f}" for one in one["cores"])
    print(f"  {one['answers_equal']} of {one['answers']} answers equal; {one['seconds']} s; others {others}")


def report(options: argparse.Namespace, run: Run, before: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": before,
        "commit": commit(),
        "sessions": options.sessions,
        "models": {
            name: MODELS[name].about(options.folder) | {"contenders": run.visits[name]}
            for name in options.models
            if name in run.visits
        },
        "failures": run.failures,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", type=Path, metavar="VENV", help="environment with vLLM; default: the PATH's"
    )
    parser.add_argument("--models", type=lambda text: several(list(SIZES), text), default=list(SIZES))
    parser.add_argument("--sessions", type=int, default=NUM_SESSIONS)
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="an even number")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "twinfang-side-by-side",
        help="keeps checkpoints, what vLLM compiles, and what was measured",
    )
    parser.add_argument("--anew", action="store_true", help="measure again what was measured already")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument(
        "--publish", action="store_true", help="a whole run into JSON, plot and docs/cache-tiers.md"
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or what it has started would outlive it
    options.folder.mkdir(parents=True, exist_ok=True)
    before = machine()
    vllm = Vllm.found_in(options.vllm, options.folder / "vllm-cache", "float32")
    if vllm is None:
        print("vLLM is left out, because it is not installed", file=sys.stderr)
    key = {
        "source": source_hash(),
        "sessions": options.sessions,
        "turns": options.turns,
        "cores": len(os.sched_getaffinity(0)),
    }
    run = Run.kept_in(options.folder, key)
    if options.anew:
        run.visits, run.answers = {}, {}
    try:
        with only_run_in(options.folder):
            measure(options, run, contenders(vllm))
    except BusyError as error:
        raise SystemExit(str(error)) from None
    found = report(options, run, before)
    print(f"\n{section(found)}")
    for failure in run.failures:
        print(failure, file=sys.stderr)
    if options.json:
        write_json(options.json, found)
    if options.publish:
        if reasons := missing(found):
            raise SystemExit(f"not published: {'; '.join(reasons)}")
        publish(found)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
