"""The directory of a server's segments. Only the server's user can read it: files hold people's prompts.

Each server locks a folder of its own, whose name says which model and layout it is for. The lock ends with
the process, so a server that starts again finds what it has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from engine.files.start_files import StartForm
from wire.errors import ConfigError

SUFFIX = ".segment"
MAX_SERVERS = 1000
"""Most servers of one model that share a directory."""
_READ = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Directory:
    """A folder that this process has locked."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def take(cls, parent: Path, form: StartForm) -> Directory:
        """Locks a folder of ``parent`` for starts of this form, one that exists if possible.

        Raises :class:`ConfigError` if the directory can't be used.
        """
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(MAX_SERVERS):
                path = parent / f"{form.fingerprint[:12]}-{form.layout[:12]}-{number}"
                path.mkdir(mode=0o700, exist_ok=True)
                path.chmod(0o700)
                if (taken := cls.lock(path)) is not None:
                    return taken
        except OSError as error:
            raise ConfigError(
                f"`file_cache_dir` {parent} can't be used: {error.strerror}: {error.filename}; "
                "give a directory that this user may write to"
            ) from error
        raise ConfigError(f"`file_cache_dir` {parent} is in use by {MAX_SERVERS} servers; give another one")

    @classmethod
    def lock(cls, path: Path) -> Directory | None:
        """Locks a folder that is there; None: another process has locked it. Raises :class:`OSError`."""
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(path, lock)
        os.close(lock)
        return None

    def segments(self) -> Iterator[Path]:
        """Yields the segments that are there, oldest first."""
        yield from sorted(self.path.glob(f"*{SUFFIX}"))

    def create(self) -> tuple[Path, int]:
        """Makes a new segment and returns its path and open file. Raises :class:`OSError`."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path / f"{time.time_ns():020d}{SUFFIX}"
        return path, os.open(path, _READ | os.O_CREAT | os.O_EXCL, 0o600)

    def open(self, path: Path) -> int:
        """Opens a segment. Raises :class:`OSError`."""
        return os.open(path, _READ)

    def close(self) -> None:
        os.close(self._lock)
