"""The keys of cached prefixes, and the messages by which a server reports which prefixes it has.

Each full block's key is a hash chained over all tokens up to its end, the cache salt and the model. Servers
and routers compute the same keys, so a router knows what a server's cache can serve without seeing the cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from wire.codec import ignorable, message

KEY_BYTES = 16


def root_key(fingerprint: str, salt: str) -> bytes:
    """Returns the key that the first block's key is chained to."""
    root = hashlib.blake2b(fingerprint.encode(), digest_size=KEY_BYTES).digest()
    return hashlib.blake2b(root + salt.encode(), digest_size=KEY_BYTES).digest() if salt else root


def following_keys(key: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Returns the keys of all full blocks of ``token_ids``, which follow the block with ``key``."""
    keys: list[bytes] = []
    tokens = array("q", token_ids)
    data, block_bytes = tokens.tobytes(), block_size * tokens.itemsize
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        key = hashlib.blake2b(key + data[start : start + block_bytes], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def block_keys(token_ids: Sequence[int], *, block_size: int, fingerprint: str, salt: str) -> list[bytes]:
    """Returns the keys of all full blocks, from the start."""
    return following_keys(root_key(fingerprint, salt), token_ids, block_size)


@message
class GetPrefixes:
    """Asks a server for the prefixes that its cache can serve."""

    since: int | None = None
    """The version that the sender has; None if it has nothing."""


@message
class TierNews:
    """Keys of starts that a server has only in a slower tier than its device, and what reading one costs.

    The server computes this many tokens while it reads a start back: ``start_cost``, and ``token_cost`` for
    each token whose KV the device lacks.
    """

    tier: str
    """``host``: host memory. ``files``: files. Later releases may have others, which are counted in the same
    way."""
    added: tuple[bytes, ...]
    start_cost: float
    token_cost: float


@message
class PrefixNews:
    """Keys of blocks at whose end the server's cache has a state and the KV of all earlier tokens."""

    version: int
    """The version that the receiver has after it has applied this message."""
    is_whole: bool
    """Whether ``added`` replaces all keys that the receiver had before."""
    added: tuple[bytes, ...] = ()
    """Keys of starts that the device has."""
    removed: tuple[bytes, ...] = ()
    """Keys of starts that the device no longer has."""
    tiers: tuple[TierNews, ...] = ignorable(())
    """The slower tiers. A key that is added there may be in ``removed`` too, which comes first."""
