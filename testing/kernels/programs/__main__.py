"""Compile every program that serving uses, under this interpreter's Triton, and check the rules.

    python -m testing.kernels.programs --json programs.json             # the whole grid
    python -m testing.kernels.programs --quick --architectures 90       # one program of each kernel
    python -m testing.kernels.programs --quick --architectures 90 --list       # only the kernels' names

Needs no GPU. Ends with 1 if a program breaks a rule (rules.py) without an exemption (exemptions.py), or if an
exemption is not needed. To try another Triton, unpack its wheel and put its folder in front of PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # decided when a kernel's module is imported

import triton

from testing.kernels.programs.grid import Result, compiled, quick, table, unused_exemptions, whole
from testing.kernels.programs.recorder import ARCHITECTURES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--json", type=Path, help="write one row for each kernel and architecture; rows of other Tritons stay"
    )
    parser.add_argument("--quick", action="store_true", help="one program of each kernel")
    parser.add_argument(
        "--architectures", type=int, nargs="+", choices=ARCHITECTURES, default=[*ARCHITECTURES]
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--list", action="store_true", help="print the kernels' names, and compile nothing")
    options = parser.parse_args()
    results: list[Result] = []
    for architecture in options.architectures:
        programs = quick(architecture) if options.quick else whole(architecture)
        if options.list:
            print(*sorted({program.name for program in programs}), sep="\n")
            continue
        began = time.monotonic()
        results += compiled(programs, options.processes)
        seconds = time.monotonic() - began
        print(f"sm_{architecture}: {len(programs)} programs, {seconds:.0f} s", flush=True)
    if options.list:
        return 0
    complaints = [complaint for result in results for complaint in result.complaints]
    complaints += unused_exemptions(results)
    for complaint in complaints:
        print(complaint)
    rows = table(results)
    if options.json is not None:
        _store(options.json, rows)
    print(f"{len(results)} programs of {len(rows)} kernels and architectures, {len(complaints)} complaints")
    return 1 if complaints else 0


def _store(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replaces the rows of this Triton; those of others stay."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored[triton.__version__] = rows
    lines = (f"{json.dumps(version)}: [\n{_lines(stored[version])}\n]" for version in sorted(stored))
    path.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def _lines(rows: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
