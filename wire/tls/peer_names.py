"""What a certificate says of its owner: one name for each role, of a pattern that all processes share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from wire.errors import ConfigError

PeerRole = Literal["router", "server", "operator"]
"""``server``: a prefill or decode server; ``operator``: a person or a job that drains servers."""
ROLES: tuple[PeerRole, ...] = get_args(PeerRole)
FIELD = "{role}"
DEFAULT_PATTERN = f"{FIELD}.twinfang"
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
)


@dataclass(frozen=True)
class PeerNames:
    """The DNS names by which processes know each other's role. A name has to be in the certificate's
    subjectAltName, whole: a wildcard there gives no role, since it would give all of them."""

    pattern: str = DEFAULT_PATTERN

    def __post_init__(self) -> None:
        if self.pattern.count(FIELD) != 1 or not _HOST_NAME.fullmatch(self.name("server")):
            raise ConfigError(
                f"`tls_names` {self.pattern!r} is no pattern of names: give a host name in lower case in "
                f"which {FIELD} stands once, as in {FIELD}.twinfang.example.com"
            )

    def name(self, role: PeerRole) -> str:
        return self.pattern.replace(FIELD, role)

    def roles(self, names: Iterable[str]) -> tuple[PeerRole, ...]:
        """Return the roles that a certificate for ``names`` gives."""
        given = frozenset(names)
        return tuple(role for role in ROLES if self.name(role) in given)


ROLE_NAMES = PeerNames()
"""Of the default pattern."""
