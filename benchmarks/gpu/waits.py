"""Finds the calls that make the host wait for the GPU, by the line of our code that makes them.

A step must never wait: while the host waits, it can't launch the next step. CUDA itself reports such calls
(``torch.cuda.set_sync_debug_mode``): blocking copies, ``.item()``, a stream that is synchronized. Waiting for
an event, as a step's results are waited for, is not reported.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from testing.repository import ROOT

REPORTED = "synchronizing CUDA operation"


@contextmanager
def watched(device: torch.device) -> Iterator[Counter[str]]:
    """Yields a counter of places, ``engine/step/row_table.py:81 fill``, that is filled inside the block. On a
    CPU nothing waits."""
    found: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if REPORTED in str(message):
            found[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        _report(device, "warn")
        try:
            yield found
        finally:
            _report(device, "default")


def _report(device: torch.device, mode: str) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # reported as well, if it came later
        torch.cuda.set_sync_debug_mode(mode)


def _place() -> str:
    """Returns the innermost line of our code, without this module."""
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and ".venv" not in file.parts and file != Path(__file__):
            return f"{file.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "not in our code"
