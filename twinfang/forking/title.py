"""The command line that ``ps`` shows of a forked process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

ROOM = " " * 4096
"""The last argument of a process whose children call :func:`show_command_line`. It gives them room."""
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 48 - 3, 49 - 3  # fields of proc(5) after the name, which is field 2


def show_command_line(arguments: Sequence[str]) -> None:
    """Shows ``arguments``, cut off where the room ends. Without effect if the system has no ``/proc``."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        text = " ".join(arguments).encode()[: end - begin - 2]
        # If the last byte is not zero, Linux shows only the text before the first zero.
        ctypes.memmove(begin, text.ljust(end - begin - 1, b"\0") + b".", end - begin)
