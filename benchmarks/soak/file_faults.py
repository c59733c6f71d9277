"""What happens to the files of cached prompts: damage between two lives of a server, a removed directory,
a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

DAMAGED = "killed, files damaged, restarted"
REMOVED = "files removed"
FULL = "disk full"
FILE_WEIGHTS = {DAMAGED: 0.25, REMOVED: 0.1, FULL: 0.1}
"""Weights of these faults beside those of :mod:`benchmarks.soak.faults`."""
DISK_BYTES = 24 << 20
"""Size of a disk: twice what a server's files may take."""
BALLAST_BYTES = 1 << 20
FINGERPRINT = slice(56, 120)
"""Where a segment's header names the model."""


class FileFaults:
    """Disturbs the files of servers. ``directories`` are those of ``--file-cache-dir``, by server."""

    def __init__(self, directories: Mapping[str, Path], seed: int) -> None:
        self._directories = directories
        self._rng = random.Random(f"files {seed}")

    def damage(self, name: str) -> str:
        """Damages about half of a dead server's segments; returns what was done."""
        done: list[str] = []
        for path in sorted(self._directories[name].glob("*/*.segment")):
            if self._rng.random() < 0.5:
                done.append(self._damage(path))
        return ", ".join(f"{done.count(kind)} {kind}" for kind in dict.fromkeys(done))

    def _damage(self, path: Path) -> str:
        size = path.stat().st_size
        kind = self._rng.choice(("flipped", "truncated", "foreign", "deleted"))
        if kind == "truncated":
            os.truncate(path, self._rng.randrange(size))
        elif kind == "deleted":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            if kind == "foreign":
                data[FINGERPRINT] = data[FINGERPRINT][::-1]
            else:
                for place in range(0, size, 64 << 10):  # a bit in each 64 KiB
                    data[min(size - 1, place + self._rng.randrange(64 << 10))] ^= 1 << self._rng.randrange(8)
            path.write_bytes(data)
        return kind

    def remove(self, name: str) -> None:
        """Deletes all files of a running server."""
        shutil.rmtree(self._directories[name], ignore_errors=True)

    @contextlib.contextmanager
    def full(self, name: str) -> Iterator[None]:
        """Leaves no room on a server's disk inside the block."""
        ballast = self._directories[name].parent / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(BALLAST_BYTES))
            yield
        finally:
            ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def disks(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Yields a directory for each server, each on a small disk of its own (tmpfs).

    Raises :class:`PermissionError` if this user may not mount one.
    """
    with contextlib.ExitStack() as mounts:
        directories = {}
        for name in names:
            disk = folder / f"disk-{name}"
            disk.mkdir()
            options = f"size={DISK_BYTES},mode=0700"
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise PermissionError(errno.EPERM, result.stderr.strip(), str(disk))
            mounts.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
            directories[name] = disk / "cache"
        yield directories
