"""The bytes of a file that have come so far, and what the source said of them.

The bytes are in ``NAME.part``, and the source's words in ``NAME.note``. Both outlive the process, so that a
later one continues there.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from twinfang.fetch.checksum import Checksum, Digests
from twinfang.fetch.safetensors_size import safetensors_size
from twinfang.fetch.source import FetchError, FileState

PIECE_BYTES = 4 << 20


class DamagedFileError(FetchError):
    """A file is not what its source, or the file itself, says that it is."""


class PartialFile:
    """Used by one thread. ``known`` is a checksum that is known before the file is opened."""

    def __init__(self, folder: Path, name: str, known: Checksum | None) -> None:
        self.name = name
        self._path, self._note = folder / f"{name}.part", folder / f"{name}.note"
        self._known = known
        self._state = FileState(None)
        self.length = 0
        self._digests = Digests(None, None)
        self._take_up()

    @property
    def validator(self) -> str:
        return self._state.validator

    @property
    def is_whole(self) -> bool:
        return self._state.size is not None and self.length == self._state.size

    @property
    def checksum(self) -> Checksum | None:
        return self._known or self._state.checksum

    @property
    def sha256(self) -> str:
        return self._digests.sha256

    def begin(self, state: FileState) -> None:
        """Forget what has come so far: the source begins with the first byte."""
        self._state, self.length = state, 0
        self._digests = Digests(self.checksum, state.size)
        self._note.unlink(missing_ok=True)
        self._path.write_bytes(b"")
        if state.validator and state.size is not None:
            self._note.write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")

    def append(self, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data)
        self._digests.update(data)
        self.length += len(data)

    def end(self) -> None:
        """Note that the file ends here, if the source did not say how long it is."""
        if self._state.size is None:
            self._state = dataclasses.replace(self._state, size=self.length)

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
        self._state, self.length = FileState(None), 0

    def check(self) -> None:
        """Raise :class:`DamagedFileError` if the whole file is not what it should be."""
        wanted = self.checksum
        if wanted is not None and self._digests.of(wanted) != wanted.digest:
            raise DamagedFileError(
                f"{self.name} has the {wanted.kind} checksum {self._digests.of(wanted)}, and its source says "
                f"{wanted.digest}"
            )
        if self.name.endswith(".safetensors"):
            size = safetensors_size(self._path)
            if size != self.length:
                says = "has no header of safetensors" if size is None else f"should have {size} by its header"
                raise DamagedFileError(f"{self.name} has {self.length} bytes, and {says}")

    def move_to(self, target: Path) -> None:
        """Give the file its name, once its bytes are on the disk."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        self._path.rename(target)
        self._note.unlink(missing_ok=True)

    def _take_up(self) -> None:
        """Continue with what an earlier process has left, if it can be continued."""
        try:
            said = json.loads(self._note.read_text(encoding="utf-8"))
            checksum = said.pop("checksum")
            state = FileState(**said, checksum=Checksum(**checksum) if checksum else None)
            length = self._path.stat().st_size
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return
        if state.size is None or length > state.size:
            return
        self._state = state
        self._digests = Digests(self.checksum, state.size)
        with self._path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                self._digests.update(piece)
                self.length += len(piece)
