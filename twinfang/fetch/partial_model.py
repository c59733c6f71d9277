"""The files of a model that have come so far, and the step by which they become the model's directory.

models/nemotron-h/                   the model: there only when it is whole
models/.nemotron-h.partial/files/    files that are whole and checked
models/.nemotron-h.partial/parts/    files that have come in part
models/.nemotron-h.partial/from      the source, and its version, that all of this is of
models/.nemotron-h.lock              held by the process that fetches
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twinfang.fetch.file_fetch import FetchedFile, Pace
from twinfang.fetch.source import FetchError

log = logging.getLogger(__name__)

RECORD = ".fetched.json"
"""The file in a model's directory that says where it is from, and what its files are."""
LOCK_POLL_S = 0.5


class PartialModel:
    """Belongs to the process that holds the lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folder = directory.with_name(f".{directory.name}.partial")
        self.files, self.parts = self._folder / "files", self._folder / "parts"
        self._from = self._folder / "from"

    def take_up(self, source: str) -> str:
        """Continue what was begun with this source, and return the version that it is of. What is of another
        source is deleted."""
        said = _read_json(self._from)
        if said.get("source") != source:
            self.begin(source, "")
            return ""
        return str(said.get("revision", ""))

    def begin(self, source: str, revision: str) -> None:
        """Delete what there is, and note what comes next."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for folder in (self.files, self.parts):
            folder.mkdir(parents=True)
        self.note(source, revision)

    def note(self, source: str, revision: str) -> None:
        self._from.write_text(json.dumps({"source": source, "revision": revision}), encoding="utf-8")

    def finished(self, name: str) -> FetchedFile | None:
        """Return the record of a file that is whole; None for others."""
        said = _read_json(self._record_of(name))
        return FetchedFile(**said) if said and (self.files / name).is_file() else None

    def finish(self, file: FetchedFile) -> None:
        self._record_of(file.name).write_text(json.dumps(dataclasses.asdict(file)), encoding="utf-8")

    def become_whole(self, record: dict[str, Any]) -> None:
        """Make the files the model's directory, in one step."""
        (self.files / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _sync(self.files)
        self.files.rename(self._directory)
        _sync(self._directory.parent)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _record_of(self, name: str) -> Path:
        return self.parts / f"{name}.whole"


def record_of(directory: Path) -> dict[str, Any] | None:
    """Return what a whole model's directory says of itself. None if there is no such directory.

    Raises :class:`FetchError` for a directory that was not fetched, or of which files are missing.
    """
    if not directory.exists():
        return None
    record = _read_json(directory / RECORD)
    if not record:
        raise FetchError(f"{directory} is there and was not fetched by this command: give another directory")
    for file in record.get("files", ()):
        path = directory / file["name"]
        if not path.is_file() or path.stat().st_size != file["size"]:
            raise FetchError(
                f"{path} is missing or has no longer {file['size']} bytes: delete {directory}, then it is "
                "fetched again"
            )
    return record


@contextmanager
def locked(directory: Path, pace: Pace) -> Iterator[None]:
    """Hold the lock of a model's directory. Waits while another process has it."""
    path = directory.with_name(f".{directory.name}.lock")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise FetchError(f"{path} can't be written: {error.strerror}") from error
    try:
        is_waiting = False
        while not _try_lock(descriptor, path):
            if not is_waiting:
                log.info("another process fetches %s: waiting for it", directory)
                is_waiting = True
            pace.pause(str(directory), LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise FetchError(
            f"{path} can't be locked ({error.strerror}): give a directory of a file system that has locks"
        ) from error
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
