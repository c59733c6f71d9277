"""Reads a checkpoint's files into the page cache while the process still imports its modules.

Importing torch takes about as long as reading some GB from a disk, but the disk has almost no work then. The
loader maps the files afterwards and finds them in the page cache, or at least partly read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

PIECE = 128 << 10
"""Bytes in one request. If a request is larger than the device's read-ahead size, Linux reads only as many
bytes as this size. The read-ahead size is at least 128 KiB."""


def read_ahead(model_dir: Path) -> threading.Thread | None:
    """Starts a thread that requests all safetensors files. With a warm cache that costs some milliseconds per
    GB.

    Returns None if the system has no ``posix_fadvise``. Ignores unreadable files: the loader reports them.
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
