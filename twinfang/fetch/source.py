"""What every source of a model's files can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from twinfang.fetch.checksum import Checksum
from wire.errors import TwinfangError


class FetchError(TwinfangError):
    """A model can't be fetched. Trying again without a change would not help."""

    code = "fetch_failed"


class InterruptedFetchError(FetchError):
    """A connection was lost, or the source has no time now. Trying again may help."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """The source asks for a pause of this length."""


@dataclass(frozen=True)
class FileState:
    """What a source says of a file."""

    size: int | None
    """In bytes. None if the source does not say."""
    validator: str = ""
    """Differs when the content does, so that a part can be continued. Empty if the source has none."""
    checksum: Checksum | None = None
    revision: str = ""
    """The version of the whole model that the file is of. Empty if the source has no versions."""


class Body(Protocol):
    """The bytes of a file, from :attr:`start` to its end."""

    state: FileState
    start: int

    def read(self) -> bytes:
        """Return the next bytes; nothing at the end. Raises :class:`InterruptedFetchError`."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """Where files are. Used by several threads at once."""

    name: str
    """For messages and records: without secrets."""

    def listing(self) -> Mapping[str, Checksum | None] | None:
        """Return the names of all files, with their checksums if they are known. Return None if the source
        can't be listed: then opening a file shows whether it is there."""
        ...

    def open(self, name: str, start: int = 0, validator: str = "") -> Body | None:
        """Return a file from byte ``start`` on, or from 0 if it is no longer the file of ``validator``.
        Return None if there is no such file. Raises :class:`FetchError`."""
        ...
