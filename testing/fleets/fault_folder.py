"""Where a process with faults built in finds out which are on (:mod:`testing.fleets.injected`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "FAULTS"
"""Of the environment: names the folder. A fault is on while a file of its name lies there."""


@contextlib.contextmanager
def switched_on(folder: Path, fault: str) -> Iterator[None]:
    """Processes that look into ``folder`` have this fault inside the block."""
    switch = folder / fault
    switch.touch()
    try:
        yield
    finally:
        switch.unlink(missing_ok=True)
