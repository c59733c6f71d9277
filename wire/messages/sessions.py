"""Sessions: requests that continue one another, such as the turns of a conversation. Servers know them by
names that routers make."""

from __future__ import annotations

from typing import Literal

from wire.codec import message
from wire.errors import WireError

NAME_BYTES = 16
"""A name is this many bytes, in hexadecimal digits."""
MAX_OWNER_CHARS = 256
MAX_RETAIN_S = 86_400.0

SessionAction = Literal["retain", "let_go", "release", "prefetch", "fork"]
"""``retain``: keep the session's newest starts in host memory for a time. ``let_go``: end that. ``release``:
end that, and give the session's starts up before all others. ``prefetch``: bring its newest start back to the
device. ``fork``: let another session begin from its newest starts."""


def check_session(name: str) -> None:
    """Raises :class:`WireError` if ``name`` is neither a session's name nor empty."""
    if len(name) not in (0, 2 * NAME_BYTES):
        raise WireError(f"session: expected a name of {2 * NAME_BYTES} characters, got {len(name)}")


@message
class TendSession:
    """Asks a server to do something with the starts of a session."""

    session: str
    action: SessionAction
    owner: str = ""
    """Whose quota the retained starts count in."""
    for_s: float = 0.0
    """How long they are retained."""
    into: str = ""
    """The session that begins with a fork."""

    def __post_init__(self) -> None:
        check_session(self.session)
        check_session(self.into)
        if (self.action == "fork") != bool(self.into) or self.into == self.session != "":
            raise WireError("into: a fork names another session, and nothing else does")
        if len(self.owner) > MAX_OWNER_CHARS:
            raise WireError(f"owner: at most {MAX_OWNER_CHARS} characters, got {len(self.owner)}")
        if not 0 <= self.for_s <= MAX_RETAIN_S:
            raise WireError(f"for_s: expected 0 to {MAX_RETAIN_S:.0f} seconds, got {self.for_s}")


@message
class SessionNews:
    """What a server has done with the starts of a session."""

    num_starts: int
    """Starts that are retained now, that were given up, that the device has now, or that the fork begins
    from."""
    num_tokens: int
    """Tokens up to the longest of them."""
    over_quota: bool = False
    """Whether a start was not retained because its owner, or all owners together, have retained enough."""
