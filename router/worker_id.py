"""What the admin API calls a server, and where servers come from."""

from __future__ import annotations

import hashlib
from typing import Literal

from wire.handoff import Role

PoolRole = Literal["prefill", "decode"]
"""The pool that a server is in. A server that does both stands in that of decode servers."""
ROLES: dict[PoolRole, tuple[Role, ...]] = {"prefill": ("prefill", "both"), "decode": ("decode", "both")}
"""What servers of a pool may say that they are."""
AddedBy = Literal["flag", "api", "discovery"]


def worker_id(role: PoolRole, address: str) -> str:
    """The same for one address on every router and after every restart: ``decode-1a2b3c``."""
    return f"{role}-{hashlib.blake2b(address.encode(), digest_size=3).hexdigest()}"
