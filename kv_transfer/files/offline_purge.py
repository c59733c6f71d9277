"""Deletes prompts from the folders of servers that do not run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

from engine.files.start_files import PurgedFiles
from engine.files.tier_settings import FileCache
from kv_transfer.files.directory import Directory
from kv_transfer.files.purge import Purge
from kv_transfer.files.record import ALIGNMENT, SegmentHeader
from kv_transfer.files.seal import NO_KEY, Sealer
from kv_transfer.files.segments import Segments
from wire.errors import ConfigError
from wire.messages.purge import PurgePrefixes

log = logging.getLogger(__name__)

_ANY_SIZE = 1 << 62


def folders(directory: Path) -> list[Path]:
    """Returns the folders of servers in a ``file_cache_dir``. Raises :class:`ConfigError` if it can't be
    read."""
    try:
        return sorted(path.parent for path in directory.glob("*/lock"))
    except OSError as error:
        raise ConfigError(f"`file_cache_dir` {directory} can't be read: {error.strerror}") from error


def purge_folder(path: Path, wanted: PurgePrefixes, sealer: Sealer) -> PurgedFiles | None:
    """Deletes what is wanted from a folder; None: a server uses it. Records are counted for an owner alone.

    Segments that no server could use are deleted, as a server does when it starts. Raises
    :class:`ConfigError` if ``sealer`` lacks the key of a segment, so that nobody can say whose prompts it
    holds, and :class:`OSError`.
    """
    directory = Directory.lock(path)
    if directory is None:
        return None
    try:
        if wanted.owner is None:
            return _delete_old(directory, wanted.older_than_s)
        headers = [header for _, header in _headers(directory) if header is not None]
        for header in headers:
            if header.sealer != sealer.name:
                raise ConfigError(_what_to_give(path, header.sealer, sealer.name))
        return _purge(directory, headers[0], wanted, sealer) if headers else _delete_old(directory, None)
    finally:
        directory.close()


def _what_to_give(path: Path, its_key: bytes, given: bytes) -> str:
    """Returns why the key with the name ``given`` can't say whose prompts a folder holds, and what can."""
    if its_key == NO_KEY:
        return f"{path} is not encrypted: leave out `file_cache_key_file`"
    key = "a key" if given == NO_KEY else "another key"
    return (
        f"{path} is encrypted with {key}, so nobody can say whose prompts it holds: give its "
        "`file_cache_key_file`, or delete the folder"
    )


def purge_others(own: Path, wanted: PurgePrefixes, sealer: Sealer) -> PurgedFiles:
    """Deletes what is wanted from all folders beside ``own`` that no server uses."""
    purged = PurgedFiles()
    for path in folders(own.parent):
        if path != own:  # to close a second file of its lock would end the lock
            try:
                purged += purge_folder(path, wanted, sealer) or PurgedFiles()
            except (ConfigError, OSError) as error:
                purged += PurgedFiles(error=str(error))
    return purged


def _headers(directory: Directory) -> Iterator[tuple[Path, SegmentHeader | None]]:
    for path in directory.segments():
        with path.open("rb") as file:
            yield path, SegmentHeader.read(file.read(ALIGNMENT))


def _delete_old(directory: Directory, older_than_s: float | None) -> PurgedFiles:
    """Deletes the segments that were begun so long ago, whatever their key is, and those without a header."""
    num_bytes = 0
    for path, header in _headers(directory):
        is_old = older_than_s is None or header is None or header.created_s <= time.time() - older_than_s
        if is_old:
            num_bytes += path.stat().st_size
            path.unlink()
    return PurgedFiles(num_bytes=num_bytes)


def _purge(directory: Directory, header: SegmentHeader, wanted: PurgePrefixes, sealer: Sealer) -> PurgedFiles:
    segments = Segments(
        *(directory, FileCache(directory.path.parent, _ANY_SIZE), header.form, sealer, None),
        on_failure=lambda kind, what: log.warning("%s: %s: %s", directory.path, kind, what),
        forget=lambda segment: None,
    )
    segments.load()
    purge = Purge(segments, wanted, lambda purged: None)
    while purge.go_on():
        pass
    segments.close_files()
    return purge.purged
