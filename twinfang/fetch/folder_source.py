"""Files of a folder of this machine, for example of a network file system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twinfang.fetch.checksum import Checksum
from twinfang.fetch.source import Body, FetchError, FileState, InterruptedFetchError

PIECE_BYTES = 4 << 20


class FolderSource:
    """Implements :class:`twinfang.fetch.source.Source`."""

    def __init__(self, folder: Path) -> None:
        self.name = f"file:{folder}"
        self._folder = folder
        if not folder.is_dir():
            raise FetchError(f"{folder} is no directory of this machine: give one that has a model's files")

    def listing(self) -> Mapping[str, Checksum | None]:
        return {path.name: None for path in self._folder.iterdir() if path.is_file()}

    def open(self, name: str, start: int = 0, validator: str = "") -> Body | None:
        path = self._folder / name
        return _FileBody(path, start, validator) if path.is_file() else None


class _FileBody:
    def __init__(self, path: Path, start: int, validator: str) -> None:
        try:
            self._file = path.open("rb")
            found = path.stat()
        except OSError as error:
            raise FetchError(f"{path} can't be read: {error.strerror}") from error
        self.state = FileState(found.st_size, f"{found.st_mtime_ns}-{found.st_size}")
        self.start = start if validator == self.state.validator else 0
        self._file.seek(self.start)

    def close(self) -> None:
        self._file.close()

    def read(self) -> bytes:
        try:
            return self._file.read(PIECE_BYTES)
        except OSError as error:
            raise InterruptedFetchError(f"{self._file.name} can't be read: {error.strerror}") from error
