"""The file of an audit log. Several processes may append to it: a lock makes them take turns, and each begins
where the last line of any of them ends."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from router.audit.line import MAX_LINE_BYTES, START, Link, now_text, parsed, written
from wire.errors import ConfigError

log = logging.getLogger(__name__)

MODE = 0o600
LOCK_TIMEOUT_S = 2.0
"""A process that was frozen with the lock must not hold up the others for longer."""
LOCK_INTERVAL_S = 0.005
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class ChainFile:
    """Appends lines. If the file is moved away, a new one goes on with the chain of the old one. Raises
    :class:`ConfigError` if the file can't be used at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, FLAGS, MODE)
        except OSError as error:
            raise ConfigError(f"the `audit_log` {path} can't be written: {error.strerror}") from error
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise
        self._end: tuple[int, Link] | None = None
        """Where this process's last line ended, and its place."""

    def close(self) -> None:
        os.close(self._fd)

    def append(self, records: Sequence[Mapping[str, Any]]) -> Link:
        """Append a line for each of ``records``, and wait until the disk has them. Return the last line's
        place. Raises :class:`OSError`; then the lines were not written, or only in part, which the next call
        notes."""
        with self._locked() as before:
            link, torn = _last_link(self._fd) if before is None else (before, b"")
            data = b""
            for record in (*self._findings(link, torn), *records):
                line, link = written(record, link)
                data += line
            if torn:
                data = b"\n" + data
            if os.write(self._fd, data) != len(data):
                raise OSError("the disk is full")
            os.fdatasync(self._fd)
            self._end = os.fstat(self._fd).st_size, link
        return link

    @contextmanager
    def _locked(self) -> Iterator[Link | None]:
        """Lock the file that has the path's name now. Yields where its chain begins, if the file is new."""
        before: Link | None = None
        while True:
            _lock(self._fd)
            if _is_named(self._fd, self._path):
                break
            before, _ = _last_link(self._fd)
            old, self._fd = self._fd, os.open(self._path, FLAGS, MODE)
            self._end = None
            _keep_private(self._fd, self._path)
            os.close(old)  # gives the lock back
        try:
            yield before if os.fstat(self._fd).st_size == 0 else None
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _findings(self, link: Link, torn: bytes) -> Iterator[dict[str, Any]]:
        """Yield what this process can say of the file's end."""
        if torn:
            yield {"at": now_text(), "event": "torn_line", "torn": hashlib.sha256(torn).hexdigest()}
        if self._end is None:
            return
        size, last = self._end
        start = max(0, size - MAX_LINE_BYTES)
        found = os.pread(self._fd, size - start, start)
        if link.seq < last.seq or last.hash.encode() not in found.rsplit(b"\n", 2)[-2:][0]:
            log.error("the audit log %s was changed: line %s is not where it was", self._path, last)
            yield {"at": now_text(), "event": "tampered", "missing": str(last)}

    def _check(self) -> None:
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"the `audit_log` {self._path} is not a file: give the name of one")
        if info.st_mode & 0o077:
            raise ConfigError(
                f"the `audit_log` {self._path} can be used by others (mode {info.st_mode & 0o777:o}): "
                f"chmod 600 {self._path}"
            )
        if info.st_size and _last_link(self._fd)[0] == START:
            raise ConfigError(
                f"the `audit_log` {self._path} holds something else: give the name of a new file"
            )


def _keep_private(fd: int, path: Path) -> None:
    """Take other users' rights from a file that a program for log rotation has made."""
    mode = os.fstat(fd).st_mode & 0o777
    if not mode & 0o077:
        return
    log.warning("the audit log %s was made with mode %o: it gets mode %o", path, mode, MODE)
    try:
        os.fchmod(fd, MODE)
    except OSError as error:
        log.error("others can use the audit log %s: chmod 600 %s (%s)", path, path, error.strerror)


def _lock(fd: int) -> None:
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise OSError(f"another process has kept the lock for {LOCK_TIMEOUT_S:g} s") from None
        time.sleep(LOCK_INTERVAL_S)


def _is_named(fd: int, path: Path) -> bool:
    try:
        named, opened = path.stat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _last_link(fd: int) -> tuple[Link, bytes]:
    """Return the place of the file's last line, and what stands behind its end: part of a line that was not
    written to its end."""
    size = os.fstat(fd).st_size
    *lines, torn = os.pread(fd, 2 * MAX_LINE_BYTES, max(0, size - 2 * MAX_LINE_BYTES)).split(b"\n")
    found = (line for line in map(parsed, reversed(lines)) if line is not None)
    last = next(found, None)
    return (START if last is None else last.link), torn
