"""Where a certificate and its private key are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FileVersion = tuple[int, int, int] | None
"""Differs after a file was written or replaced; None: there is no such file."""


@dataclass(frozen=True)
class KeyPairFiles:
    """The files of one certificate. The first two may be the same file."""

    certificate: Path
    """PEM: the process's own certificate, then those of the authorities between it and the root."""
    private_key: Path
    """PEM"""
    password: Path | None = None
    """Has the password of an encrypted key in its only line. None: the key is not encrypted."""
    authorities: Path | None = None
    """PEM: the authorities whose certificates are accepted from the other side. None: it shows none."""

    def version(self) -> tuple[FileVersion, ...]:
        """Return what changes when a file changes. Kubernetes replaces a Secret's files by moving a symbolic
        link to another folder, so that the file behind the link counts."""
        paths = (self.certificate, self.private_key, self.password, self.authorities)
        return tuple(_version_of(path) for path in paths if path is not None)


def _version_of(path: Path) -> FileVersion:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
