"""What one hostile client does to another, against a real ``twinfang up``: one prefill, one decode server.

    python -m benchmarks.hostile --out benchmarks/results/hostile.json     # 32 minutes
    python -m benchmarks.hostile --attack grammar --attack all --seconds 10 --rest 5     # a look
    python -m benchmarks.hostile.restarts        # servers killed under load, a program of its own

For each attack, and for all at once, a fresh stack runs with default flags and a store of responses. A
*victim* streams ordinary answers, and /healthz and /v1/models are polled. First well-behaved clients run
beside the victim, as many as the attack has requests in flight: this baseline is the cost of sharing the
cores as such. Then the attackers run beside it. Each attack is a separate process that sends requests built
beforehand, from its own address, so that the router sees it as a separate client. Memory is measured before
the attack, during it, and a minute after it. Ends with 1 if a goal is not met.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.hostile.attacks import ATTACKS, BY_NAME
from benchmarks.hostile.report import not_met, table
from benchmarks.hostile.trial import Conditions, measure
from twinfang.bench.machine import machine

ALL = "all"
MAX_SECONDS = 600.0


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {MAX_SECONDS:g}, got {text}")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="attacks:\n" + "\n".join(f"  {attack.name:9} {attack.does}" for attack in ATTACKS),
    )
    names = [attack.name for attack in ATTACKS]
    parser.add_argument(
        "--attack",
        action="append",
        choices=[*names, ALL],
        metavar="NAME",
        help=f"one of those below, or {ALL}: all at once; repeat for more (default: each, and {ALL})",
    )
    parser.add_argument("--seconds", type=seconds, default=20.0, help="of baseline and attack; default: 20")
    parser.add_argument(
        "--rest", type=seconds, default=60.0, help="until memory is looked at again; default: 60"
    )
    parser.add_argument(
        "--as-long",
        action="store_true",
        help="well-behaved clients ask for answers as long as the attackers do, and read them",
    )
    parser.add_argument(
        "--one-address",
        action="store_true",
        help="attackers have the victim's address, so that the router can't be fair to it",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON with machine and versions")
    parser.add_argument("--note", default="", help="a line about this run for the JSON")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "note": options.note}
    report |= {"seconds": options.seconds, "rest_s": options.rest, "one_address": options.one_address}
    report["as_long"] = options.as_long
    conditions = Conditions(
        options.seconds, options.rest, as_long=options.as_long, one_address=options.one_address
    )
    trials: list[dict[str, Any]] = []
    for name in options.attack or [*names, ALL]:
        attacks = ATTACKS if name == ALL else (BY_NAME[name],)
        trials.append(measure(name, attacks, conditions))
        print(f"\n{table(trials[-1:])}", flush=True)
        if options.out is not None:  # after each: a run that is cut off has shown something
            options.out.write_text(json.dumps(report | {"trials": trials}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(trials)}")
    return 1 if not_met(trials) else 0


if __name__ == "__main__":
    sys.exit(main())
