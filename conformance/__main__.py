r"""Conformance of handoffs: are answers right when reads are late, servers die, and memory is short?

    python -m conformance twinfang
    python -m conformance vllm --vllm /tmp/peers-vllm --runs 3 --publish
    python -m conformance twinfang --only late-read killed --runs 1
    python -m conformance vllm --vllm /tmp/peers-vllm --only burst --publish --continue
    python -m conformance mymodule:MyPair            # a hook of your own, see conformance/README.md

Starts the system as one server for the right answers, then as a pair, and runs each case. All traffic is on
loopback. Ends with 1 if an answer was wrong, a request hung or a block was lost. ``--publish`` writes
benchmarks/results/conformance.json and the table of docs/reliability.md, without runs in which the suite's
own client got no core for more than a second. ``--continue`` keeps the runs that are there already and good,
and runs those that are missing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from benchmarks.json_file import read_json, write_json
from conformance.cases import CASES
from conformance.pair import Pair
from conformance.report import added, done_before, publish, published, section, system
from conformance.run import Settings, suite
from conformance.twinfang_pair import TwinfangPair
from conformance.vllm_pair import VllmPair
from wire.errors import TwinfangError


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pair", help="twinfang, vllm, or MODULE:CLASS of a hook")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each case; default: 3")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--deadline", type=float, default=90.0, metavar="S", help="of a request; default: 90")
    parser.add_argument(
        "--quiet", type=float, default=45.0, metavar="S", help="until all is given back; default: 45"
    )
    parser.add_argument("--long-answer", type=int, default=240, metavar="TOKENS", help="default: 240")
    parser.add_argument("--lease", type=float, metavar="S", help="how long prefill keeps a prompt")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="environment with vLLM")
    parser.add_argument("--recompute", action="store_true", help="vLLM with kv_load_failure_policy recompute")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep models and logs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after every run")
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="goes_on",
        help="add what is missing to --json FILE, or else to what is published",
    )
    parser.add_argument("--publish", action="store_true", help="into the repository's JSON and table")
    return parser


def pair_of(options: argparse.Namespace, folder: Path) -> Pair:
    """Returns the hook that was asked for."""
    lease = {} if options.lease is None else {"lease_s": options.lease}
    if options.pair == "twinfang":
        return TwinfangPair(**lease)
    if options.pair == "vllm":
        return VllmPair.found_in(options.vllm, folder, recompute=options.recompute, **lease)
    module, _, name = options.pair.partition(":")
    if not name:
        raise SystemExit(f"{options.pair} is no system: name twinfang, vllm or MODULE:CLASS")
    return cast(Pair, getattr(importlib.import_module(module), name)())


def earlier(options: argparse.Namespace, pair: Pair) -> dict[str, Any]:
    """Returns the results to go on with, which may be none."""
    if not options.goes_on:
        return {}
    return published(pair.name) if options.json is None else read_json(options.json) or {}


def main() -> int:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(1))  # so that the servers are ended, too
    with ExitStack() as exits:
        folder = options.folder or Path(
            exits.enter_context(tempfile.TemporaryDirectory(prefix="conformance-"))
        )
        pair = pair_of(options, folder)
        settings = Settings(
            folder, options.runs, options.deadline, options.quiet, options.seed, options.long_answer
        )
        cases = [case for case in CASES if not options.only or case.name in options.only]
        today = datetime.date.today().isoformat()
        before = earlier(options, pair)
        results = done_before(before, system(pair, [], settings, today), [case.name for case in cases])
        part = added(before, system(pair, results, settings, today))
        done = {(result.case, result.run) for result in results}
        for result in suite(pair, cases, settings, lambda line: print(line, flush=True), done):
            results.append(result)
            part = added(before, system(pair, results, settings, today))
            if options.json is not None:
                write_json(options.json, part)
    print(section({"systems": {pair.name: part}}))
    if options.publish:
        publish(pair.name, part)
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TwinfangError as error:
        sys.exit(f"conformance: {error}")
