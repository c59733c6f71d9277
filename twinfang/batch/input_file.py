"""A batch's input: checked as a whole before anything is sent, then read again line by line.

Memory does not grow with the file: SQLite finds custom_ids that occur twice, in a temporary file of its own.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Container, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from twinfang.batch.request_line import BadLineError, RequestLine, parse_line
from twinfang.batch.unfinished import UnfinishedError
from wire.errors import TwinfangError

MAX_LINE_BYTES = 64 << 20
MAX_SHOWN_FAULTS = 10
MAX_MODELS = 100
"""More names of models are not looked at before the start."""
INSERTS = 1_000
UTF8_BOM = b"\xef\xbb\xbf"


class InputError(TwinfangError):
    """The input can't be read, or has lines that are no requests."""

    code = "bad_input"


@dataclass(frozen=True)
class CheckedInput:
    """An input whose lines are all requests, with different custom_ids."""

    path: Path
    digest: str
    """SHA-256 of the file, hexadecimal."""
    num_requests: int
    num_lines: int
    """Empty lines included."""
    models: dict[str, int]
    """The models that lines ask for, each with the first such line; at most :data:`MAX_MODELS`."""
    stamp: tuple[int, ...]

    def requests(self, done: Container[int]) -> Iterator[RequestLine]:
        """Yields the requests whose line numbers are not in ``done``. Raises :class:`UnfinishedError` as soon
        as the file is seen to have changed since it was checked."""
        with _opened(self.path) as file:
            for number, text in _lines(file, self.path):
                if number in done or not text.strip():
                    continue
                if _stamp(file, self.path) != self.stamp:
                    raise UnfinishedError(
                        f"{self.path} has changed while the batch ran; put it back as it was"
                    )
                yield parse_line(number, text)


def check_input(path: Path) -> CheckedInput:
    """Reads the whole input. Raises :class:`InputError` that names the lines which are no requests."""
    digest = hashlib.sha256()
    faults: list[str] = []
    num_faults = num_requests = number = 0
    models: dict[str, int] = {}
    with _opened(path) as file, closing(_CustomIds()) as ids:
        stamp = _stamp(file, path)
        for number, text in _lines(file, path, digest):
            if not text.strip():
                continue
            try:
                request = parse_line(number, text)
            except BadLineError as error:
                num_faults += 1
                faults += [f"line {number} {error}"] if num_faults <= MAX_SHOWN_FAULTS else []
                continue
            num_requests += 1
            ids.add(number, request.custom_id)
            if request.model is not None and len(models) < MAX_MODELS:
                models.setdefault(request.model, number)
        repeated = ids.repeated()
        if _stamp(file, path) != stamp:
            raise InputError(f"{path} is still being written: start the batch when it is complete")
    if num_faults:
        raise InputError(_report(path, num_faults, faults))
    if repeated:
        raise InputError(f"{path}: {'; '.join(repeated)}: give each line a custom_id of its own")
    if not num_requests:
        raise InputError(f"{path} has no line: expected one request a line")
    return CheckedInput(path, digest.hexdigest(), num_requests, number, models, stamp)


def _report(path: Path, num_faults: int, faults: list[str]) -> str:
    more = f"; {num_faults - len(faults):,} more lines are no requests" if num_faults > len(faults) else ""
    return f"{path}: {'; '.join(faults)}{more}"


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error


def _lines(file: BinaryIO, path: Path, digest: hashlib._Hash | None = None) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(text) > MAX_LINE_BYTES:
                raise InputError(f"{path}: line {number} has more than {MAX_LINE_BYTES >> 20} MiB")
            if digest is not None:
                digest.update(text)
            yield number, text.removeprefix(UTF8_BOM) if number == 1 else text
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from error


def _stamp(file: BinaryIO, path: Path) -> tuple[int, ...]:
    """Returns what changes when somebody writes to the file, or puts another file in its place."""
    try:
        now = path.stat()
    except OSError as error:
        raise InputError(f"{path} can't be read any more: {error.strerror}") from error
    return now.st_size, now.st_mtime_ns, now.st_ino, os.fstat(file.fileno()).st_ino


class _CustomIds:
    """All custom_ids, in a temporary file that disappears with the process."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE ids (line INTEGER, custom_id TEXT)")
        self._database.execute("BEGIN")
        self._pending: list[tuple[int, str]] = []

    def add(self, line: int, custom_id: str) -> None:
        self._pending.append((line, custom_id))
        if len(self._pending) == INSERTS:
            self._flush()

    def repeated(self) -> list[str]:
        """Returns a text for each custom_id that occurs more than once, the first ones."""
        self._flush()
        rows = self._database.execute(
            "SELECT custom_id, min(line), max(line), count(*) FROM ids GROUP BY custom_id "
            f"HAVING count(*) > 1 ORDER BY min(line) LIMIT {MAX_SHOWN_FAULTS}"
        )
        return [
            f"lines {first} and {last} have the same custom_id {custom_id!r}"
            + (f", as {count - 2:,} others" if count > 2 else "")
            for custom_id, first, last, count in rows
        ]

    def _flush(self) -> None:
        self._database.executemany("INSERT INTO ids VALUES (?, ?)", self._pending)
        self._pending.clear()

    def close(self) -> None:
        self._database.close()
