"""A batch's answers and errors, two files that are the only record of what is done.

A line is appended with one write when its answer is whole, so a process that is killed leaves at most one
torn line, the last one; the next call removes it. The files are flushed to the disk every second. So a
machine that loses power forgets at most the answers of the last second, and their requests are sent again.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from twinfang.batch.answer_line import DIGEST_LEN, may_be_torn, parse_answer
from twinfang.batch.input_file import CheckedInput
from twinfang.batch.unfinished import UnfinishedError
from wire.errors import TwinfangError

MAX_LINE_BYTES = 512 << 20


class OutputError(TwinfangError):
    """A file of answers can't be written, or is not one of this batch."""

    code = "bad_output"


class DoneLines:
    """The numbers of the lines that are done; a byte for each line of the input."""

    def __init__(self, num_lines: int) -> None:
        self._is_done = bytearray(num_lines + 1)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and bool(self._is_done[number])

    def add(self, number: int) -> bool:
        """Returns whether the line is new. A number that the input does not have is not."""
        if number >= len(self._is_done) or self._is_done[number]:
            return False
        self._is_done[number] = True
        return True


@dataclass
class _File:
    path: Path
    file: BinaryIO
    size: int
    """Bytes of whole lines."""
    synced_size: int = 0

    def append(self, line: bytes) -> None:
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self.file.fileno(), rest) :]
        except OSError as error:
            os.ftruncate(self.file.fileno(), self.size)
            raise UnfinishedError(
                f"{self.path} can't be written: {error.strerror}; all answers before that are kept"
            ) from error
        self.size += len(line)

    def sync(self) -> None:
        size = self.size  # more may be appended meanwhile, by another thread
        if size == self.synced_size:
            return
        try:
            os.fsync(self.file.fileno())
            self.synced_size = size
        except OSError as error:
            raise UnfinishedError(f"{self.path} can't be flushed to the disk: {error.strerror}") from error


class AnswerFiles:
    """The files of answers and errors. Errors may go to the file of answers, if both have one path. The file
    of errors appears with the first error.

    Raises :class:`OutputError` for files that another process writes, or that are not of this input.
    """

    def __init__(self, output: Path, errors: Path, checked: CheckedInput) -> None:
        self.done = DoneLines(checked.num_lines)
        self.num_answers = self.num_errors = 0
        self.errors_path = errors
        self._checked = checked
        self._files: dict[Path, _File] = {}
        try:
            self._output = self._open(output)
            if errors == output or errors.exists():
                self._open(errors)
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        """The lines that have an answer or an error."""
        return self.num_answers + self.num_errors

    def add(self, number: int, line: bytes, *, is_error: bool) -> None:
        """Appends the line. It survives the end of this process. Raises :class:`UnfinishedError` if the disk
        is full."""
        file = self._open(self.errors_path) if is_error else self._output
        file.append(line)
        self._count(number, is_error=is_error)

    def sync(self) -> None:
        """Flushes to the disk what was added. Raises :class:`UnfinishedError`."""
        for file in list(self._files.values()):
            file.sync()

    def close(self) -> None:
        """Closes the files, and with that gives them free for another process."""
        for file in self._files.values():
            file.file.close()

    def _count(self, number: int, *, is_error: bool) -> bool:
        self.num_errors += is_error
        self.num_answers += not is_error
        return self.done.add(number)

    def _open(self, path: Path) -> _File:
        if path in self._files:
            return self._files[path]
        try:
            file = os.fdopen(
                os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", 0
            )
        except OSError as error:
            raise OutputError(f"{path} can't be opened: {error.strerror}") from error
        opened = self._files[path] = _File(path, file, 0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened.size = self._read(path)
            os.ftruncate(file.fileno(), opened.size)
            _sync_folder(path.parent)
        except BlockingIOError:
            raise OutputError(
                f"{path} is being written by another `twinfang batch`: wait for its end"
            ) from None
        except OSError as error:
            raise OutputError(f"{path} can't be used: {error.strerror}") from error
        return opened

    def _read(self, path: Path) -> int:
        """Marks the lines that the file has as done. Returns the length of its whole lines."""
        size = number = 0
        with path.open("rb") as file:
            while text := file.readline(MAX_LINE_BYTES):
                number += 1
                if not text.endswith(b"\n") and may_be_torn(text):
                    break
                self._take(text, f"line {number} of {path}")
                size += len(text)
        return size

    def _take(self, text: bytes, where: str) -> None:
        line = parse_answer(text) if text.endswith(b"\n") else None
        if line is None:
            raise OutputError(f"{where} is no answer of a batch: give a new file as `output` (or `errors`)")
        if line.digest != self._checked.digest[:DIGEST_LEN]:
            raise OutputError(
                f"{where} answers another input than {self._checked.path}, or that file has changed since: "
                "put it back as it was, or give a new file as `output` (and `errors`)"
            )
        if not self._count(line.number, is_error=line.is_error):
            raise OutputError(
                f"{where} answers line {line.number} of {self._checked.path}, which is answered already or "
                "does not exist: remove the line"
            )


def _sync_folder(folder: Path) -> None:
    """Makes the name of a new file survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
