"""Prints those of the project's dependencies that a router needs, one per line: all except the servers' own.

python3 router_requirements.py pyproject.toml otel kubernetes redis s3 > requirements.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

SERVERS_ALONE = {"torch", "triton", "numba", "numpy", "safetensors", "nixl"}
"""Dependencies that only servers import. All others are printed. A test compares this with the actual
imports."""


def router_requirements(pyproject: Path, *extras: str) -> list[str]:
    """Returns the router's requirements of the package itself and of its ``extras``."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    requirements: list[str] = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    return [one for one in requirements if _name(one) not in SERVERS_ALONE]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    print("\n".join(router_requirements(Path(sys.argv[1]), *sys.argv[2:])))
