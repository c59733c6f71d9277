"""Deleting cached prompts: of one owner, or by their age, or all."""

from __future__ import annotations

from wire.codec import message
from wire.errors import WireError
from wire.messages.cache_salt import owner_of

MAX_OWNER_CHARS = 2048
"""A name of a key has at most 255 characters, a salt that clients send 1024."""
MAX_WAIT_S = 600.0


@message
class PurgePrefixes:
    """Asks a server to delete cached prompts: from its device, from host memory and from files.

    The answer comes when they are gone. Requests of the owner that are under way are waited for first.
    """

    owner: str | None = None
    """Whose prompts (:mod:`wire.messages.cache_salt`); None: everybody's."""
    older_than_s: float | None = None
    """Only files that were begun so many seconds ago or earlier; what memory holds stays. Not with
    ``owner``."""
    wait_s: float = 0.0
    """How long requests under way are waited for at most."""

    def __post_init__(self) -> None:
        if self.owner is not None and len(self.owner) > MAX_OWNER_CHARS:
            raise WireError(f"owner: at most {MAX_OWNER_CHARS} characters, got {len(self.owner)}")
        if self.older_than_s is not None and not (self.older_than_s >= 0 and self.owner is None):
            raise WireError(f"older_than_s: expected at least 0 and no owner, got {self.older_than_s}")
        if not 0 <= self.wait_s <= MAX_WAIT_S:
            raise WireError(f"wait_s: expected 0 to {MAX_WAIT_S:.0f} seconds, got {self.wait_s}")

    def covers(self, salt: str) -> bool:
        """Whether prompts with this cache salt are to be deleted from memory."""
        return self.older_than_s is None and (self.owner is None or owner_of(salt) == self.owner)


@message
class PurgeNews:
    """What a server has deleted."""

    num_starts: int
    """Starts on the device and in host memory. A start that both had counts twice."""
    num_records: int
    """Records in files."""
    num_bytes: int
    """Bytes of these records, overwritten or deleted with their files."""
    num_under_way: int = 0
    """Requests of the owner that did not end in time. What they have computed is not deleted."""
