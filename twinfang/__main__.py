"""``python -m twinfang``; the command ``twinfang`` runs the same code."""

from __future__ import annotations

import sys
from typing import NoReturn

from telemetry.process_end import end_process
from twinfang.cli import main


def run() -> NoReturn:
    """Runs this process's command line, then ends the process with its exit code."""
    try:
        code = main()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    end_process(code)


if __name__ == "__main__":
    run()
