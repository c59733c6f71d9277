"""Soak: is every answer still right while servers are killed, frozen and drained at random?

    python -m benchmarks.soak --minutes 30 --json benchmarks/results/soak.json --write-section
    python -m benchmarks.soak --seconds 120 --seed 3 --logs /tmp/soak
    python -m benchmarks.soak --tiers --minutes 15 --json benchmarks/results/soak-tiers.json --write-section

Two prefill servers, two decode servers and two routers run as processes. Clients send requests of a fixed
pool with known answers, while servers are killed and restarted, frozen and thawed, drained and restarted.
With --tiers the prefill servers keep cached prompts in little host memory and in files, which are damaged and
deleted, and whose disks are full at times. This needs the right to mount a tmpfs.
Ends with 1 if an answer is wrong, if a server does not give everything back or does not stop cleanly when
asked, if the sanitizer finds a fault, or if a read under a valid lease differs from what was sent. If a wait
takes too long, it shows what the processes do; install py-spy to see their stacks, too.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.soak.lineups import PLAIN, TIERS
from benchmarks.soak.report import figures, section, write_section
from benchmarks.soak.run import Settings, SoakError, soak
from testing.repository import DOCS
from twinfang.bench.machine import machine

DOCUMENT = DOCS / "reliability.md"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=30.0, metavar="M", help="of faults; default: 30")
    length.add_argument("--seconds", type=float, metavar="S")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults")
    parser.add_argument("--tiers", action="store_true", help="host memory and files behind the device")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures with machine and versions")
    parser.add_argument("--write-section", action="store_true", help="figures into docs/reliability.md")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' logs there")
    return parser


def settings_of(options: argparse.Namespace) -> Settings:
    seconds = options.seconds or 60 * options.minutes
    return Settings(
        seconds=seconds,
        seed=options.seed,
        lineup=TIERS if options.tiers else PLAIN,
        concurrency=options.concurrency,
        very_long_freezes=0.02,
    )


def main() -> int:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(1))  # so that the fleet is ended, too
    before = machine()
    with ExitStack() as exits:
        folder = options.logs or Path(
            exits.enter_context(tempfile.TemporaryDirectory(prefix="twinfang-soak-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            result = soak(settings_of(options), folder, say=lambda line: print(line, flush=True))
        except (SoakError, PermissionError) as error:
            print(f"the soak can't begin: {error}", file=sys.stderr)
            return 1
    report = figures(result, before)
    print(section(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.write_section:
        write_section(DOCUMENT, report)
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
