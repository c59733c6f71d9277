"""The cache salt, and whose cached prompts have it. Routers make salts; servers cache prompts under them.

| salt | prompts of | owner |
|---|---|---|
| ``key NAME GIVEN`` | one API key. ``GIVEN`` is the salt that the client has sent | ``key NAME`` |
| ``given GIVEN`` | all requests without a key that have sent this salt | ``given GIVEN`` |
| empty | all other requests | empty |

Names of keys have no spaces. So no salt belongs to two owners, and a cached block, whose key is chained to
one salt, belongs to one owner.
"""

from __future__ import annotations


def owner_of_key(name: str) -> str:
    """Returns the owner of the prompts of an API key."""
    return f"key {name}"


def owner_of_given(given: str) -> str:
    """Returns the owner of prompts without a key, and their salt; empty if no salt was sent."""
    return f"given {given}" if given else ""


def salt_of_key(name: str, given: str) -> str:
    """Returns the salt of an API key's requests."""
    return f"{owner_of_key(name)} {given}"


def owner_of(salt: str) -> str:
    """Returns the owner of the prompts with a salt."""
    return " ".join(salt.split(" ", 2)[:2]) if salt.startswith("key ") else salt
