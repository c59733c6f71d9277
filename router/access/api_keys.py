"""API keys: what they look like, what the router stores of each key, and how it recognises a key.

A key is 256 random bits, so its SHA-256 may be public: nobody can find the key by trying, however fast one
try is. Slow or salted hashes are for passwords that people choose. A hash that takes 100 ms for each request
would only help attackers who want to keep the router busy. See docs/decisions.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from router.access.key_limits import KeyLimits
from router.access.role import Role

PREFIX = "twinfang-"
"""Lets scanners of code and logs find keys that were leaked."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A key's name. It appears in labels of metrics, in the admin API and in logs."""


@dataclass(frozen=True)
class ApiKey:
    """What the router knows of a key, without the key itself. Bearer tokens of an issuer and the admin token
    become such keys too (:mod:`router.access.credentials`)."""

    name: str
    digest: bytes
    """SHA-256 of the key, 32 bytes. Empty if it is none of the file."""
    min_priority: int | None = None
    """The earliest priority (the lowest number) that the key's requests may ask for. If this number is above
    0, it is also the priority of requests that ask for none."""
    limits: KeyLimits | None = None
    """How much the key's requests may use; None: as much as they like. Keys of one name share what is
    counted."""
    role: Role | None = None
    """What the key may do through the admin API; None: nothing."""


NOBODY = ApiKey("", b"")
"""The owner of all requests to a router without keys. They may ask for any priority."""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ApiKeys:
    """Finds the key that a client sends."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def described(self) -> set[str]:
        """Return a line for each key: its name, what it may do, and the beginning of its digest, which tells
        keys of one name apart."""
        return {_described(key) for key in self._keys}

    def find(self, presented: str) -> ApiKey | None:
        """Return the key, or None. The search takes the same time for every valid key and for a wrong one."""
        digest = digest_of(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _described(key: ApiKey) -> str:
    options = [("min_priority", key.min_priority), ("role", key.role), *(key.limits or ())]
    told = [f"{name}={value}" for name, value in options if value is not None]
    return " ".join([key.name, key.digest.hex()[:12], *told])
