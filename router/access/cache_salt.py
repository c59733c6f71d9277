"""The cache salt of a request: whose cached prompts it may share.

How soon the first token comes tells whether a prompt's beginning is cached. If keys shared cached prompts,
one key could find out by trying what another key has asked. So the salt comes from the key that a request was
let in with. What the client sends is mixed in: it divides the prompts of one key further, and never reaches
those of another.
"""

from __future__ import annotations

from router.access.api_keys import ApiKey
from router.config import CacheIsolation
from wire.messages.cache_salt import owner_of_given, salt_of_key


def cache_salt(key: ApiKey, given: str, isolation: CacheIsolation) -> str:
    """Return the salt under which servers cache a request's prompt; empty: shared with all such requests.

    ``given`` is what the client has sent. Salts of two keys always differ, and no salt that a client sends
    equals that of a key, also through another router of the same servers, unless that is of a release before
    0.3.0, which passed salts on as they came. Names of keys have no spaces.
    """
    if isolation == "key" and key.name:
        return salt_of_key(key.name, given)
    return owner_of_given(given)
