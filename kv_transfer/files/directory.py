"""The directory of a server's segments. Only the server's user can read it: files hold people's prompts.

Each rank of a server locks a folder of its own, whose name says which model and layout it is for. The lock
ends with the process, so a server that starts again finds what it has left.
"""

from __future__ import annotations

import contextlib
import errno
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
LOCK_TIMEOUT_S, LOCK_PAUSE_S = 15.0, 0.1
"""How long a rank waits for a folder that a process still has. A rank whose server was killed ends within
10 s."""
_READ = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Directory:
    """A folder that this process has locked."""

    def __init__(self, path: Path, number: int, lock: int) -> None:
        self.path = path
        self.number = number
        self._lock = lock

    @classmethod
    def take(cls, parent: Path, form: StartForm, number: int | None = None) -> Directory:
        """Locks a folder of ``parent`` for starts of this form, one that exists if possible.

        ``number`` is that of the folder of the server's rank 0. With it, another rank finds what it has
        written, also where several servers share the directory. A process that is about to end may still have
        the folder. So this waits for the folder, and takes another one if it stays locked.

        Raises :class:`ConfigError` if the directory can't be used.
        """
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            until_s = time.monotonic() + LOCK_TIMEOUT_S
            while number is not None and time.monotonic() < until_s:
                taken = cls._lock_folder(parent, form, number)
                if taken is not None:
                    return taken
                time.sleep(LOCK_PAUSE_S)
            for other in range(MAX_SERVERS):
                taken = cls._lock_folder(parent, form, other)
                if taken is not None:
                    return taken
        except OSError as error:
            raise ConfigError(
                f"`file_cache_dir` {parent} can't be used: {error.strerror}: {error.filename}; "
                "give a directory that this user may write to"
            ) from error
        raise ConfigError(f"`file_cache_dir` {parent} is in use by {MAX_SERVERS} servers; give another one")

    @classmethod
    def _lock_folder(cls, parent: Path, form: StartForm, number: int) -> Directory | None:
        """Locks the folder with this number; None if another process has it. Raises :class:`OSError`."""
        path = parent / f"{form.fingerprint[:12]}-{form.layout[:12]}-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)
        return cls.lock(path, number)

    @classmethod
    def lock(cls, path: Path, number: int = 0) -> Directory | None:
        """Locks a folder that is there; None: another process has locked it. Raises :class:`OSError`."""
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(path, number, lock)
        os.close(lock)
        return None

    def segments(self) -> Iterator[Path]:
        """Yields the segments that are there, oldest first."""
        yield from sorted(self.path.glob(f"*{SUFFIX}"))

    def create(self) -> tuple[Path, int]:
        """Makes a new segment and returns its path and open file. Raises :class:`OSError`."""
        self._hold()
        path = self.path / f"{time.time_ns():020d}{SUFFIX}"
        return path, os.open(path, _READ | os.O_CREAT | os.O_EXCL, 0o600)

    def _hold(self) -> None:
        """Makes and locks the folder again if somebody has deleted it. Raises :class:`OSError`, also if
        another process has made and locked it meanwhile."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat((self.path / "lock").stat(), os.fstat(self._lock)):
                return
        # A lock belongs to a file, not to its name. Without a new one, a server that starts would take this
        # folder, and `twinfang purge` would change it.
        again = self.lock(self.path, self.number)
        if again is None:
            raise OSError(errno.EBUSY, "another server has taken the folder", str(self.path))
        os.close(self._lock)
        self._lock = again._lock

    def open(self, path: Path) -> int:
        """Opens a segment. Raises :class:`OSError`."""
        return os.open(path, _READ)

    def close(self) -> None:
        os.close(self._lock)
