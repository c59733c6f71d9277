"""Brings a checkpoint's files into the page cache while the process is still importing its modules.

Importing torch takes about as long as a disk takes for some GB, and reads almost nothing. The loader maps the
files afterwards: it finds them there, or on their way.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

PIECE = 128 << 10
"""Bytes asked for at once. Of more Linux would read a device's read-ahead alone, which is at least that."""


def read_ahead(model_dir: Path) -> threading.Thread | None:
    """Asks for all safetensors in a thread of its own; it costs a warm cache some milliseconds a GB.

    None where the system can't be asked. A file that can't be read is the loader's to report.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    files = sorted(model_dir.glob("*.safetensors"))
    thread = threading.Thread(target=_ask_for, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _ask_for(files: list[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size, PIECE):
                os.posix_fadvise(file.fileno(), start, PIECE, os.POSIX_FADV_WILLNEED)
