"""Prints the packages of ``requirements.txt`` that this interpreter lacks, one a line: a list for pip.

python3 -m benchmarks.gpu.requirements > missing.txt
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

FILE = Path(__file__).with_name("requirements.txt")


def required() -> list[str]:
    """Returns the names in the file, in its order."""
    lines = (line.partition("#")[0].strip() for line in FILE.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def missing() -> list[str]:
    """Returns the required packages that are not installed."""
    found = []
    for name in required():
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(name)
    return found


if __name__ == "__main__":
    print("\n".join(missing()))
