"""Which code a result belongs to."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from testing.repository import ROOT

FOLDERS = (
    *("benchmarks", "decode_server", "engine", "kernels", "kv_transfer", "prefill_server", "router"),
    *("telemetry", "testing", "tests", "twinfang", "wire"),
)
COMMIT = "TWINFANG_COMMIT"
"""Environment variable that names the commit where the tree was copied without its .git."""


def commit() -> str:
    """Returns the commit; ``unknown`` if nothing tells it. Results are kept apart by :func:`source_hash`."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    try:
        command = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def source_hash(root: Path = ROOT) -> str:
    """Returns a hash of all Python files. Documents, results and tuned tiles don't change it."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
