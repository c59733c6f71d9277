"""The public keys of a token issuer: a JSON Web Key Set (RFC 7517), as its file or address has it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jwt import PyJWK
from jwt.exceptions import PyJWTError

MAX_KEYS = 100
PUBLIC = ("kty", "crv", "n", "e", "x", "y")
"""The members of a key that are used. So a private key that somebody has put into the set is never loaded."""
ALGORITHMS: Mapping[tuple[str, str | None], tuple[str, ...]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""The algorithms that may sign a token, by kind of key. All have a public key. So a token without a
signature, or one that is signed with a public key as if it were a password, is never accepted."""


@dataclass(frozen=True)
class PublicKey:
    """One key, and the algorithms that it may be used with."""

    kid: str
    algorithms: tuple[str, ...]
    members: Mapping[str, Any]
    _made: dict[str, PyJWK] = field(default_factory=dict, compare=False, repr=False)

    def for_algorithm(self, name: str) -> PyJWK:
        """Return the key for one of :attr:`algorithms`."""
        if name not in self._made:
            self._made[name] = PyJWK(dict(self.members), algorithm=name)
        return self._made[name]


@dataclass(frozen=True)
class PublicKeys:
    """The keys that are valid at one time."""

    keys: tuple[PublicKey, ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> PublicKeys:
        """Return the keys that can be used. Raises :class:`ValueError` if there is none."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError("it is not JSON") from error
        listed = given.get("keys") if isinstance(given, dict) else None
        if not isinstance(listed, list):
            raise ValueError('it is not a key set: expected {"keys": [...]}')
        if len(listed) > MAX_KEYS:
            raise ValueError(f"it has {len(listed)} keys, the limit is {MAX_KEYS}")
        keys = tuple(key for key in map(_usable, listed) if key is not None)
        if not keys:
            raise ValueError(
                f"none of its {len(listed)} keys can verify a signature: expected RSA keys of at least 2,048 "
                "bits, or keys of the curves P-256, P-384, P-521 or Ed25519"
            )
        return cls(keys)

    def find(self, kid: str | None) -> PublicKey | None:
        """Return the key that a token names. A token that names none has to be of the only key."""
        if kid is None:
            return self.keys[0] if len(self.keys) == 1 else None
        return next((key for key in self.keys if key.kid == kid), None)

    @property
    def names(self) -> list[str]:
        return sorted(key.kid for key in self.keys)


def _usable(given: Any) -> PublicKey | None:
    if not isinstance(given, dict) or given.get("use", "sig") != "sig" or not _verifies(given.get("key_ops")):
        return None
    kind, curve = given.get("kty"), given.get("crv")
    if not isinstance(kind, str) or not (curve is None or isinstance(curve, str)):
        return None
    allowed = ALGORITHMS.get((kind, curve), ())
    if "alg" in given:
        allowed = tuple(name for name in allowed if name == given["alg"])
    kid = given.get("kid", "")
    key = PublicKey(
        kid if isinstance(kid, str) else "",
        allowed,
        {name: given[name] for name in PUBLIC if name in given},
    )
    try:
        made = [key.for_algorithm(name) for name in allowed]
        is_weak = any(one.Algorithm.check_key_length(one.key) for one in made)
    except (PyJWTError, ValueError, TypeError):
        return None
    return None if is_weak or not made else key


def _verifies(operations: Any) -> bool:
    return operations is None or (isinstance(operations, Iterable) and "verify" in operations)
