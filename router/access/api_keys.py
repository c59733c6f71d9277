"""API keys: what one looks like, what is kept of it, and how one is found again.

A key is 256 random bits, so its SHA-256 can be published: nobody finds a key by trying, however fast a try
is. Slow or salted hashes are for what people choose, and one of 100 ms on each request would only serve those
who want the router to be busy. See docs/decisions.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "twinfang-"
"""Lets scanners of code and logs find keys that were leaked."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Ends up in labels of metrics, in the admin API and in logs."""


@dataclass(frozen=True)
class ApiKey:
    """What is known of a key: all but the key."""

    name: str
    digest: bytes
    """SHA-256 of the key, 32 bytes."""
    min_priority: int | None = None
    """The earliest priority that its requests may ask for, and theirs if they ask for none and it is above
    0."""


NOBODY = ApiKey("", b"")
"""Whose requests are those of a router without keys: they may ask for any priority."""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ApiKeys:
    """Finds the key that a client presents."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """Takes as long whichever key it is, and if it is none."""
        digest = digest_of(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found
