"""How large a safetensors file is, by its own header."""

from __future__ import annotations

import json
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def safetensors_size(path: Path) -> int | None:
    """Return the number of bytes that the file should have: its header, and tensors up to the last one's
    end. Return None if it has no such header."""
    with path.open("rb") as file:
        first = file.read(8)
        if len(first) < 8:
            return None
        length = int.from_bytes(first, "little")
        if length > MAX_HEADER_BYTES:
            return None
        try:
            header = json.loads(file.read(length))
            ends = [int(one["data_offsets"][1]) for name, one in header.items() if name != "__metadata__"]
            return 8 + length + max(ends, default=0)
        except (ValueError, AttributeError, KeyError, IndexError, TypeError):
            return None
