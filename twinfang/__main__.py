"""``python -m twinfang``; the command ``twinfang`` runs the same code."""

from __future__ import annotations

import sys
from typing import NoReturn

from twinfang.early_fork_server import end_early, start_early


def run() -> NoReturn:
    """Runs this process's command line, then ends the process with its exit code."""
    start_early(sys.argv[1:])
    from telemetry.process_end import end_process  # its imports take a while, and so do those of the next one

    try:
        from twinfang.cli import main

        code = main()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        end_early()
    end_process(code)


if __name__ == "__main__":
    run()
