"""What a source says about a file's content."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

ChecksumKind = Literal["sha256", "git", "md5"]
_LENGTHS: dict[int, ChecksumKind] = {64: "sha256", 40: "git", 32: "md5"}


@dataclass(frozen=True)
class Checksum:
    kind: ChecksumKind
    """``git``: SHA-1 of git's header for a file of that size, and of the file."""
    digest: str
    """In hexadecimal digits."""

    @classmethod
    def of_digits(cls, text: str, *kinds: ChecksumKind) -> Checksum | None:
        """Return the checksum that hexadecimal digits are, by their number. Return None for other text, and
        for a checksum that is none of ``kinds``."""
        kind = _LENGTHS.get(len(text)) if re.fullmatch(r"[0-9a-fA-F]+", text) else None
        return cls(kind, text.lower()) if kind in kinds and kind is not None else None


class Digests:
    """SHA-256 of a file whose bytes come piece by piece, and a checksum of another kind if one is wanted."""

    def __init__(self, wanted: Checksum | None, size: int | None) -> None:
        self._sha256 = hashlib.sha256()
        self._other = None
        if wanted is not None and wanted.kind == "md5":
            self._other = hashlib.md5(usedforsecurity=False)
        elif wanted is not None and wanted.kind == "git":
            self._other = hashlib.sha1(b"blob %d\0" % (size or 0), usedforsecurity=False)

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._other is not None:
            self._other.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def of(self, wanted: Checksum) -> str:
        """Return the digest to compare with ``wanted``, which must be the checksum given at the start or a
        SHA-256."""
        if wanted.kind == "sha256":
            return self.sha256
        assert self._other is not None
        return self._other.hexdigest()
