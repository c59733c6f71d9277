"""How pages and headers are sealed, so that other bytes than were written are noticed.

With a key the bytes are encrypted by AES-256-GCM, and the check is its tag. Without one the bytes stay as
they are, and the check is a checksum. Both bind the bytes to their place: segment, record and page.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from wire.errors import ConfigError

CHECK_BYTES = 16
KEY_BYTES = 32
NO_KEY = b"\0" * 8
"""In place of a key's name."""
HEADER = 0xFFFF_FFFF
"""In place of a page's number: the record's header."""
PURGED = 0xFFFF_FFFE
"""In place of a page's number: what the header of a purged record says instead."""
TAG_BYTES = 16

Bytes = bytes | memoryview
_PLACE = struct.Struct("<QI")


class Seal(Protocol):
    """Seals the pages of one segment. A place is sealed only once."""

    def close(self, record: int, page: int, data: Bytes) -> tuple[Bytes, bytes]:
        """Returns the bytes to write and their check, for a page of the record at offset ``record``."""

    def open(self, record: int, page: int, data: Bytes, check: bytes) -> Bytes | None:
        """Returns the bytes that were sealed; None: these are others."""

    def tag(self, name: str) -> bytes:
        """Returns what stands for a name in this segment: a hash with the segment's key."""


class Checksum:
    """Seals by XXH3 with 128 bits. It notices damage, not an attacker.

    A page of 16 KB takes half a microsecond, for which the interpreter's lock is kept. To give up the lock
    for each page costs the engine's thread far more: it has to wait for it again each time.
    """

    def __init__(self, segment: bytes) -> None:
        self._seed = int.from_bytes(segment[:8], "little")
        self._tag_key = segment

    def close(self, record: int, page: int, data: Bytes) -> tuple[Bytes, bytes]:
        return data, self._check(record, page, data)

    def open(self, record: int, page: int, data: Bytes, check: bytes) -> Bytes | None:
        return data if self._check(record, page, data) == check else None

    def _check(self, record: int, page: int, data: Bytes) -> bytes:
        # Records begin at multiples of 512: within 2 TiB each place has a seed of its own.
        place = (record >> 9) << 32 | page
        return xxhash.xxh3_128_digest(data, self._seed ^ place)

    def tag(self, name: str) -> bytes:
        return _tag(self._tag_key, name)


class Cipher:
    """Seals by encryption. Each segment has a key of its own, so a place is a nonce."""

    def __init__(self, key: bytes, segment: bytes) -> None:
        self._cipher = AESGCM(_derived(key, segment, b"twinfang file cache"))
        self._tag_key = _derived(key, segment, b"twinfang file cache owners")

    def close(self, record: int, page: int, data: Bytes) -> tuple[Bytes, bytes]:
        sealed = memoryview(self._cipher.encrypt(_PLACE.pack(record, page), data, None))
        return sealed[:-CHECK_BYTES], bytes(sealed[-CHECK_BYTES:])

    def open(self, record: int, page: int, data: Bytes, check: bytes) -> Bytes | None:
        try:
            return self._cipher.decrypt(_PLACE.pack(record, page), bytes(data) + check, None)
        except InvalidTag:
            return None

    def tag(self, name: str) -> bytes:
        return _tag(self._tag_key, name)


def _derived(key: bytes, segment: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=segment, info=info).derive(key)


def _tag(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=TAG_BYTES, key=key).digest()


class Sealer:
    """Makes the seal of each segment, by the operator's key if there is one."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key

    @classmethod
    def from_file(cls, path: Path | None) -> Sealer:
        """Raises :class:`ConfigError` if the file can't be read, or is not 32 bytes or 64 hex digits."""
        if path is None:
            return cls()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"`file_cache_key_file` {path} can't be read: {error.strerror}") from error
        if len(content) == KEY_BYTES:
            return cls(content)
        try:
            key = bytes.fromhex(content.decode().strip())
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"`file_cache_key_file` {path} holds no key: it needs {KEY_BYTES} bytes or "
                f"{2 * KEY_BYTES} hex digits; make one with: openssl rand -hex {KEY_BYTES}"
            )
        return cls(key)

    @property
    def name(self) -> bytes:
        """Eight bytes that differ between keys; ``NO_KEY`` without one."""
        return NO_KEY if self._key is None else hashlib.blake2b(self._key, digest_size=8).digest()

    def of(self, segment: bytes) -> Seal:
        """Returns the seal of the segment with this id."""
        return Checksum(segment) if self._key is None else Cipher(self._key, segment)
