"""Installs packages into an environment, each from a file that hashes.txt lists by its digest.

    python3 install_hashed.py HASHES PYTHON REQUIREMENT…     # or `-r FILE`, or our own wheel

The environment's pip decides which packages are missing there, at the versions of HASHES, and writes it down
without installing anything. Then pip installs these in its hash-checking mode. Two steps, because that mode
takes only requirements with a version and a hash: pip refuses constraints with hashes for all others.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PIP = ("-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check")
WHEELS_ALONE = ("--only-binary", ":all:")
"""A source distribution would run its code before anybody compares a digest."""
HASH = re.compile(r"--hash=(\S+)")


def main(arguments: list[str]) -> None:
    if len(arguments) < 3:
        sys.exit(__doc__)
    listed = read_hashes(Path(arguments[0]).read_text(encoding="utf-8"))
    python, requirements = arguments[1], arguments[2:]
    with tempfile.TemporaryDirectory() as folder:
        versions, report, chosen = (Path(folder) / name for name in ("versions", "report", "chosen"))
        versions.write_text("".join(f"{name}=={version}\n" for name, version in listed), encoding="utf-8")
        planned = ("--dry-run", "--quiet", "--report", str(report), "-c", str(versions))
        _run(python, *PIP, *WHEELS_ALONE, *planned, *requirements)
        plan = json.loads(report.read_text(encoding="utf-8"))["install"]
        own = [one["download_info"]["url"] for one in plan if one["is_direct"]]
        try:
            lines = hashed_lines(listed, [one for one in plan if not one["is_direct"]])
        except LookupError as error:
            sys.exit(f"install_hashed.py: error: {error.args[0]}")
        chosen.write_text("".join(lines), encoding="utf-8")
        if lines:
            _run(python, *PIP, *WHEELS_ALONE, "--require-hashes", "--no-deps", "-r", str(chosen))
        if own:
            _run(python, *PIP, "--no-deps", *own)


def read_hashes(text: str) -> dict[tuple[str, str], list[str]]:
    """Returns the hashes of all files of each package, by its name, as PEP 503 writes it, and its version."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in re.split(r"(?m)^(?=[A-Za-z0-9])", text):
        if pin := re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", entry):
            found[_name(pin[1]), pin[2]] = HASH.findall(entry)
    return found


def hashed_lines(listed: dict[tuple[str, str], list[str]], plan: list[dict[str, Any]]) -> list[str]:
    """Returns a line of requirements with hashes for each package that pip plans to install.

    Raises LookupError for one that is not listed, or not with this version.
    """
    lines = []
    for one in plan:
        name, version = _name(one["metadata"]["name"]), one["metadata"]["version"]
        hashes = listed.get((name, version))
        if not hashes:
            raise LookupError(
                f"hashes.txt does not list {name} {version}, which pip would take from "
                f"{one['download_info']['url']}: run `make hashes`. If your index has a build of its own, "
                "name the public one; for torch, name yours in TORCH_INDEX_URL"
            )
        lines.append(" ".join([f"{name}=={version}", *(f"--hash={digest}" for digest in hashes)]) + "\n")
    return lines


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(*command: str) -> None:
    ended = subprocess.run(command)
    if ended.returncode:
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
