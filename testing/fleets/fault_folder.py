"""Tells a process with injected faults (:mod:`testing.fleets.injected`) which of these faults are on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "FAULTS"
"""Environment variable with the folder. A fault is on while a file of its name lies there."""


@contextlib.contextmanager
def switched_on(folder: Path, fault: str) -> Iterator[None]:
    """Switches this fault on inside the block, for processes that look into ``folder``."""
    switch = folder / fault
    switch.touch()
    try:
        yield
    finally:
        switch.unlink(missing_ok=True)
