"""Checks that each folder (a "room") stays small: the number of its modules, their lengths, and whether the
folder is described.

    python -m testing.rooms

Prints one line for each fault, and ends with 1 if there is any. The directions of imports are checked by
import-linter (pyproject.toml).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from testing.repository import ROOT

MAX_MODULES, MAX_LINES = 15, 450
NO_ROOMS = {"build", "dist", "docs", "deploy"}


def rooms(root: Path) -> Iterator[Path]:
    """Yields every folder of ``root`` that has Python modules, except hidden and built ones."""
    for top in sorted(root.iterdir()):
        if top.is_dir() and not top.name.startswith(".") and top.name not in NO_ROOMS:
            yield from sorted({path.parent for path in top.rglob("*.py")})


def faults(room: Path) -> Iterator[str]:
    """Yields the faults of one folder."""
    modules = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
    if len(modules) > MAX_MODULES:
        yield f"{room} has {len(modules)} modules, at most {MAX_MODULES} are allowed: divide it"
    for module in modules:
        if (length := len(module.read_text(encoding="utf-8").splitlines())) > MAX_LINES:
            yield f"{module} has {length} lines, at most {MAX_LINES} are allowed: it holds two ideas"
    if not (room / "README.md").exists() and not _docstring(room / "__init__.py"):
        yield f"{room} does not say what it is: give it a README.md, or __init__.py a docstring"


def _docstring(package: Path) -> str | None:
    return ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) if package.exists() else None


def main() -> int:
    found = [fault for room in rooms(ROOT) for fault in faults(room)]
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
