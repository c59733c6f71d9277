"""Runs what is to be known of a GPU, unattended and without a network (``make gpu``).

Three calls take eight minutes each at most, or the time that is given.

    python -m benchmarks.gpu [--call 1|2|3] [--seconds 480] [--out benchmarks/results] [--peers FOLDER]

| call | shows |
|---|---|
| 1 | correctness: graphs against eager steps, no waits of the host, kernels' tests, races |
| 2 | whole steps beside their limits, by kernel; single kernels |
| 3 | two processes on the GPU, `twinfang up`, then tiles |

Results go to ``gpu-1.json`` to ``gpu-3.json`` in ``--out``, output to ``gpu-1.log`` to ``gpu-3.log``; tuned
tiles to a file with the GPU's name. A call that was cut off may be started again: stages that were ``ok`` on
this GPU, with this source, torch and triton, are not run again. A stage that fails does not prevent the
next; the exit code tells.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.device import NoDeviceError, device_facts
from benchmarks.gpu.plan import CALL_S, CALLS, stages
from benchmarks.gpu.record import Record
from benchmarks.gpu.requirements import missing
from benchmarks.gpu.source import commit, source_hash
from benchmarks.gpu.stage import Outcome, Stage, run
from benchmarks.json_file import read_json
from twinfang.bench.machine import machine

LEAST_S = 5.0
"""A stage is not begun with less time than this."""
SHOWN_LINES = 15
"""Of the output of a stage that failed."""


def run_stages(
    plan: Sequence[Stage], record: Record, figures: Path, log: IO[bytes], *, total_s: float
) -> list[str]:
    """Runs the stages that were not ok before, within ``total_s``. Returns the names of those that failed."""
    end = time.monotonic() + total_s
    failed = []
    for stage in plan:
        if record.is_ok(stage):
            print(f"{stage.name}: ok before", flush=True)
            continue
        left_s = end - time.monotonic()
        figures.unlink(missing_ok=True)
        outcome = (
            run(stage, min(stage.limit_s, left_s), log) if left_s >= LEAST_S else Outcome("no time left")
        )
        record.add(stage, outcome, read_json(figures))
        figures.unlink(missing_ok=True)
        _show(stage, outcome, log)
        if outcome.is_failure:
            failed.append(stage.name)
    return failed


def _show(stage: Stage, outcome: Outcome, log: IO[bytes]) -> None:
    lines = outcome.tail.strip().splitlines()
    reason = f" ({lines[-1]})" if outcome.verdict in ("skipped", "unfinished") and lines else ""
    line = f"{stage.name}: {outcome.verdict}, {outcome.seconds:.0f} s{reason}"
    log.write(f"\n{line}\n".encode())
    log.flush()
    shown = lines[-SHOWN_LINES:] if outcome.is_failure else []
    print("\n".join([line, *(f"    {one}" for one in shown)]), flush=True)


def run_call(
    call: int, header: dict[str, Any], out: Path, peers: Path | None, total_s: float = CALL_S
) -> list[str]:
    """Runs one call. Returns the names of the stages that failed."""
    print(f"call {call} of {len(CALLS)}, {total_s:.0f} s at most", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    figures = out / f"gpu-{call}.figures.json"
    record = Record(out / f"gpu-{call}.json", {"call": call, **header})
    with open(out / f"gpu-{call}.log", "ab") as log:
        return run_stages(stages(call, out, figures, peers), record, figures, log, total_s=total_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--call", type=int, choices=CALLS, help="only this one")
    parser.add_argument("--seconds", type=float, default=CALL_S, help="of each call, at most")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--peers", type=Path, help="folder that mamba-ssm, FlashInfer … are installed in")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stage's processes end with this one
    try:
        device = device_facts()
    except NoDeviceError as error:
        raise SystemExit(f"make gpu needs a GPU: {error}") from error
    header = {"commit": commit(), "source": source_hash(), "device": device, "machine": machine()}
    header["missing"] = missing()
    print(f"{device['name']}, torch {device['torch']}, triton {device['triton']}; {header['commit'][:12]}")
    if header["missing"]:
        print(f"not installed: {', '.join(header['missing'])} (benchmarks/gpu/requirements.txt)")
    failed = []
    for call in [options.call] if options.call else CALLS:
        peers = options.peers and options.peers.resolve()
        failed += run_call(call, header, options.out.resolve(), peers, options.seconds)
    if failed:
        raise SystemExit(f"not ok: {', '.join(failed)}")


if __name__ == "__main__":
    main()
