"""Fetches one file: tries again, continues where a connection was lost, checks the whole file."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from twinfang.fetch.checksum import Checksum
from twinfang.fetch.partial_file import DamagedFileError, PartialFile
from twinfang.fetch.source import Body, FetchError, InterruptedFetchError
from wire.errors import DeadlineError

log = logging.getLogger(__name__)

MAX_FRUITLESS = 8
"""A file is given up after so many tries in a row that brought no byte: about two minutes."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0

Open = Callable[[str, int, str], Body | None]
"""Opens a file of the source, as :meth:`twinfang.fetch.source.Source.open` does."""


class LeftFileError(FetchError):
    """The fetch of a file was ended because another one's had failed."""


@dataclass(frozen=True)
class FetchedFile:
    name: str
    size: int
    sha256: str
    checked_by: str
    """What its content was compared with."""


class Pace:
    """When fetches are to end: at a deadline, or as soon as one of them has failed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_s = time.monotonic() + timeout_s
        self._stop = threading.Event()

    def renewed(self) -> Pace:
        """Return a pace with the same deadline, for another try after a failure."""
        pace = Pace(self._timeout_s)
        pace._ends_s = self._ends_s
        return pace

    def stop(self) -> None:
        self._stop.set()

    def check(self, what: str) -> None:
        if self._stop.is_set():
            raise LeftFileError(f"{what} was left because another file could not be fetched")
        if time.monotonic() >= self._ends_s:
            raise DeadlineError(
                f"{what} has not come within {self._timeout_s:g} s: run the command again, which continues, "
                "or give a longer `timeout`"
            )

    def pause(self, what: str, seconds: float) -> None:
        self._stop.wait(min(seconds, max(0.0, self._ends_s - time.monotonic())))
        self.check(what)


def fetch_file(
    open_file: Open, name: str, parts: Path, target: Path, known: Checksum | None, pace: Pace
) -> FetchedFile | None:
    """Fetch a file to ``target``, and keep what comes in the folder ``parts`` until it is whole.

    A file that turns out damaged is fetched once more from its beginning. Return None if the source has no
    such file. Raises :class:`FetchError`, and :class:`DeadlineError`.
    """
    partial = PartialFile(parts, name, known)
    try:
        if not _fill(open_file, partial, pace):
            return None
        try:
            partial.check()
        except DamagedFileError as error:
            log.warning("%s: it is fetched once more", error.message)
            partial.discard()
            if not _fill(open_file, partial, pace):
                return None
            partial.check()
        partial.move_to(target)
    except OSError as error:
        raise FetchError(f"{name} can't be written to {parts}: {error.strerror}") from error
    checksum = partial.checksum
    checked_by = f"{checksum.kind} of the source" if checksum is not None else "its size"
    return FetchedFile(name, partial.length, partial.sha256, checked_by)


def _fill(open_file: Open, partial: PartialFile, pace: Pace) -> bool:
    """Fetch what is missing. Return whether the source has the file."""
    fruitless = 0
    while not partial.is_whole:
        before = partial.length
        try:
            body = open_file(partial.name, partial.length if partial.validator else 0, partial.validator)
            if body is None:
                return False
            with closing(body):
                _read(body, partial, pace)
        except InterruptedFetchError as error:
            fruitless = 0 if partial.length > before else fruitless + 1
            if fruitless >= MAX_FRUITLESS:
                raise FetchError(f"{error.message}; it was tried {fruitless} times") from error
            pause_s = max(error.retry_after_s, min(FIRST_PAUSE_S * 2**fruitless, MAX_PAUSE_S))
            log.info("%s; %d bytes are here, trying again", error.message, partial.length)
            pace.pause(partial.name, pause_s * random.uniform(0.75, 1.25))
    return True


def _read(body: Body, partial: PartialFile, pace: Pace) -> None:
    if body.start == 0:
        partial.begin(body.state)
    while data := body.read():
        partial.append(data)
        pace.check(partial.name)
    size = body.state.size
    if size is not None and partial.length < size:
        raise InterruptedFetchError(f"{partial.name} broke off at byte {partial.length} of {size}")
    if size is not None and partial.length > size:
        partial.discard()
        raise InterruptedFetchError(f"{partial.name} has more than the {size} bytes that were announced")
    partial.end()
